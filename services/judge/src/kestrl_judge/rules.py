"""Rewards as plain functions, each with its own processes, which are restarted after they end.

Invariants: every episode gets exactly one verdict; a request is never retried, since a reward that killed its process
would kill the next one; a process is not reused after a late answer, so that answers cannot be mixed up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kestrl._shared.plan.settings.judge import JudgeSettings, RewardEntry
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode.codec import failure_from_proto
from kestrl.errors import Failure, JudgeFailure, UserInputError
from kestrl.rewards import Claim, Score
from kestrl_judge.correctness import CorrectnessJudge, JudgedAnswer
from kestrl_judge.encoded import Encoded, EncodedGroup
from kestrl_judge.process import Died, Late, ProcessParameters, RewardProcess
from kestrl_judge.scoring import JudgeStopped, ScoredGroup, ScoringGate, Verdict

log = logging.getLogger(__name__)
QUEUE = 4096
"""Maximum queued episodes per reward; further callers wait."""
MOST_CLAIMS = 4
"""Answers of one episode that a reward may have judged."""
BACKOFF = (0.1, 0.5, 2.0, 5.0)
"""Seconds before the restart of an ended process, by the number of consecutive ends."""


@dataclass(eq=False, slots=True)
class _Job:
    request: Sequence[Encoded]
    """In parts."""
    verdict: asyncio.Future[Verdict | Claim] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RuleScorer:
    """Scorer of one rule."""

    def __init__(
        self,
        entry: RewardEntry,
        command: ProcessParameters,
        *,
        processes: int,
        correctness: CorrectnessJudge | None = None,
    ) -> None:
        self._correctness = correctness
        self.name = command.name
        self.rule = entry.rule
        self.gate: ScoringGate | None = None
        self.weight = entry.weight
        self._seconds = entry.seconds
        self._command = command
        self._processes = processes
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(QUEUE)
        self._keepers: list[asyncio.Task[None]] = []
        self._running: dict[int, RewardProcess] = {}
        self.restarts = 0
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Pids of the running processes."""
        return [process.pid for process in self._running.values()]

    async def open(self) -> None:
        """Starts the processes of the rule.

        Raises:
            UserInputError: The reward cannot be loaded.
        """
        if self._correctness is not None:
            await self._correctness.open()
        for index in range(self._processes):
            self._running[index] = await RewardProcess.start(self._command)
            self._keepers.append(asyncio.create_task(self._keep(index), name=f"{self.name}-{index}"))

    async def close(self) -> None:
        """Kills the processes; pending episodes get a failure."""
        self._closed = True
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        while not self._jobs.empty():
            _settle(self._jobs.get_nowait(), JudgeStopped(self.name).failure())
        for process in list(self._running.values()):
            await process.kill()
        self._running.clear()
        if self._correctness is not None:
            await self._correctness.close()

    async def score(self, group: EncodedGroup, *, max_turns: int) -> ScoredGroup:
        calls = list[dict[str, Any]]()
        requests = {episode.id: group.request(episode) for episode in group.episodes}
        judged: dict[str, list[JudgedAnswer]] = {name: [] for name in requests}
        verdicts = await asyncio.gather(
            *(self._verdict(request, max_turns, judged[name], calls) for name, request in requests.items())
        )
        return ScoredGroup(
            dict(zip(requests, verdicts, strict=True)),
            episodes={name: [asdict(answer) for answer in answers] for name, answers in judged.items() if answers},
            details={"calls": calls} if calls else None,
        )

    async def _verdict(
        self,
        episode_request: Sequence[Encoded],
        max_turns: int,
        judged: list[JudgedAnswer],
        calls: list[dict[str, Any]],
    ) -> Verdict:
        """Scores one episode; if the function asks about an answer, again with the judge's verdict."""
        added_fields = pb.ScoreGroupRequest(max_turns=max_turns, has_judge=self._correctness is not None)
        for _ in range(MOST_CLAIMS + 1):
            job = _Job((*episode_request, added_fields.SerializeToString()))
            await self._jobs.put(job)
            if self._closed:  # since this waited for a place
                _settle(job, JudgeStopped(self.name).failure())
            try:
                verdict = await job.verdict
            finally:
                job.verdict.cancel()  # no effect on a finished one; a waiting one is skipped
            if not isinstance(verdict, Claim):
                return verdict
            assert self._correctness is not None, "a function without a judge gets no verdicts to ask for"
            answer = await self._correctness.verdict(verdict, calls)
            if isinstance(answer, Failure):
                return answer
            judged.append(answer)
            added_fields.verdicts[verdict.digest()] = answer.correct
        message = f"{self.name}: asked about more than {MOST_CLAIMS} answers of one episode"
        return JudgeFailure(message, code="too_many_claims").failure()

    async def _keep(self, index: int) -> None:
        """Worker loop of one process: scores queued episodes until cancelled."""
        deaths = 0
        while True:
            job = await self._jobs.get()
            if job.verdict.cancelled():  # its caller was cancelled
                continue
            try:
                process = await self._process(index, deaths)
                _settle(job, await self._asked(process, job))
                deaths = 0
            except Late as error:
                _settle(job, error.failure())
                await self._end(index)
            except (Died, UserInputError) as error:
                deaths += 1
                _settle(job, error.failure() if isinstance(error, Died) else _unavailable(self.name, error).failure())
                await self._end(index)
            except BaseException:
                _settle(job, JudgeStopped(self.name).failure())
                raise

    async def _asked(self, process: RewardProcess, job: _Job) -> Verdict | Claim:
        score = await process.ask(job.request, seconds=self._seconds)
        if score.HasField("failure"):
            return failure_from_proto(score.failure)
        if score.HasField("claim"):
            return Claim(score.claim.question, tuple(score.claim.accepted), score.claim.answer)
        return Score(
            value=score.reward,
            turns=list(score.turn_rewards),
            metrics=dict(score.metrics),
            answer=score.answer if score.HasField("answer") else None,
        )

    async def _process(self, index: int, deaths: int) -> RewardProcess:
        """Returns the current process; replaces one that ended while idle, without affecting an episode."""
        process = self._running.get(index)
        if process is not None and process.alive:
            return process
        if process is not None:
            await self._end(index)
        if deaths:
            await asyncio.sleep(BACKOFF[min(deaths, len(BACKOFF)) - 1])
        self.restarts += 1
        self._running[index] = await RewardProcess.start(self._command)
        return self._running[index]

    async def _end(self, index: int) -> None:
        process = self._running.pop(index, None)
        if process is not None:
            log.warning("a process of reward %s has ended; the next episode gets a new one", self.name)
            await process.kill()


def _settle(job: _Job, verdict: Verdict | Claim) -> None:
    if not job.verdict.done():
        job.verdict.set_result(verdict)


def _unavailable(name: str, error: UserInputError) -> JudgeFailure:
    return JudgeFailure(f"{name}: could not be restarted: {error}", code="reward_unavailable")


def rule_scorers(settings: JudgeSettings, correctness: CorrectnessJudge | None = None) -> list[RuleScorer]:
    """Scorers of all rules, in manifest order.

    Args:
        settings: Of the judge.
        correctness: Judge of the rule that may ask one.

    Raises:
        UserInputError: A rule is listed twice.
    """
    names = component_names(settings.rewards)
    return [
        RuleScorer(
            entry,
            ProcessParameters(
                name=name,
                rule=entry.rule,
                field=entry.field,
                python_path=settings.python_path,
                config=entry.config,
            ),
            processes=settings.processes,
            correctness=correctness if entry.asks_judge else None,
        )
        for name, entry in zip(names, settings.rewards, strict=True)
    ]


def component_names(entries: Sequence[RewardEntry]) -> list[str]:
    """Names of rules as components of the reward: short ones, and import paths where short ones are equal.

    Raises:
        UserInputError: A rule is listed twice.
    """
    rules = [entry.rule for entry in entries]
    for index, rule in enumerate(rules):
        if rule in rules[:index]:
            raise UserInputError(
                f"{entries[index].field}: {rule!r} is listed twice; list it once with the sum of the weights"
            )
    short = [entry.name for entry in entries]
    return [entry.rule if short.count(entry.name) > 1 else entry.name for entry in entries]
