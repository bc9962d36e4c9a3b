"""Loading of agent loops, tokenizer and chat template from a worker's settings."""

from __future__ import annotations

from datetime import datetime

from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.text.chat_model import ChatModel, load_model
from kestrl_rollout.agents.loading import Loops, load_loops


def load_job_loops(settings: RolloutSettings) -> Loops:
    """The job's loops.

    Raises:
        UserInputError: A loop cannot be loaded.
    """
    return load_loops(settings.agent, settings.agent_config, settings.agents, settings.agents_config)


def load_chat_model(settings: RolloutSettings, loops: Loops, *, started: datetime) -> ChatModel:
    """Loads tokenizer and chat template and verifies them for the job's loops.

    Raises:
        UserInputError: They cannot be used.
    """
    return load_model(
        settings.tokenizer,
        settings.template,
        arguments=settings.template_arguments,
        tools=settings.offers_tools and loops.use_tools,
        started=started,
        tool_calls=settings.tool_call_format,
        offered=settings.offers_tools and loops.read_calls,
    )
