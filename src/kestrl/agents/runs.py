"""Agents outside of the worker: a function, program or service that runs an episode by its URL.

    def run(row, base_url, key, deadline):
        client = openai.OpenAI(base_url=base_url, api_key=key)
        reply = client.chat.completions.create(model="policy", messages=row["messages"])
        return {"metrics": {"characters": len(reply.choices[0].message.content or "")}}

The manifest's `agent.run` names such a function, `agent.command` a program and `agent.url` a service; all get the same
four things and return the same. What is sampled at the URL is the episode, so that nothing else needs to be returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kestrl.episode import Scenario
from kestrl.errors import UserCodeError, shown
from kestrl.tools.shapes import is_mapping

RESULT_FIELDS = ("metrics", "reward", "info")


class Run(Protocol):
    """An agent: runs one episode. It may as well be an `async` function."""

    def __call__(self, row: dict[str, Any], base_url: str, key: str, deadline: float) -> Any:
        """Runs an episode.

        Args:
            row: The scenario: `id`, `ordinal`, `messages`, `ground_truth`, `metadata`.
            base_url: Base URL for a client of OpenAI's API; ends with `/v1`.
            key: API key of this episode alone.
            deadline: Unix seconds at which the episode ends.

        Returns:
            None, the reward as a number, or a mapping with any of `metrics` (numbers by name), `reward`, and `info`
            (JSON for rules and people, `Episode.info`).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run returned."""

    metrics: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    reward: object = None
    """Not checked here: a reward that is no finite number is a failure that names it."""
    info: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """Not checked here: info that has no form as JSON is a failure that names it."""


def row_of(scenario: Scenario) -> dict[str, Any]:
    """A scenario as a run gets it."""
    return {
        "id": scenario.id,
        "ordinal": scenario.ordinal,
        "messages": [dict(message) for message in scenario.messages],
        "ground_truth": scenario.ground_truth,
        "metadata": dict(scenario.metadata),
    }


def run_result(agent: str, returned: object) -> RunResult:
    """Reads what a run returned.

    Args:
        agent: Name of the agent, for messages.
        returned: The value.

    Raises:
        UserCodeError: It is none of the forms that a run may return (code `agent_result_invalid`).
    """
    if not is_mapping(returned):
        return RunResult(reward=returned)
    unknown = [shown(name) for name in returned if name not in RESULT_FIELDS]
    if unknown:
        raise invalid(agent, f"{', '.join(unknown[:5])} is none of {', '.join(RESULT_FIELDS)}")
    metrics, info = returned.get("metrics"), returned.get("info")
    for name, part in (("metrics", metrics), ("info", info)):
        if part is not None and not is_mapping(part):
            raise invalid(agent, f"{name} is a {type(part).__name__}, not a mapping")
    return RunResult(
        metrics=metrics if is_mapping(metrics) else {},
        reward=returned.get("reward"),
        info=info if is_mapping(info) else {},
    )


def invalid(agent: str, problem: str) -> UserCodeError:
    return UserCodeError(
        f"{agent}: {problem}; a run returns nothing, a number, or a mapping with {', '.join(RESULT_FIELDS)}",
        code="agent_result_invalid",
    )
