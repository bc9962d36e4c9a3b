"""Rules of an agent outside of the worker."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl._shared.spec.agent import OUTSIDE
from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.problems import Problem

PROCESS_FIELDS = {
    "env": ("run", "command"),
    "python": ("run",),
    "image": ("run", "command"),
    "stops": OUTSIDE,
    "stopped_reward": OUTSIDE,
}
"""Fields that belong to some agents, and the fields of those agents."""
RESERVED_VARIABLE = ("KESTRL_", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
"""Beginnings of variables that the worker sets."""


def agent_problems(spec: JobSpec) -> Iterator[Problem]:
    """What contradicts itself in `agent`."""
    agent = spec.agent
    outside = [name for name in OUTSIDE if getattr(agent, name) is not None]
    if len(outside) > 1 or (outside and agent.loop != "tool_agent"):
        fields = [*outside, *(("loop",) if agent.loop != "tool_agent" else ())]
        yield Problem(f"spec.agent.{fields[-1]}", f"one job has one agent: keep one of {', '.join(fields)}")
    for name, owners in PROCESS_FIELDS.items():
        if getattr(agent, name) and not any(owner in outside for owner in owners):
            field = "stoppedReward" if name == "stopped_reward" else name
            yield Problem(f"spec.agent.{field}", f"belongs to an agent by {' or '.join(owners)}; remove it")
    if agent.image is None:
        for field, differs in (
            ("replicas", agent.replicas != 1),
            ("runtimeClassName", agent.runtime_class_name is not None),
        ):
            if differs:
                yield Problem(f"spec.agent.{field}", "belongs to the pods of agent.image; give it, or remove the field")
    for variable in agent.env:
        if variable.startswith(RESERVED_VARIABLE):
            yield Problem(f"spec.agent.env.{variable}", "is set for every episode by the worker; remove it")
    if agent.outside and spec.environment is not None:
        yield Problem(
            "spec.environment", f"an agent by {agent.outside} brings its own task and steps; remove one of the two"
        )
    if agent.outside and agent.stopped_reward is None:
        for index, reward in enumerate(spec.rewards):
            if reward.rule == "loop_reward":
                yield Problem(
                    "spec.agent.stoppedReward",
                    f"a run that a limit or the model's mistake ends returns no reward for rewards[{index}] "
                    "(loop_reward); give the value that it has then, such as 0",
                )
