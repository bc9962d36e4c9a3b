"""Simulated cost of stragglers with staleness: what becomes of a running group that an update makes too old.

`release` gives it up and attempts its scenario again, `wait` has the step wait for it, `continue` lets it go on: each
turn is sampled by the newest version when it begins, and tokens older than a bound are masked.

Discrete events with the learner's own rules of admission and waiting. Engines share their time among the turns that
are sampled: up to SLOTS turns run at full speed, more slow each other down. A turn decodes its tokens after it has
computed those of its prefix that are not in the engine's cache: what the last tool call answered, or, when the version
differs from the turn's before, the whole prefix, since keys and values belong to a version. A turn that an update finds
running ends with the version that it began with, unless that is too old by the rollout worker's own rule: then it is
cut, and sampled again by the newest version from its beginning.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from statistics import fmean
from typing import Literal

from benchmarks.report import Row, main

from kestrl._shared.plan.algorithm import TOKEN_BOUND
from kestrl_learner.ledger.schedule import admissible, affordable
from kestrl_rollout.engine.engine_set import is_too_old

GROUPS, STEPS = 8, 100
TOKEN_SECONDS = 0.01
"""Time of a sampled token on an engine with room."""
PREFILL = 0.1
"""Engine time of a token of a prefix / of a sampled token."""
PROMPT = 1000
UNBOUNDED = 10**9
MODES = ("release", "wait", "continue")
Mode = Literal["release", "wait", "continue"]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: tokens that the model samples, tokens that its tool answers, and the tool's seconds."""

    sampled: int
    answered: int
    tool: float


Episode = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of scenario.

    One in ten scenarios is long: its episodes take LONG times as many turns; where all have one turn, it is as many
    times as long.
    """

    name: str
    episodes: int
    """Episodes in a group."""
    turns: float
    """Mean of an episode that is not long; geometric unless 1."""
    sampled: int
    """Median of a turn's tokens; log-normal."""
    spread: float
    """Standard deviation of the logarithm of a turn's tokens."""
    tool: float
    """Mean seconds of a tool call; exponential, and one call in twenty takes ten times as long."""
    update: float
    """Seconds of an update."""

    LONG = 4

    def group(self, chance: random.Random) -> tuple[Episode, ...]:
        is_long = chance.random() < 0.1
        return tuple(self._episode(chance, is_long) for _ in range(self.episodes))

    def _episode(self, chance: random.Random, is_long: bool) -> Episode:
        factor = self.LONG if is_long else 1
        if self.turns == 1:
            return (Turn(round(factor * self.sampled * chance.lognormvariate(0, self.spread)), 0, 0.0),)
        mean, turns = self.turns * factor, 1
        while chance.random() > 1 / mean and turns < 8 * mean:
            turns += 1
        return tuple(self.turn(chance) for _ in range(turns))

    def turn(self, chance: random.Random) -> Turn:
        seconds = chance.expovariate(1 / self.tool) * (10 if chance.random() < 0.05 else 1)
        return Turn(max(1, round(self.sampled * chance.lognormvariate(0, self.spread))), 400, seconds)


WORKLOADS = (
    Workload("agent", episodes=4, turns=6, sampled=100, spread=0.5, tool=1.0, update=5.0),
    Workload("slow_tools", episodes=4, turns=6, sampled=50, spread=0.5, tool=4.0, update=5.0),
    Workload("one_turn", episodes=4, turns=1, sampled=800, spread=1.0, tool=0.0, update=5.0),
)


@dataclass(slots=True)
class Running:
    """An episode under way."""

    group: int
    place: int
    """Among the episodes of its group."""
    turns: Episode
    turn: int = 0
    version: int = -1
    """Version of the turn that is sampled, or was last."""
    work: float = 0.0
    """Engine seconds of this turn."""
    prefix: int = PROMPT


@dataclass(slots=True)
class GroupRun:
    """An attempt of a scenario."""

    number: int
    position: int
    begun: int
    """The version it began with."""
    left: int
    """Episodes that have not ended."""
    work: Counter[int] = field(default_factory=Counter[int])
    """Engine seconds by version."""
    tokens: Counter[int] = field(default_factory=Counter[int])
    """Sampled tokens by version."""


class Engines:
    """Engines that share their time equally among the turns they sample: a clock that runs slower with more of them."""

    def __init__(self, slots: int) -> None:
        self._slots, self.clock, self._turns = slots, 0.0, list[tuple[float, int]]()

    def _pace(self) -> float:
        return min(1.0, self._slots / len(self._turns))

    def add(self, number: int, work: float) -> None:
        heapq.heappush(self._turns, (self.clock + work, number))

    def next_end(self) -> float:
        """Seconds until the first turn ends."""
        return max(0.0, self._turns[0][0] - self.clock) / self._pace() if self._turns else float("inf")

    def run(self, seconds: float) -> None:
        if self._turns:
            self.clock += seconds * self._pace()

    def pop(self) -> int:
        end, number = heapq.heappop(self._turns)
        self.clock = max(self.clock, end)
        return number

    def cancel(self, numbers: set[int]) -> dict[int, float]:
        """Removes turns; returns the work that each still had."""
        gone = {number: max(0.0, end - self.clock) for end, number in self._turns if number in numbers}
        self._turns = [turn for turn in self._turns if turn[1] not in numbers]
        heapq.heapify(self._turns)
        return gone


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    seconds: float = 0.0
    work: float = 0.0
    """Engine seconds."""
    given_up: float = 0.0
    """Engine seconds of groups that were released, of turns that were cut and of tokens that were masked."""
    cut: float = 0.0
    """Engine seconds of turns that were cut, until then."""
    repeated: float = 0.0
    """Engine seconds for prefixes that were computed again since the version had changed."""
    trained: Counter[int] = field(default_factory=Counter[int])
    """Trained tokens by age in steps."""
    masked: int = 0
    """Tokens that were older than the bound when their group was trained on."""
    long: Counter[bool] = field(default_factory=Counter[bool])
    """Tokens of the tenth of scenarios with most tokens, in groups that were trained on, by whether they are trained
    on."""

    @property
    def age(self) -> float:
        return sum(age * tokens for age, tokens in self.trained.items()) / self.trained.total()


class Simulation:
    """A run."""

    def __init__(
        self, workload: Workload, staleness: int, slots: int, mode: Mode, *, seed: int, prefill: float, bound: int
    ) -> None:
        chance = random.Random(seed)
        self.scenarios = self._scenarios(workload, chance)
        lengths = sorted(self._tokens(position) for position in range(len(self.scenarios)))
        self.long_from = lengths[len(lengths) * 9 // 10]
        self.workload, self.staleness, self.mode, self.prefill = workload, staleness, mode, prefill
        self.token_staleness = bound * staleness if mode == "continue" else staleness
        self.now, self.version, self.consumed, self.training = 0.0, 0, 0, False
        self.pending = list(range(len(self.scenarios)))
        self.running: dict[int, GroupRun] = {}
        self.ready: list[GroupRun] = []
        self.episodes: dict[int, Running] = {}
        self.engines = Engines(slots)
        self.events: list[tuple[float, int]] = []
        """(time, number of the episode whose tool answers; -1 for the end of an update)."""
        self.numbers = count()
        self.outcome = Outcome()

    def _scenarios(self, workload: Workload, chance: random.Random) -> list[tuple[Episode, ...]]:
        """The episodes of each scenario."""
        return [workload.group(chance) for _ in range(STEPS * GROUPS)]

    def _tokens(self, position: int) -> int:
        return sum(turn.sampled for episode in self.scenarios[position] for turn in episode)

    def _start(self) -> None:
        may = admissible(
            version=self.version,
            max_staleness=self.staleness,
            groups_per_step=GROUPS,
            consumed=self.consumed,
            outstanding=len(self.running) + len(self.ready),
        )
        positions = [heapq.heappop(self.pending) for _ in range(min(may, len(self.pending)))]
        groups = [GroupRun(next(self.numbers), position, self.version, 0) for position in positions]
        for group, episodes in zip(groups, self._played(groups), strict=True):
            self.running[group.number] = group
            group.left = len(episodes)
            for place, turns in enumerate(episodes):
                number = next(self.numbers)
                self.episodes[number] = Running(group.number, place, turns)
                self._sample(number)

    def _played(self, groups: Sequence[GroupRun]) -> list[tuple[Episode, ...]]:
        """The episodes of groups that begin."""
        return [self.scenarios[group.position] for group in groups]

    def _sample(self, number: int) -> None:
        """Begins an episode's next turn."""
        episode = self.episodes[number]
        group, turn = self.running[episode.group], episode.turns[episode.turn]
        version = self.version if self.mode == "continue" else group.begun
        fresh = episode.turns[episode.turn - 1].answered if episode.turn else PROMPT
        repeated = episode.prefix - fresh if version != episode.version and episode.turn else 0
        self.outcome.repeated += repeated * self.prefill * TOKEN_SECONDS
        work = (turn.sampled + (fresh + repeated) * self.prefill) * TOKEN_SECONDS
        episode.version, episode.work = version, work
        group.work[version] += work
        group.tokens[version] += turn.sampled
        self.engines.add(number, work)

    def _sampled(self, number: int) -> None:
        """Ends an episode's turn: its tool is called, or the episode ends."""
        episode = self.episodes[number]
        turn = episode.turns[episode.turn]
        episode.turn += 1
        episode.prefix += turn.sampled + turn.answered
        if episode.turn < len(episode.turns):
            heapq.heappush(self.events, (self.now + turn.tool, number))
            return
        del self.episodes[number]
        group = self.running[episode.group]
        group.left -= 1
        if not group.left:
            self.ready.append(self.running.pop(episode.group))

    def _oldest(self) -> int:
        """The oldest version whose tokens the next step may be trained on."""
        return self.version - self.token_staleness

    def _give_up(self, group: GroupRun) -> None:
        spent = group.work.total()
        self.outcome.work += spent
        self.outcome.given_up += spent
        heapq.heappush(self.pending, group.position)

    def _usable(self, group: GroupRun) -> bool:
        newest = max(group.tokens) if self.mode == "continue" else group.begun
        return newest >= self._oldest()

    def _train(self) -> None:
        for group in [group for group in self.ready if not self._usable(group)]:
            self.ready.remove(group)
            self._give_up(group)
        if self.training or len(self.ready) < GROUPS or (self.mode == "wait" and not self._affordable()):
            return
        self.ready.sort(key=lambda group: (group.begun, group.position))
        for group in self.ready[:GROUPS]:
            self._consume(group)
        del self.ready[:GROUPS]
        self.consumed += GROUPS
        self.training = True
        heapq.heappush(self.events, (self.now + self.workload.update, -1))

    def _affordable(self) -> bool:
        return affordable(
            step=self.version,
            max_staleness=self.staleness,
            groups_per_step=GROUPS,
            ready=[group.begun for group in self.ready],
            running=[group.begun for group in self.running.values()],
        )

    def _consume(self, group: GroupRun) -> None:
        is_long = self._tokens(group.position) >= self.long_from
        for version, tokens in group.tokens.items():
            is_trained = version >= self._oldest()
            self.outcome.work += group.work[version]
            if is_trained:
                self.outcome.trained[self.version - version] += tokens
            else:
                self.outcome.given_up += group.work[version]
                self.outcome.masked += tokens
            if is_long:
                self.outcome.long[is_trained] += tokens

    def _updated(self) -> None:
        self.training, self.version = False, self.version + 1
        if self.mode == "continue":
            self._cut_turns()
        else:
            self._release()

    def _cut_turns(self) -> None:
        """Has the newest version sample the running turns of versions that are too old."""
        episodes = self.episodes.items()
        old = {number for number, episode in episodes if is_too_old(episode.version, self.version, self.staleness)}
        cut_turns = self.engines.cancel(old)
        for number, left in cut_turns.items():
            self._cut(self.episodes[number], left)
        self._renew()
        for number in cut_turns:
            self._sample(number)

    def _cut(self, episode: Running, left: float) -> None:
        """Takes a turn with so much work left from its group."""
        group, version = self.running[episode.group], episode.version
        group.work[version] -= episode.work
        group.tokens[version] -= episode.turns[episode.turn].sampled
        if not group.tokens[version]:
            del group.work[version], group.tokens[version]
        spent = episode.work - left
        self.outcome.work += spent
        self.outcome.given_up += spent
        self.outcome.cut += spent

    def _renew(self) -> None:
        """Replaces what no version has begun to sample, if that depends on the version."""

    def _release(self) -> None:
        """Gives up the running groups that are too old."""
        gone = {number for number, group in self.running.items() if group.begun < self._oldest()}
        episodes = {number for number, episode in self.episodes.items() if episode.group in gone}
        for number, left in self.engines.cancel(episodes).items():
            group = self.running[self.episodes[number].group]
            group.work[group.begun] -= left
        for number in episodes:
            del self.episodes[number]
        self.events = [event for event in self.events if event[1] not in episodes]
        heapq.heapify(self.events)
        for number in gone:
            self._give_up(self.running.pop(number))

    def _goes_on(self) -> bool:
        return self.version < STEPS

    def run(self) -> Outcome:
        """Runs it to its end."""
        self._start()
        while self._goes_on():
            at_engine = self.now + self.engines.next_end()
            if self.events and self.events[0][0] <= at_engine:
                then, number = heapq.heappop(self.events)
                self.engines.run(then - self.now)
                self.now = then
                if number < 0:
                    self._updated()
                else:
                    self._sample(number)
            else:
                self.now = at_engine
                self._sampled(self.engines.pop())
            self._train()
            self._start()
        self.outcome.seconds = self.now
        return self.outcome


CELLS = (
    *((workload, slots, PREFILL) for workload in WORKLOADS for slots in (UNBOUNDED, 16)),
    *((WORKLOADS[0], slots, PREFILL / 5) for slots in (UNBOUNDED, 16)),
)
SEEDS = (1, 2, 3)
BOUNDS = (1, 2, TOKEN_BOUND, 8)


def measure() -> Iterator[Row]:
    for workload, slots, prefill in CELLS:
        engines = "room" if slots == UNBOUNDED else f"{slots}_turns"
        for staleness in (1, 2, 4):
            at = f"stale_groups/{workload.name}/{engines}/prefill_{prefill:g}/staleness_{staleness}"
            yield from _rows(at, {mode: _runs(workload, staleness, slots, mode, prefill) for mode in MODES})
    for workload, staleness, bound in product(WORKLOADS[:2], (1, 2, 4), BOUNDS):
        runs = _runs(workload, staleness, UNBOUNDED, "continue", bound=bound)
        at = f"stale_groups/{workload.name}/room/prefill_{PREFILL:g}/staleness_{staleness}/continue/bound_{bound}"
        yield Row(name=at, value=fmean(run.seconds for run in runs) / STEPS, unit="s/step")
        yield Row(name=f"{at}/age", value=fmean(run.age for run in runs), unit="steps")
        yield from _masked_rows(at, runs)


def _runs(
    workload: Workload, staleness: int, slots: int, mode: Mode, prefill: float = PREFILL, bound: int = TOKEN_BOUND
) -> list[Outcome]:
    return [
        Simulation(workload, staleness, slots, mode, seed=seed, prefill=prefill, bound=bound).run() for seed in SEEDS
    ]


def _rows(at: str, runs: dict[Mode, list[Outcome]]) -> Iterator[Row]:
    release = fmean(run.seconds for run in runs["release"]) / STEPS
    for mode, mode_runs in runs.items():
        seconds = fmean(run.seconds for run in mode_runs) / STEPS
        yield Row(name=f"{at}/{mode}", value=seconds, unit="s/step", reference=release, against="release")
        speed = fmean(run.trained.total() / run.seconds for run in mode_runs)
        yield Row(name=f"{at}/{mode}/trained", value=speed, unit="tokens/s")
        share = fmean(run.given_up / run.work for run in mode_runs)
        yield Row(name=f"{at}/{mode}/given_up", value=share, unit="of engine time")
        yield Row(name=f"{at}/{mode}/age", value=fmean(run.age for run in mode_runs), unit="steps")
        yield Row(name=f"{at}/{mode}/oldest", value=max(max(run.trained) for run in mode_runs), unit="steps")
    continued = runs["continue"]
    yield Row(
        name=f"{at}/continue/again", value=fmean(run.repeated / run.work for run in continued), unit="of engine time"
    )
    cut = fmean(run.cut / run.work for run in continued)
    yield Row(name=f"{at}/continue/cut", value=cut, unit="of engine time")
    yield from _masked_rows(f"{at}/continue", continued)


def _masked_rows(at: str, runs: list[Outcome]) -> Iterator[Row]:
    masked = fmean(run.masked / (run.masked + run.trained.total()) for run in runs)
    yield Row(name=f"{at}/masked", value=masked, unit="of tokens")
    masked = fmean(run.long[False] / run.long.total() for run in runs)
    yield Row(name=f"{at}/masked_of_long", value=masked, unit="of long scenarios' tokens")


if __name__ == "__main__":
    main(__doc__, measure)
