"""What a worker loads at its start, from its settings: the agent loops, and the model as text."""

from __future__ import annotations

from datetime import datetime

from kestrl.plan.settings import RolloutSettings
from kestrl_rollout.agents.loading import Loops, load_loops
from kestrl_rollout.model import ModelFace, load_model


def load_job_loops(settings: RolloutSettings) -> Loops:
    """The job's loops.

    Raises:
        UserInputError: One cannot be loaded.
    """
    return load_loops(settings.agent, settings.agent_config, settings.agents)


def load_face(settings: RolloutSettings, loops: Loops, *, started: datetime) -> ModelFace:
    """Tokenizer and chat template, proven for what the loops do with them.

    Raises:
        UserInputError: They cannot be used.
    """
    return load_model(
        settings.tokenizer,
        settings.template,
        tools=settings.offers_tools and loops.use_tools,
        started=started,
        tool_calls=settings.tool_call_format,
        offered=settings.offers_tools and loops.read_calls,
    )
