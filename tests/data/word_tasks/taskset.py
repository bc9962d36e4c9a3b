"""Tasks with two parts of a reward."""

import itertools
import os

import verifiers.v1 as vf

COUNT = itertools.count()
PLANTED = {"never pays": lambda: 0.0, "pays for nothing": lambda: 1.0, "changes": lambda: float(next(COUNT))}
"""Rewards with a defect, by trick."""


class WordData(vf.TaskData):
    answer: str
    turns: int = 1
    trick: str = ""


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.trick == "reward raises":
            raise KeyError("no such word")
        if self.data.trick in PLANTED:
            return PLANTED[self.data.trick]()
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(self.data.trick not in PLANTED and 0 < len(trace.last_reply or "") < 8)

    async def validate(self, runtime) -> bool:
        return self.data.trick != "unsolved" and "WORD_TOKEN" not in os.environ

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class WordConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("lamp", "kestrel", "chair")
    tricks: tuple[str, ...] = ()
    """Those of the words, in their order."""


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self):
        for word, trick in itertools.zip_longest(self.config.words, self.config.tricks, fillvalue=""):
            yield WordTask(WordData(prompt=f"Say {word}.", answer=word, trick=trick), self.config.task)
