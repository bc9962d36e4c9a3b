"""Components of `kestrl bench` for a model behind an endpoint: the job's tools and judge, and a program that drives
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.planning import rollout_deadlines
from kestrl._shared.plan.settings.bench import BenchEndpoint, BenchSettings
from kestrl._shared.plan.settings.common import DataSettings
from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.plan.site import Site
from kestrl._shared.spec.job import AgentRLJob
from kestrl.errors import UserInputError
from kestrl.runstate.sampling import EvaluationSampling

MODULE = "kestrl_rollout.bench"


def bench_components(
    components: Sequence[Component],
    job: AgentRLJob,
    site: Site,
    endpoint: BenchEndpoint,
    sampling: EvaluationSampling,
) -> list[Component]:
    """The components of a job's plan without engines and workers; the program takes the learner's place, so that its
    end is the run's end.

    Raises:
        UserInputError: The job has no validation data, or an environment that runs its episodes itself.
    """
    (learner,) = (component for component in components if component.role is Role.LEARNER)
    assert isinstance(learner.settings, LearnerSettings)
    if site.validation is None or job.spec.data.validation is None:
        raise UserInputError("spec.data.validation: bench needs validation data")
    spec = job.spec
    if spec.environment is not None and spec.environment.owns_loop:
        raise UserInputError(
            f"spec.environment: bench has an endpoint's model play by the loop of tools, and an environment by "
            f"{spec.environment.kind} runs its episodes itself; use its own evaluation"
        )
    settings = BenchSettings(
        **learner.settings.model_dump(
            include={"component", "job", "run", "listen", "python_path", "otlp_endpoint", "traced_groups"}
        ),
        endpoint=endpoint,
        sampling=sampling,
        data=DataSettings(
            path=site.validation,
            size=job.spec.data.validation.size,
            promptless=job.spec.environment is not None,
        ),
        max_turns=spec.agent.max_turns,
        max_tokens=spec.agent.max_tokens,
        max_tokens_per_turn=spec.agent.max_tokens_per_turn or spec.agent.max_tokens,
        max_parallel_calls=spec.agent.max_parallel_calls,
        max_tool_tokens=spec.agent.max_tool_tokens,
        deadlines=rollout_deadlines(spec),
        concurrency=spec.rollout.concurrency,
        tools_address=site.endpoint(Role.TOOLS, 0).address,
        judge_address=site.endpoint(Role.JUDGE, 0).address,
        storage=site.storage,
    )
    program = replace(
        learner, module=MODULE, settings=settings, own_secrets=(Secret.ROLLOUT_TO_TOOLS, Secret.ROLLOUT_TO_JUDGE)
    )
    return [component for component in components if component.role in {Role.TOOLS, Role.JUDGE}] + [program]
