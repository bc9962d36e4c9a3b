"""The credentials of a job: who holds which, and who may call whom. One table, from which the plan hands them out and servers check them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum

from kestrl.errors import UserInputError

CONTROLLER = "controller"
"""Who follows and drains a learner: `kestrl run` on one machine, the operator on a cluster."""


class Secret(StrEnum):
    """Credentials made for each job, as the environment variables that carry them.

    A call's credential belongs to one caller and one callee: it opens the callee for that caller and nothing else, so a component
    that is taken over can call only whom it calls anyhow.
    """

    CONTROLLER_TO_LEARNER = "KESTRL_CONTROLLER_TO_LEARNER_TOKEN"
    LEARNER_TO_ROLLOUT = "KESTRL_LEARNER_TO_ROLLOUT_TOKEN"
    LEARNER_TO_INFERENCE = "KESTRL_LEARNER_TO_INFERENCE_TOKEN"
    ROLLOUT_TO_TOOLS = "KESTRL_ROLLOUT_TO_TOOLS_TOKEN"
    ROLLOUT_TO_JUDGE = "KESTRL_ROLLOUT_TO_JUDGE_TOKEN"
    ENGINE_KEY = "KESTRL_ENGINE_KEY"
    """Opens an engine's data routes."""
    ENGINE_CONTROL_KEY = "KESTRL_ENGINE_CONTROL_KEY"
    """Opens an engine's control routes."""

    def here(self) -> str | None:
        """Its value, if this process has it."""
        return os.environ.get(self.value) or None


CALLS: Mapping[Secret, tuple[str, str]] = {
    Secret.CONTROLLER_TO_LEARNER: (CONTROLLER, "learner"),
    Secret.LEARNER_TO_ROLLOUT: ("learner", "rollout"),
    Secret.LEARNER_TO_INFERENCE: ("learner", "inference"),
    Secret.ROLLOUT_TO_TOOLS: ("rollout", "tools"),
    Secret.ROLLOUT_TO_JUDGE: ("rollout", "judge"),
}
"""Caller and callee of each credential that a gRPC call carries, by their roles. What is not here is refused."""
HOLDERS: Mapping[Secret, tuple[str, ...]] = {
    **CALLS,
    Secret.ENGINE_KEY: ("engine", "inference", "rollout"),
    Secret.ENGINE_CONTROL_KEY: ("engine", "inference"),
}
"""The roles that each is given to: who shows it and who checks it."""


def held_by(role: str) -> tuple[Secret, ...]:
    """What a role's components are given."""
    return tuple(secret for secret, holders in HOLDERS.items() if role in holders)


def checked_by(role: str) -> tuple[Secret, ...]:
    """What a role's server takes from its callers."""
    return tuple(secret for secret, (_, callee) in CALLS.items() if callee == role)


def require(role: str) -> None:
    """Checks that this process has what its callers show: without it, it would let anybody in.

    Raises:
        UserInputError: A variable is not set.
    """
    missing = [secret.value for secret in checked_by(role) if secret.here() is None]
    if missing:
        raise UserInputError(
            f"{', '.join(missing)} is not set, so nobody's calls could be checked; `kestrl run` and the operator set it "
            "(with an operator of another version: upgrade it and the images together)"
        )
