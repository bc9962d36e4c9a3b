"""Tasks with two parts of a reward."""

import verifiers.v1 as vf


class WordData(vf.TaskData):
    answer: str
    turns: int = 1
    trick: str = ""


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.trick == "reward raises":
            raise KeyError("no such word")
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(0 < len(trace.last_reply or "") < 8)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class WordConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("lamp", "kestrel", "chair")


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self):
        for word in self.config.words:
            yield WordTask(WordData(prompt=f"Say {word}.", answer=word), self.config.task)
