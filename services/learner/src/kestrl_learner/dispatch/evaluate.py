"""Evaluation of every held-out scenario, with the same request as training; failures are counted, never averaged."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial

from kestrl._shared.at_k import at_k
from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.episode import PROMPT_TOO_LONG, Episode, Group, PolicyVersion, Purpose, Scenario
from kestrl.errors import KestrlError
from kestrl.runstate.sampling import EvaluationSampling
from kestrl.storage.episodes import EpisodeBatch, EpisodeStore
from kestrl_learner.concurrency import Signal
from kestrl_learner.dispatch.acceptance import refused_credential
from kestrl_learner.dispatch.group_assignment import GroupAssignment
from kestrl_learner.dispatch.retry_pause import RetryPause
from kestrl_learner.dispatch.workers import NoWorker, Workers
from kestrl_learner.engines.engines import Engines, NoEngineProved
from kestrl_learner.progress.progress import Progress, episode_facts, means_of

ATTEMPTS = 3
SEED_STRIDE = 2**32
"""Difference between the seeds of two samples of a scenario: above every ordinal, so that no two episodes share one."""
AT_ONCE = 256
"""Concurrent group requests; the workers' capacity bounds how many run."""


class EvaluationFailed(KestrlError):
    """No episode of an evaluation could be scored."""

    code = "evaluation_failed"


async def run_all(
    scenarios: Sequence[Scenario],
    *,
    run: str,
    policy: PolicyVersion,
    sampling: EvaluationSampling,
    seed: int,
    workers: Workers,
    engines: Engines,
    progress: Progress,
) -> list[Group]:
    """Episodes of every scenario, each in a group of its own; retryable failures are retried, and a credential that is
    accepted no more is waited for, without a limit.

    A group that fails as a whole is counted as a failure and missing from the result. The seed of a sample depends on
    nothing but `seed`, its scenario and its number, so that more samples repeat the first ones.

    Raises:
        KestrlError: There is no worker or no engine.
    """
    samples = sampling.samples
    groups: list[Group] = []
    slots = asyncio.Semaphore(AT_ONCE)
    pause, resumed = RetryPause(), Signal()

    async def attempt(scenario: Scenario, sample: int, number: int) -> Group:
        await engines.wait_verified(policy)
        name = f"{scenario.ordinal}.{sample}" if samples > 1 else str(scenario.ordinal)
        request = GroupAssignment(
            group_id=f"{run}/eval-{policy.step}-{sampling.label}-{name}-{number}",
            scenario=scenario,
            size=1,
            policy=policy,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed + scenario.ordinal + sample * SEED_STRIDE,
            purpose=Purpose.EVALUATION,
        )
        return await workers.run(request)

    async def one(scenario: Scenario, sample: int) -> None:
        failed_attempts = 0
        for number in itertools.count():
            last = failed_attempts == ATTEMPTS - 1
            await resumed.wait_for(lambda: not pause.active)
            try:
                async with slots:
                    group = await attempt(scenario, sample, number)
            except (NoWorker, NoEngineProved):
                raise
            except KestrlError as error:
                if last or not error.retryable:
                    progress.count_failure(error.failure(component="rollout"))
                    return
                failed_attempts += 1
                continue
            failure = group.episodes[0].failure
            if failure is not None and refused_credential([failure]):
                progress.count_failure(failure)
                progress.await_credential(failure)
                pause.start(resumed.notify)
                continue
            if progress.accept_credential(group):
                pause.reset()
            if last or failure is None or not failure.retryable:
                groups.append(group)
                return
            failed_attempts += 1

    try:
        async with asyncio.TaskGroup() as tasks:
            for scenario in scenarios:
                for sample in range(samples):
                    tasks.create_task(one(scenario, sample), name=f"evaluate-{scenario.ordinal}.{sample}")
    except* KestrlError as errors:
        raise errors.exceptions[0] from errors
    return sorted(groups, key=lambda group: (group.scenario.ordinal, group.episodes[0].seed))


def summarise(groups: Sequence[Group], requested: int, progress: Progress) -> dict[str, float]:
    """Means over scored episodes, and the number of failed ones (`exceptions`), also by the boundary of the failure
    (`exceptions_engine`). Rows whose prompts are too long are skipped.

    Raises:
        EvaluationFailed: No episode was scored.
    """
    episodes: list[Episode] = [episode for group in groups for episode in group.episodes]
    scored = [episode for episode in episodes if episode.failure is None and episode.reward is not None]
    boundaries: Counter[str] = Counter()
    for group in groups:
        for episode in group.episodes:
            if episode.failure is None:
                continue
            if episode.failure.code == PROMPT_TOO_LONG:
                progress.skip("validation", group.scenario.ordinal)
                requested -= 1
            else:
                boundaries[episode.failure.boundary] += 1
                progress.count_failure(episode.failure)
    if not scored:
        first = next((episode.failure for episode in episodes if episode.failure), None)
        raise EvaluationFailed(f"none of {requested} episodes was scored; the first failure: {first}")
    return {
        **means_of(episode_facts(episode) for episode in scored),
        "episodes": float(requested),
        "exceptions": float(requested - len(scored)),
        **{f"exceptions_{boundary}": float(count) for boundary, count in sorted(boundaries.items())},
    }


async def evaluate(
    scenarios: Sequence[Scenario],
    *,
    run: str,
    policy: PolicyVersion,
    sampling: EvaluationSampling,
    trained: float | None,
    seed: int,
    workers: Workers,
    engines: Engines,
    progress: Progress,
    episodes: EpisodeStore,
) -> dict[str, float]:
    """Means over all scenarios, with the estimates of `at_k` if each has several samples.

    Args:
        scenarios: The validation data.
        run: Id of the run.
        policy: The evaluated version.
        sampling: How it is sampled.
        trained: Temperature of training, at which one more episode of each scenario gives `sampled_reward`; None
            without.
        seed: The seeds of all episodes follow from it.
        workers: They run the episodes.
        engines: Those that have verified the policy serve it.
        progress: Counts failures.
        episodes: Takes the episodes, without those at the temperature of training.

    Raises:
        EvaluationFailed: No episode was scored.
        KestrlError: There is no worker or no engine.
    """
    drawing = partial(
        run_all, scenarios, run=run, policy=policy, seed=seed, workers=workers, engines=engines, progress=progress
    )
    with span(SpanName.EVALUATE, {Attr.POLICY: policy.name}):
        groups = await drawing(sampling=sampling)
        batch = EpisodeBatch.evaluation(policy.step, groups)
        await asyncio.to_thread(episodes.append, batch)
        result = summarise(groups, len(scenarios) * sampling.samples, progress) | at_k(groups, sampling.samples)
        if trained is not None:
            drawn = await drawing(sampling=EvaluationSampling(temperature=trained))
            means = summarise(drawn, len(scenarios), progress)
            result |= {f"sampled_{name}": means[name] for name in ("reward", "answer_correct") if name in means}
            result["exceptions"] += means["exceptions"]
        return result
