"""A simulated run: discrete events with the learner's own rules of admission and waiting."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from benchmarks.stale_groups.engines import Engines
from benchmarks.stale_groups.workloads import Episode, Workload

from kestrl_learner.ledger.schedule import admissible, affordable
from kestrl_rollout.engine.engine_set import is_too_old

GROUPS, STEPS = 8, 100
TOKEN_SECONDS = 0.01
"""Time of a sampled token on an engine with room."""
PREFILL = 0.1
"""Engine time of a token of a prefix / of a sampled token."""
PROMPT = 1000
UNBOUNDED = 10**9
Mode = Literal["release", "wait", "continue"]
MODES: tuple[Mode, ...] = ("release", "wait", "continue")
SEEDS = (1, 2, 3)


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
