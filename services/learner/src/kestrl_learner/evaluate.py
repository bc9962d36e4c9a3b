"""Evaluation: every held-out scenario once, by the very call that training uses; failures are counted, never averaged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kestrl.api.common.v1 import common_pb2
from kestrl.episode import PROMPT_TOO_LONG, Episode, Group, PolicyVersion, Scenario
from kestrl.errors import KestrlError
from kestrl.rpc.codec import group_to_proto
from kestrl.storage import ObjectStore
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl_learner.engines import Engines, NoEngineProved
from kestrl_learner.progress import Progress, episode_facts, means_of
from kestrl_learner.workers import NoWorker, Order, Workers

GREEDY = 0.0
ATTEMPTS = 3
AT_ONCE = 256
"""Groups asked for at once; the workers' capacity bounds what runs."""


class EvaluationFailed(KestrlError):
    """Not one episode of an evaluation could be scored."""

    code = "evaluation_failed"


async def run_all(
    scenarios: Sequence[Scenario],
    *,
    run: str,
    policy: PolicyVersion,
    temperature: float,
    seed: int,
    workers: Workers,
    engines: Engines,
    progress: Progress,
) -> list[Group]:
    """One episode of every scenario; what may pass by itself is attempted again.

    A group that fails as a whole is counted and missing from the answer.

    Raises:
        KestrlError: No worker or no engine is there.
    """
    groups: list[Group] = []
    places = asyncio.Semaphore(AT_ONCE)

    async def attempt(scenario: Scenario, number: int) -> Group:
        order = Order(
            group_id=f"{run}/eval-{policy.step}-{temperature:g}-{scenario.ordinal}-{number}",
            scenario=scenario,
            size=1,
            policy=policy,
            engines=await engines.some(policy),
            temperature=temperature,
            seed=seed + scenario.ordinal,
            purpose="evaluation",
        )
        return await workers.run(order)

    async def one(scenario: Scenario) -> None:
        for number in range(ATTEMPTS):
            last = number == ATTEMPTS - 1
            try:
                async with places:
                    group = await attempt(scenario, number)
            except (NoWorker, NoEngineProved):
                raise
            except KestrlError as error:
                if last or not error.retryable:
                    progress.count_failure(error.failure(component="rollout"))
                    return
                continue
            failure = group.episodes[0].failure
            if last or failure is None or not failure.retryable:
                groups.append(group)
                return

    try:
        async with asyncio.TaskGroup() as tasks:
            for scenario in scenarios:
                tasks.create_task(one(scenario), name=f"evaluate-{scenario.ordinal}")
    except* KestrlError as errors:
        raise errors.exceptions[0] from errors
    return sorted(groups, key=lambda group: group.scenario.ordinal)


def summarise(groups: Sequence[Group], asked: int, progress: Progress) -> dict[str, float]:
    """Means over scored episodes, and how many have none. Rows whose prompts are too long are not counted among them.

    Raises:
        EvaluationFailed: Nothing was scored.
    """
    episodes: list[Episode] = [episode for group in groups for episode in group.episodes]
    scored = [episode for episode in episodes if episode.failure is None and episode.reward is not None]
    for group in groups:
        for episode in group.episodes:
            if episode.failure is None:
                continue
            if episode.failure.code == PROMPT_TOO_LONG:
                progress.skip("validation", group.scenario.ordinal)
                asked -= 1
            else:
                progress.count_failure(episode.failure)
    if not scored:
        first = next((episode.failure for episode in episodes if episode.failure), None)
        raise EvaluationFailed(f"none of {asked} episodes was scored; the first failure: {first}")
    return {
        **means_of(episode_facts(episode) for episode in scored),
        "episodes": float(asked),
        "exceptions": float(asked - len(scored)),
    }


def store_groups(store: ObjectStore, path: str, step: int, purpose: str, groups: Sequence[Group]) -> None:
    """Writes groups as one object."""
    batch = common_pb2.GroupBatch(step=step, purpose=purpose, groups=[group_to_proto(group) for group in groups])
    store.put(path, batch.SerializeToString())


async def evaluate(
    scenarios: Sequence[Scenario],
    *,
    run: str,
    policy: PolicyVersion,
    temperature: float,
    seed: int,
    sampled: bool,
    workers: Workers,
    engines: Engines,
    progress: Progress,
    store: ObjectStore,
) -> dict[str, float]:
    """Greedy over all scenarios; with `sampled`, also at the training temperature, whose mean reward is `sampled_reward`."""
    with span(SpanName.EVALUATE, {Attr.POLICY: policy.name}):
        common = {
            "run": run,
            "policy": policy,
            "seed": seed,
            "workers": workers,
            "engines": engines,
            "progress": progress,
        }
        greedy = await run_all(scenarios, temperature=GREEDY, **common)  # type: ignore[arg-type]
        await asyncio.to_thread(
            store_groups, store, f"episodes/eval/{policy.step:06d}.pb", policy.step, "evaluation", greedy
        )
        result = summarise(greedy, len(scenarios), progress)
        if sampled:
            drawn = await run_all(scenarios, temperature=temperature, **common)  # type: ignore[arg-type]
            means = summarise(drawn, len(scenarios), progress)
            result |= {f"sampled_{name}": means[name] for name in ("reward", "answer_correct") if name in means}
            result["exceptions"] += means["exceptions"]
        return result
