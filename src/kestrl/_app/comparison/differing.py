"""Fields in which two jobs score or play episodes differently. Pure."""

from __future__ import annotations

from kestrl._shared.spec import AgentRLJob


def differing_fields(one: AgentRLJob, other: AgentRLJob) -> list[str]:
    """The fields by which the same number means something else in two jobs: model, validation data, agent, tools and
    rewards.
    """
    mine, theirs = one.spec, other.spec
    parts = {
        "model.base": (mine.model.base, theirs.model.base),
        "data.validation": (mine.data.validation, theirs.data.validation),
        "agent": (mine.agent, theirs.agent),
        "tools": (mine.tools, theirs.tools),
        "environment": (mine.environment, theirs.environment),
        "rewards": (mine.rewards, theirs.rewards),
    }
    return [f"spec.{name}" for name, (left, right) in parts.items() if left != right]
