"""Cross-field rules of `spec.environment`."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.problems import Problem


def environment_problems(spec: JobSpec) -> Iterator[Problem]:
    """Problems of an environment that can be found without starting it."""
    environment = spec.environment
    if environment is None:
        return
    if spec.tools:
        yield Problem("spec.tools", "stand beside spec.environment, which brings its own tools; remove one of the two")
    for field, loop in (
        ("loop", spec.agent.loop),
        *((f"loops.{name}", loop) for name, loop in spec.agent.loops.items()),
    ):
        if loop == "single_turn":
            yield Problem(
                f"spec.agent.{field}", "single_turn plays no environment; use tool_agent, which is the default"
            )
