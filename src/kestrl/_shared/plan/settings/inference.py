"""Settings of an engine agent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from kestrl._shared.plan.settings.common import INDEX_VARIABLE, ServiceSettings


class AgentSettings(ServiceSettings):
    """An engine agent."""

    engine: str = "vllm"
    """Dialect of the engine."""
    engine_name: str
    engine_url: str
    base_model: str
    """Name under which the engine serves the base model."""
    adapters_dir: str
    """Folder shared with the engine; retired versions are deleted from it."""
    failure_file: str | None = None
    """File in which the engine records why it could not start."""
    slots: int
    """Maximum number of adapters in the engine."""
    probe_bound: float
    """Largest accepted difference between the engine's and the learner's probe log-probs."""
    draws: int = 512
    """Most tokens that are drawn after each start of the engine to compare their frequencies with the policy's
    distribution; 0 for none."""
    draw_seconds: float = 5.0
    """Time after which no further ones are drawn, on a slow engine."""
    load_seconds: float = 60.0
    poll_seconds: float = 1.0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the settings file. KESTRL_INDEX identifies the engine if agents share a file.

        Raises:
            UserInputError: The file is missing or invalid for this version.
        """
        settings, index = super().read(path), os.environ.get(INDEX_VARIABLE)
        return settings.model_copy(update={"engine_name": f"engine-{index}"}) if index else settings
