"""Cross-field rules of `spec.environment`."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl._shared.spec.environments import Environment
from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.problems import Problem
from kestrl.agents.registry import BUILT_IN as LOOPS
from kestrl.tools.shapes import is_mapping

SAMPLING_FIELDS = ("client", "model", "sampling")
"""Fields of verifiers' agent that would have another model play, or sample otherwise."""


def environment_problems(spec: JobSpec) -> Iterator[Problem]:
    """Problems of an environment that can be found without starting it."""
    environment = spec.environment
    if environment is None:
        return
    if spec.tools:
        yield Problem("spec.tools", "stand beside spec.environment, which brings its own tools; remove one of the two")
    if environment.image is None:
        for field, differs in (
            ("replicas", environment.replicas != 1),
            ("runtimeClassName", environment.runtime_class_name is not None),
        ):
            if differs:
                yield Problem(f"spec.environment.{field}", "belongs to the pods of environment.image; give it, too")
    for field, loop in (
        ("loop", spec.agent.loop),
        *((f"loops.{name}", loop) for name, loop in spec.agent.loops.items()),
    ):
        if loop in LOOPS and not LOOPS[loop].uses_tools and not environment.owns_loop:
            yield Problem(f"spec.agent.{field}", f"{loop} plays no environment; use tool_agent, which is the default")
        elif environment.owns_loop and (loop != "tool_agent" or field != "loop"):
            yield Problem(
                f"spec.agent.{field}", f"an environment by {environment.kind} runs its episodes itself; remove it"
            )
    if environment.owns_loop:
        yield from _own_loop_problems(environment)


def _own_loop_problems(environment: Environment) -> Iterator[Problem]:
    """Problems of an environment that runs its episodes itself."""
    if environment.memory_mb is not None:
        yield Problem(
            "spec.environment.memoryMb", f"bounds a process of one episode, and {environment.kind} has none; remove it"
        )
    assert environment.verifiers is not None
    agent = environment.verifiers.config.get("agent")
    for name in SAMPLING_FIELDS:
        if is_mapping(agent) and agent.get(name) is not None:
            yield Problem(
                f"spec.environment.verifiers.config.agent.{name}",
                "the model that is trained plays, sampled as spec.sampling says; remove it",
            )
