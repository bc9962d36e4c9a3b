"""The credentials of a job and the calls that they allow. The plan distributes them and servers check them by the same
table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum

from kestrl.errors import UserInputError

CONTROLLER = "controller"
"""Role of the process that watches and drains the learner: `kestrl run` on one machine, the operator on a cluster."""


class Secret(StrEnum):
    """Credentials of a job, by the environment variables that carry them.

    A credential for calls belongs to one caller role and one callee role, so a compromised component can only make the
    calls that it makes anyway.
    """

    CONTROLLER_TO_LEARNER = "KESTRL_CONTROLLER_TO_LEARNER_TOKEN"
    LEARNER_TO_ROLLOUT = "KESTRL_LEARNER_TO_ROLLOUT_TOKEN"
    LEARNER_TO_INFERENCE = "KESTRL_LEARNER_TO_INFERENCE_TOKEN"
    ROLLOUT_TO_TOOLS = "KESTRL_ROLLOUT_TO_TOOLS_TOKEN"
    ROLLOUT_TO_JUDGE = "KESTRL_ROLLOUT_TO_JUDGE_TOKEN"
    ENGINE_KEY = "KESTRL_ENGINE_KEY"
    """Grants access to an engine's data routes."""
    ENGINE_CONTROL_KEY = "KESTRL_ENGINE_CONTROL_KEY"
    """Grants access to an engine's control routes."""

    def here(self) -> str | None:
        """Value in this process; None if it is not set."""
        return os.environ.get(self.value) or None


CALLS: Mapping[Secret, tuple[str, str]] = {
    Secret.CONTROLLER_TO_LEARNER: (CONTROLLER, "learner"),
    Secret.LEARNER_TO_ROLLOUT: ("learner", "rollout"),
    Secret.LEARNER_TO_INFERENCE: ("learner", "inference"),
    Secret.ROLLOUT_TO_TOOLS: ("rollout", "tools"),
    Secret.ROLLOUT_TO_JUDGE: ("rollout", "judge"),
}
"""Caller and callee roles of each credential of gRPC calls. Any other call is refused."""
HOLDERS: Mapping[Secret, tuple[str, ...]] = {
    **CALLS,
    Secret.ENGINE_KEY: ("engine", "inference", "rollout"),
    Secret.ENGINE_CONTROL_KEY: ("engine", "inference"),
}
"""Roles that get each credential: those that present it and those that check it."""


def held_by(role: str) -> tuple[Secret, ...]:
    """Credentials of a role's components."""
    return tuple(secret for secret, holders in HOLDERS.items() if role in holders)


def checked_by(role: str) -> tuple[Secret, ...]:
    """Credentials that a role's server accepts."""
    return tuple(secret for secret, (_, callee) in CALLS.items() if callee == role)


def header_value(text: str, source: str) -> str:
    """A credential that can be sent as a header.

    Args:
        text: The credential.
        source: Where it is from, for the message, which never has the value.

    Raises:
        UserInputError: It has a line end or another character that a header cannot have.
    """
    if not (text.isascii() and text.isprintable()) or text != text.strip():
        raise UserInputError(
            f"{source} has a line end, a space at its end, or a character that is not printable ASCII, which no header "
            "can hold; write the entry without them (`printf` adds no line end, `echo` does)"
        )
    return text


def require(role: str) -> None:
    """Checks that this process has the credentials of its callers: without them every call would be accepted.

    Raises:
        UserInputError: A variable is not set, or cannot be sent.
    """
    variables = [secret.value for secret in checked_by(role) if secret.here() is None]
    if variables:
        raise UserInputError(
            f"{', '.join(variables)} is not set, so calls could not be authenticated; `kestrl run` and the operator "
            "set it "
            "(with an operator of another version: upgrade it and the images together)"
        )
    for secret in held_by(role):
        header_value(secret.here() or "", secret.value)
