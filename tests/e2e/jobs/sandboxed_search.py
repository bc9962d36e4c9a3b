"""A search of mails that a tool service runs in a sandbox. Its imports are in the service's image."""

from __future__ import annotations

from kestrl_sandbox.contract import Language
from kestrl_sandbox.interpreter.provider import Interpreter
from kestrl_sandbox.interpreter.session import Snippet


class SandboxedSearch(Interpreter):
    """A search that finds no mail."""

    def program(self, keywords: list[str]) -> Snippet:
        """Search mails.

        Args:
            keywords: What to search for.
        """
        return Snippet(f"print({keywords!r} and [])", Language.PYTHON)
