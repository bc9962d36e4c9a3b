"""Standard output of the code. A module of its own: the code reaches what a method's module holds."""

from __future__ import annotations

import io


class Output(io.TextIOWrapper):
    """A text stream that knows whether a line has begun."""

    __module__ = "io"  # it stands in the place of the interpreter's own, and holds nothing of the service
    line_begun = False

    def write(self, text: str, /) -> int:
        count = super().write(text)
        if text:
            self.line_begun = text[-1] != "\n"
        return count
