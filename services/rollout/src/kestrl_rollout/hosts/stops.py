"""Ways in which a run ends that are no failure: a limit of the agent's own, or a mistake of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kestrl.episode import StopReason

KNOWN_STOPS: Mapping[str, StopReason] = {
    "GraphRecursionError": StopReason.AGENT_LIMIT,  # LangGraph
    "MaxTurnsExceeded": StopReason.AGENT_LIMIT,  # OpenAI Agents SDK
    "ModelBehaviorError": StopReason.MODEL_BEHAVIOR,
    "UsageLimitExceeded": StopReason.AGENT_LIMIT,  # pydantic-ai
    "UnexpectedModelBehavior": StopReason.MODEL_BEHAVIOR,
    "AgentMaxStepsError": StopReason.AGENT_LIMIT,  # smolagents
    "AgentParsingError": StopReason.MODEL_BEHAVIOR,
    "AgentToolCallError": StopReason.MODEL_BEHAVIOR,
    "OutputParserException": StopReason.MODEL_BEHAVIOR,  # LangChain
    "LengthFinishReasonError": StopReason.MODEL_BEHAVIOR,  # OpenAI's client, of a structured answer that was cut
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

    def __init__(self, own: Mapping[str, str]) -> None:
        """Knows those of the manifest, by name, beside those of frameworks."""
        self._own = {name: StopReason(reason) for name, reason in own.items()}

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
