"""The simulation of stale groups with real episodes and real steps of the learner.

The clock, the rules of admission and waiting and the time of a turn are those of `stale_groups`; which tokens a turn
samples, and so how many turns an episode has, is up to the policy of the version that the mode prescribes. Rollouts of
a group are computed ahead when it begins; in the mode `continue`, what has not begun when an update ends is sampled
again by the new version. So every turn is sampled by the version that the clock says it began with, and one that the
clock cuts by the newest.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.one_step import JOB
from benchmarks.stale_groups.simulation import GROUPS, PREFILL, UNBOUNDED, GroupRun, Mode, Running, Simulation
from benchmarks.stale_groups.workloads import Episode, Turn, Workload
from benchmarks.stale_learning.lookups import ATTEMPTS, LONG_SHARE, Chain, Play, draw_chain, is_long, mean_reward
from benchmarks.stale_learning.sampler import Sampler

from kestrl._shared.plan.algorithm import TOKEN_BOUND, AlgorithmSettings
from kestrl._shared.plan.updates import algorithm_settings
from kestrl._shared.spec.load import read_job
from kestrl.algorithms import ScoredEpisode
from kestrl_learner.batch.rows import TrainGroup, TrainRow, estimated
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.train.trainer import Trainer

RANK, ALPHA = 8, 16.0
SCENARIOS = 4000
REPORTED = ("ess", "kl_behaviour", "ratio_p01", "ratio_p99", "ratio_max", "correction_weight", "clip_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the runs of all modes share."""

    seconds: float = 1200.0
    """Simulated time of a run."""
    curve: int = 8
    """Points of the learning curve, at equal simulated times."""
    held_out: int = 60
    """Scenarios that are evaluated and not long; half as many long ones are, with their share in the mean."""
    rate: float = 2e-3
    """Learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Held-out reward at a simulated time."""

    seconds: float
    step: int
    reward: float
    short: float
    """The mean of scenarios that are not long."""
    long: float


@dataclass(slots=True)
class Record:
    """What a run came to."""

    points: list[Point] = field(default_factory=list[Point])
    statistics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Diagnostics of the learner's steps, by name."""
    tokens: Counter[str] = field(default_factory=Counter[str])
    """Tokens that the policy sampled: trained on, masked, or given up."""
    long: Counter[bool] = field(default_factory=Counter[bool])
    """Tokens of long scenarios in groups that were trained on, by whether they are trained on."""
    ages: Counter[int] = field(default_factory=Counter[int])
    """Trained tokens by age in steps."""

    def facts(self) -> dict[str, Any]:
        """As a line of JSON."""
        total = self.tokens.total()
        return {
            "points": [asdict(point) for point in self.points],
            "steps": len(self.statistics["ess"]),
            "trained_tokens": self.tokens["trained"],
            "given_up": self.tokens["given_up"] / max(1, total),
            "masked": self.tokens["masked"] / max(1, total - self.tokens["given_up"]),
            "masked_of_long": self.long[False] / max(1, self.long.total()),
            "age": sum(age * tokens for age, tokens in self.ages.items()) / max(1, self.ages.total()),
            "statistics": {name: fmean(values) for name, values in self.statistics.items() if values},
        }


class Learning(Simulation):
    """A run.

    Args:
        workload: The clock's; its turns are as many as the policy takes.
        staleness: Allowed age of a group in steps.
        mode: What becomes of a group that is too old.
        seed: Of scenarios, turns' times, adapter and draws.
        base: Folder of the base model.
        plan: Time of the run and what is measured.
    """

    def __init__(self, workload: Workload, staleness: int, mode: Mode, *, seed: int, base: Path, plan: Plan) -> None:
        self._plan, self._chains = plan, list[Chain]()
        super().__init__(workload, staleness, UNBOUNDED, mode, seed=seed, prefill=PREFILL, bound=TOKEN_BOUND)
        self.record = Record()
        self._plays: dict[int, list[Play]] = {}
        """Episodes by number of their group."""
        self._batch: list[TrainGroup] = []
        self._policy = PolicyModel(
            str(base),
            dtype="float32",
            rank=RANK,
            alpha=ALPHA,
            targets="all-linear",
            seed=seed,
            device="cpu",
            tokens_per_pass=16_384,
        )
        settings = _settings(workload.episodes, staleness, plan.rate)
        # Versions are kept as long as the mode trains on their tokens.
        self._trainer = Trainer(self._policy, settings.model_copy(update={"max_staleness": self.token_staleness}), 1.0)
        self._trainer.published("0")
        self._sampler = Sampler(self._policy, seed)

    def _scenarios(self, workload: Workload, chance: random.Random) -> list[tuple[Episode, ...]]:
        """Chains, with the times of as many turns as an episode can have."""
        self._chains = [draw_chain(chance) for _ in range(SCENARIOS)]
        return [
            tuple(self._times(workload, f"{chance.random()}", chain) for _ in range(workload.episodes))
            for chain in self._chains
        ]

    def _times(self, workload: Workload, seed: str, chain: Chain) -> tuple[Turn, ...]:
        chance = random.Random(seed)
        return tuple(workload.turn(chance) for _ in range(ATTEMPTS * len(chain)))

    def _played(self, groups: Sequence[GroupRun]) -> list[tuple[Episode, ...]]:
        for group in groups:
            chain = self._chains[group.position]
            self._plays[group.number] = [Play(chain) for _ in range(self.workload.episodes)]
        self._sampler.play([play for group in groups for play in self._plays[group.number]])
        return [
            tuple(
                times[: len(play.turns)]
                for times, play in zip(self.scenarios[group.position], self._plays[group.number], strict=True)
            )
            for group in groups
        ]

    def _sample(self, number: int) -> None:
        super()._sample(number)
        episode = self.episodes[number]
        self._plays[episode.group][episode.place].versions.append(episode.version)

    def _cut(self, episode: Running, left: float) -> None:
        super()._cut(episode, left)
        self._plays[episode.group][episode.place].versions.pop()
        self.record.tokens["given_up"] += 2  # as if it had ended

    def _give_up(self, group: GroupRun) -> None:
        super()._give_up(group)
        plays = self._plays.pop(group.number)
        self.record.tokens["given_up"] += sum(2 * len(play.versions) for play in plays)

    def _consume(self, group: GroupRun) -> None:
        super()._consume(group)
        plays = self._plays.pop(group.number)
        oldest = self._oldest()
        for play in plays:
            ages = [self.version - version for version in play.versions for _ in range(2)]
            trained = [age for age in ages if self.version - age >= oldest]
            masked = len(ages) - len(trained)
            self.record.ages.update(trained)
            self.record.tokens.update({"trained": len(trained), "masked": masked})
            if is_long(play.chain):
                self.record.long.update({True: len(trained), False: masked})
        self._batch.append(train_group(f"{group.number}", plays, newest=self.version, oldest=oldest))

    def _updated(self) -> None:
        self._evaluate(self.now)
        result = self._trainer.step(estimated(self._batch, self._trainer.algorithm), self.version)
        self._batch = []
        for name in REPORTED:
            if name in result.diagnostics:
                self.record.statistics[name].append(result.diagnostics[name])
        super()._updated()
        self._trainer.published(f"{self.version}")

    def _renew(self) -> None:
        running = list(self.episodes.values())
        for episode in running:
            play = self._plays[episode.group][episode.place]
            play.rewind(len(play.versions))
        self._sampler.play([self._plays[episode.group][episode.place] for episode in running])
        for episode in running:
            position = self.running[episode.group].position
            turns = len(self._plays[episode.group][episode.place].turns)
            episode.turns = self.scenarios[position][episode.place][:turns]

    def _goes_on(self) -> bool:
        if self.now < self._plan.seconds:
            return True
        self._evaluate(self._plan.seconds)
        return False

    def _evaluate(self, until: float) -> None:
        """Evaluates the present weights for the points of the curve up to a time."""
        due = [
            place * self._plan.seconds / self._plan.curve
            for place in range(len(self.record.points), self._plan.curve + 1)
            if place * self._plan.seconds / self._plan.curve <= until
        ]
        if not due:
            return
        chance = random.Random("held out")
        short = [Play(draw_chain(chance, long=False)) for _ in range(self._plan.held_out)]
        long = [Play(draw_chain(chance, long=True)) for _ in range(self._plan.held_out // 2)]
        Sampler(self._policy, 0).play(short + long)
        reward = (1 - LONG_SHARE) * mean_reward(short) + LONG_SHARE * mean_reward(long)
        self.record.points += [
            Point(
                seconds=seconds,
                step=self.version,
                reward=reward,
                short=mean_reward(short),
                long=mean_reward(long),
            )
            for seconds in due
        ]


def _settings(episodes: int, staleness: int, rate: float) -> AlgorithmSettings:
    """GRPO as a job with this staleness gets it, with the token-level correction."""
    overrides = (
        f"algorithm.maxStaleness={staleness}",
        f"algorithm.groupSize={episodes}",
        f"algorithm.groupsPerStep={GROUPS}",
        f"algorithm.learningRate={rate}",
    )
    return algorithm_settings(read_job(JOB, overrides).spec)


def train_group(name: str, plays: Sequence[Play], *, newest: int, oldest: int) -> TrainGroup:
    """A group's rows; tokens of versions before the oldest are context, and not trained on."""
    rows = [_train_row(play, place, newest, oldest) for place, play in enumerate(plays)]
    scored = [ScoredEpisode(reward=play.reward, turns=[sum(row.mask)]) for play, row in zip(plays, rows, strict=True)]
    return TrainGroup(id=name, prompt=array("i", plays[0].prompt), rows=rows, episodes=scored)


def _train_row(play: Play, place: int, newest: int, oldest: int) -> TrainRow:
    ids, turn_of = play.tokens()
    assert len(play.versions) == len(play.turns), "every turn has begun"
    mask = bytes(turn >= 0 and play.versions[turn] >= oldest for turn in turn_of)
    sampled = iter([logprob for turn in play.behaviour for logprob in turn])
    behaviour = [0.0 if turn < 0 else next(sampled) for turn in turn_of]
    versions = [play.versions[turn] for turn, on in zip(turn_of, mask, strict=True) if on]
    return TrainRow(
        token_ids=array("i", ids),
        mask=mask,
        behaviour=array("f", behaviour),
        advantages=array("d", bytes(8 * len(ids))),
        sequence=place,
        on_policy=bytes(version == newest for version in versions),
        policies=[f"{version}" for version in versions],
        engines=["sampler"] * len(versions),
    )
