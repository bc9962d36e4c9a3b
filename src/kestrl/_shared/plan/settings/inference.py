"""Settings of an engine agent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from kestrl._shared.plan.settings.common import INDEX_VARIABLE, REPLICA_VARIABLE, ServiceSettings

LEAST_MOVE_SECONDS = 60.0
"""Time in which even a small engine may move its weights: an engine that does other work answers late."""
POD = "{pod}"
"""What the name of an agent's pod replaces in `reported_url`."""


class AgentSettings(ServiceSettings):
    """An engine agent."""

    engine: str = "vllm"
    """Dialect of the engine."""
    engine_name: str
    engine_url: str
    """Where the agent reaches its engine."""
    reported_url: str | None = None
    """Where others reach it, with `POD` where agents share a file; None for `engine_url`."""
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
    turns: bool = False
    """Whether the engine gives its device to the learner for each update."""
    move_seconds: float = LEAST_MOVE_SECONDS
    """Longest time in which its weights move between its devices and host memory."""
    drain_seconds: float = 120.0
    """Longest time that running turns have after SIGTERM."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the settings file. If agents share it, KESTRL_INDEX identifies the engine, and KESTRL_REPLICA its pod.

        Raises:
            UserInputError: The file is missing or invalid for this version.
        """
        settings, index, pod = super().read(path), os.environ.get(INDEX_VARIABLE), os.environ.get(REPLICA_VARIABLE)
        changes = {"engine_name": f"engine-{index}"} if index else {}
        if pod and settings.reported_url is not None:
            changes["reported_url"] = settings.reported_url.replace(POD, pod)
        return settings.model_copy(update=changes)
