"""Typed failures: where a failure came from, what it is, and whether a retry can help.

Every process of KestRL uses them; `kestrl._shared.rpc` sends them over the wire. A failure is data with a type and a
boundary. It is recorded on the episode, counted, shown by `kestrl status`, and never becomes a number in a gradient.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Boundary(StrEnum):
    """Where a failure came from."""

    POLICY = "policy"
    """The model: a wrong answer, a malformed call. Data, which may be rewarded."""
    TOOL = "tool"
    """A tool raised, or ran past its deadline."""
    SANDBOX = "sandbox"
    """The sandbox in which a tool runs failed."""
    JUDGE = "judge"
    """Scoring failed; the episode has no reward."""
    ENGINE = "engine"
    """The inference engine died, refused, or sent an invalid answer."""
    INFRASTRUCTURE = "infrastructure"
    """The network, the disk, the database, or a deadline of the platform."""
    USER_CODE = "user_code"
    """A user's agent or reward raised, or could not be imported."""
    ENVIRONMENT = "environment"
    """The job's environment raised, died, or ran past its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure as data."""

    boundary: Boundary
    code: str
    """Short and stable, snake_case, low in cardinality: `deadline_exceeded`, `tool_raised`."""
    message: str
    """What happened and how to fix it, for a person."""
    retryable: bool = False
    """Whether an unchanged retry may succeed."""
    component: str = ""
    """Process that observed the failure, such as `rollout-0`."""

    def __str__(self) -> str:
        return f"[{self.boundary}/{self.code}] {self.message}"


MAX_DESCRIBED = 500
"""Maximum number of quoted characters of an exception's text."""


def encodable(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def text_of(error: BaseException) -> str:
    """Text of an exception in a form that UTF-8 can encode; a placeholder if its `__str__` raises."""
    try:
        return encodable(str(error))
    except BaseException as raised:  # noqa: BLE001 - a user's `__str__` may raise anything
        return f"(its __str__ raised {type(raised).__name__})"


def described(error: BaseException) -> str:
    """An exception as `Type: text`, at most `MAX_DESCRIBED` characters."""
    kind, text = type(error).__name__, text_of(error)
    return (f"{kind}: {text}" if text else kind)[:MAX_DESCRIBED]


def shown(value: object) -> str:
    """A value of user code in a message: the beginning of its form, or its type if its `__repr__` raises."""
    try:
        return repr(value)[:100]
    except BaseException:  # noqa: BLE001 - nested too deeply, too long, or a user's `__repr__`
        return f"a {type(value).__name__}"


MAX_MESSAGE = 6_000
"""Maximum bytes of a failure's message. Failures are sent as metadata, of which gRPC takes 8 KiB."""


def _fitting(text: str) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_MESSAGE:
        return text
    return f"{encoded[:MAX_MESSAGE].decode('utf-8', 'ignore')} [cut: {len(encoded) - MAX_MESSAGE} more bytes]"


class KestrlError(Exception):
    """Base class of KestRL's errors. Subclasses set the boundary; code and message describe what happened."""

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
            code=encodable(self.code)[:100],
            message=_fitting(text_of(self)),
            retryable=self.retryable,
            component=component,
        )


class FailureError(KestrlError):
    """A failure received over the wire."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, code=failure.code, retryable=failure.retryable, boundary=failure.boundary)
        self.component = failure.component

    def failure(self, *, component: str = "") -> Failure:
        return super().failure(component=self.component or component)


class UserInputError(KestrlError):
    """Invalid input: a manifest, a data row, an import path. Ends a command with exit code 2.

    The message names the field or file and how to fix it.
    """

    code = "invalid_input"


class SeveralProblems(UserInputError):
    """Invalid input, with all problems."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__("\n".join(texts))
        self.texts = tuple(texts)
        """The problems; a text may have several lines."""


def problems_of(error: UserInputError) -> tuple[str, ...]:
    """The problems that an error names; a text may have several lines."""
    return error.texts if isinstance(error, SeveralProblems) else (text_of(error),)


class PlaceError(UserInputError):
    """A folder or file system cannot be written to: it is full, read-only, or not accessible. A person has to fix
    it.
    """

    code = "place_unusable"


class StorageInaccessible(PlaceError):
    """Object storage denies access, or has no such bucket: a credential was rotated, revoked or is wrong. What heals it
    is outside of the run, and a retry may succeed.
    """

    code = "storage_inaccessible"
    retryable = True


WRITE_FIXES = {
    errno.ENOSPC: "no space left; free some, or use another location",
    errno.EDQUOT: "quota exceeded; free some space, or use another location",
    errno.EACCES: "permission denied; change it, or use another location",
    errno.EPERM: "permission denied; change it, or use another location",
    errno.EROFS: "the file system is read-only; use another location",
}


def place_error(error: BaseException, where: str) -> PlaceError | None:
    """Converts an operating system error (or its text, as passed on by libraries) that a person can fix; else None."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    for code, fix in WRITE_FIXES.items():
        if number == code or f"(os error {code})" in text or os.strerror(code).lower() in text.lower():
            return PlaceError(f"{where}: {fix}")
    return PlaceError(f"{where}: {WRITE_FIXES[errno.ENOSPC]}") if "disk is full" in text else None


class UserCodeError(KestrlError):
    """A class or function of the user raised, or cannot be imported."""

    boundary = Boundary.USER_CODE
    code = "user_code_raised"


class ToolFailure(KestrlError):
    """A tool failed through no fault of the model: the episode has failed, and the model gets no message."""

    boundary = Boundary.TOOL
    code = "tool_raised"


class JudgeFailure(KestrlError):
    """Scoring failed; the episode has no reward."""

    boundary = Boundary.JUDGE
    code = "reward_raised"


class EngineFailure(KestrlError):
    """The inference engine died, refused, or sent an invalid answer."""

    boundary = Boundary.ENGINE
    code = "engine_failed"
    retryable = True


class DeadlineExceeded(KestrlError):
    """A deadline of the platform passed; the code names it."""

    code = "deadline_exceeded"
    retryable = True


class StorageError(KestrlError):
    """An object store refused a request, or an object is missing or corrupt."""

    code = "storage_failed"


class StorageUnavailable(StorageError):
    """An object store is temporarily unavailable: a failed connection, a 5xx, or rate limiting. A retry may succeed."""

    code = "storage_unavailable"
    retryable = True
