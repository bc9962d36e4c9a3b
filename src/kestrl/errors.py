"""The vocabulary of failure: where one came from, what it is, and whether trying again can help.

Every process of KestRL speaks it; `kestrl.rpc` carries it over the wire. A failure is data with a type and a boundary. It is
recorded on the episode, counted, shown by `kestrl status`, and never becomes a number that a gradient could see.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from enum import StrEnum


class Boundary(StrEnum):
    """Where a failure came from."""

    POLICY = "policy"
    """The model's own doing: a wrong answer, a malformed call. Data, and may earn a reward."""
    TOOL = "tool"
    """A tool raised, or ran past its deadline."""
    SANDBOX = "sandbox"
    """The place a tool's code runs in failed."""
    JUDGE = "judge"
    """Scoring failed; the episode has no reward."""
    ENGINE = "engine"
    """The inference engine died, refused, or answered nonsense."""
    INFRASTRUCTURE = "infrastructure"
    """The network, the disk, the database, a deadline of our own."""
    USER_CODE = "user_code"
    """A user's agent or reward raised, or could not be imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure as data."""

    boundary: Boundary
    code: str
    """Short and stable, snake_case, low in cardinality: `deadline_exceeded`, `tool_raised`."""
    message: str
    """What happened and what to do, for a person."""
    retryable: bool = False
    """Whether the same work may succeed when tried again unchanged."""
    component: str = ""
    """The process that saw it, such as `rollout-0`."""

    def __str__(self) -> str:
        return f"[{self.boundary}/{self.code}] {self.message}"


MAX_DESCRIBED = 500
"""Characters of an exception's text that a failure's message quotes."""


def encodable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 and so the wire cannot carry, replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def text_of(error: BaseException) -> str:
    """An exception's own text, as UTF-8 can carry it; says so where its `__str__` raises."""
    try:
        return encodable(str(error))
    except BaseException as raised:  # noqa: BLE001 - a user's `__str__` may raise anything
        return f"(its __str__ raised {type(raised).__name__})"


def described(error: BaseException) -> str:
    """An exception as `Type: text`, at most `MAX_DESCRIBED` characters."""
    kind, text = type(error).__name__, text_of(error)
    return (f"{kind}: {text}" if text else kind)[:MAX_DESCRIBED]


class KestrlError(Exception):
    """The root of what KestRL raises on purpose. Subclasses fix the boundary; the code and message say what happened."""

    boundary: Boundary = Boundary.INFRASTRUCTURE
    code: str = "internal"
    retryable: bool = False

    def __init__(
        self, message: str, *, code: str | None = None, retryable: bool | None = None, boundary: Boundary | None = None
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable
        if boundary is not None:
            self.boundary = boundary

    def failure(self, *, component: str = "") -> Failure:
        """This error as data."""
        return Failure(
            boundary=self.boundary,
            code=encodable(self.code),
            message=text_of(self),
            retryable=self.retryable,
            component=component,
        )


class FailureError(KestrlError):
    """A failure that came over the wire, raised again on this side."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, code=failure.code, retryable=failure.retryable, boundary=failure.boundary)
        self.component = failure.component

    def failure(self, *, component: str = "") -> Failure:
        return super().failure(component=self.component or component)


class UserInputError(KestrlError):
    """Something a person wrote cannot be used: a manifest, a data row, an import path. Ends a command with exit code 2.

    The message names the field or file and the mend.
    """

    code = "invalid_input"


class PlaceError(UserInputError):
    """A folder or file system cannot be written to: full, read-only, or not ours. A person has to make room or name another."""

    code = "place_unusable"


PLACE_MENDS = {
    errno.ENOSPC: "no space is left; free some, or name another place",
    errno.EDQUOT: "the quota is used up; free some space, or name another place",
    errno.EACCES: "permission is denied; change it, or name another place",
    errno.EPERM: "permission is denied; change it, or name another place",
    errno.EROFS: "the file system is read-only; name another place",
}


def place_error(error: BaseException, where: str) -> PlaceError | None:
    """The error a person can mend, if an error of the system (or its text, as libraries pass it on) is one; else None."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    for known, mend in PLACE_MENDS.items():
        if number == known or f"(os error {known})" in text or os.strerror(known).lower() in text.lower():
            return PlaceError(f"{where}: {mend}")
    return PlaceError(f"{where}: {PLACE_MENDS[errno.ENOSPC]}") if "disk is full" in text else None


class UserCodeError(KestrlError):
    """A user's class or function raised or cannot be imported."""

    boundary = Boundary.USER_CODE
    code = "user_code_raised"


class ToolFailure(KestrlError):
    """A tool broke: not the model's fault, so the model is not told and the episode has failed."""

    boundary = Boundary.TOOL
    code = "tool_raised"


class JudgeFailure(KestrlError):
    """Scoring failed; the episode stays without a reward."""

    boundary = Boundary.JUDGE
    code = "reward_raised"


class EngineFailure(KestrlError):
    """The inference engine died, refused, or answered something impossible."""

    boundary = Boundary.ENGINE
    code = "engine_failed"
    retryable = True


class DeadlineExceeded(KestrlError):
    """A deadline of ours passed; the code names which."""

    code = "deadline_exceeded"
    retryable = True


class StorageError(KestrlError):
    """An object store refused, or an object is missing or corrupt."""

    code = "storage_failed"


class StorageUnavailable(StorageError):
    """An object store does not answer for now: the connection, a 5xx, or a request to slow down. The same call may succeed later."""

    code = "storage_unavailable"
    retryable = True
