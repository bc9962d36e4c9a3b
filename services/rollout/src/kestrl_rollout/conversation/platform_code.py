"""The line between the platform's code and a loop's: a failure on this side is kept, whatever the loop does."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from kestrl.errors import KestrlError, described


class PlatformCode:
    """Context around platform code: records failures, and keeps internal errors apart from the loop's."""

    __slots__ = ("_note",)

    def __init__(self, note: Callable[[KestrlError], None]) -> None:
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KestrlError):
            self._note(error)
        elif isinstance(error, Exception):
            bug = KestrlError(described(error), code="internal")
            self._note(bug)
            raise bug from error
