"""The pods of the learner's further ranks: there are some with several replicas, where a site has a port for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.shared.plan.test_plan import SITE, job_with

from kestrl._shared.plan.components import Role
from kestrl._shared.plan.planning import has_rank_pods, plan
from kestrl._shared.plan.settings.learner import LearnerSettings


@pytest.mark.parametrize(
    ("replicas", "port", "has_pods"), [(1, 7500, False), (2, 7500, True), (2, None, False), (1, None, False)]
)
def test_several_replicas_of_the_learner_have_pods_of_ranks(replicas: int, port: int | None, has_pods: bool) -> None:
    job = job_with(f"learner.replicas={replicas}")
    assert has_rank_pods(job.spec) is (replicas > 1)
    components = plan(job, replace(SITE, ranks_port=port))
    assert (Role.RANKS in {component.role for component in components}) is has_pods
    (learner,) = (component for component in components if component.role is Role.LEARNER)
    assert isinstance(learner.settings, LearnerSettings)
    assert learner.settings.ranks_listen == ("0.0.0.0:7500" if has_pods else None)
    assert ("ranks" in learner.ports) is has_pods
