"""Ways in which a run ends that are no failure: a limit of the agent's own, or a mistake of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kestrl.episode import StopReason

AGENT_LIMIT, MODEL_BEHAVIOR = StopReason.AGENT_LIMIT, StopReason.MODEL_BEHAVIOR
KNOWN_STOPS: Mapping[str, StopReason] = {
    # LangGraph and LangChain
    "GraphRecursionError": AGENT_LIMIT,
    "ModelCallLimitExceededError": AGENT_LIMIT,
    "ToolCallLimitExceededError": AGENT_LIMIT,
    "OutputParserException": MODEL_BEHAVIOR,
    "StructuredOutputError": MODEL_BEHAVIOR,
    # OpenAI Agents SDK
    "MaxTurnsExceeded": AGENT_LIMIT,
    "ModelBehaviorError": MODEL_BEHAVIOR,
    "ModelRefusalError": MODEL_BEHAVIOR,
    "OutputGuardrailTripwireTriggered": MODEL_BEHAVIOR,
    "ToolInputGuardrailTripwireTriggered": MODEL_BEHAVIOR,
    # pydantic-ai
    "UsageLimitExceeded": AGENT_LIMIT,
    "UnexpectedModelBehavior": MODEL_BEHAVIOR,
    # smolagents
    "AgentMaxStepsError": AGENT_LIMIT,
    "AgentParsingError": MODEL_BEHAVIOR,
    "AgentToolCallError": MODEL_BEHAVIOR,
    # OpenAI's client, of a structured answer that was cut
    "LengthFinishReasonError": MODEL_BEHAVIOR,
}
"""Exceptions of frameworks by the name of their class."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of a run that is scored."""

    reason: StopReason
    name: str
    """Name of the exception's class, or `exit:CODE`, `http:STATUS`."""


class Stops:
    """The stops of a job."""

    def __init__(self, job_stops: Mapping[str, str]) -> None:
        """Knows those of the manifest, by name, beside those of frameworks."""
        self._own = {name: StopReason(reason) for name, reason in job_stops.items()}

    def of(self, names: Sequence[str]) -> Stop | None:
        """The stop that an end is, if it is one.

        Args:
            names: Of the exception's class with its module, then those of its bases; or `exit:CODE`, `http:STATUS`.
        """
        for name in names:
            plain = name.rpartition(".")[2]
            reason = self._own.get(name) or self._own.get(plain) or KNOWN_STOPS.get(plain)
            if reason is not None:
                return Stop(reason, plain)
        return None
