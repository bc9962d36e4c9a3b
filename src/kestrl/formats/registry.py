"""Resolves names and import paths to formats."""

from __future__ import annotations

import inspect
from typing import Any, cast

from kestrl import importing
from kestrl.errors import UserInputError
from kestrl.formats import ToolCallFormat
from kestrl.formats.harmony import Harmony
from kestrl.formats.llama import Llama3Json
from kestrl.formats.mistral import Mistral
from kestrl.formats.pythonic import Pythonic
from kestrl.formats.tagged import Hermes, QwenXml

FIELD = "agent.toolCallFormat"
MEMBERS = ("name", "markers", "example", "reasoning", "hints", "inner_ends", "read", "readable", "write")
BUILT_IN: dict[str, ToolCallFormat] = {
    each.name: each for each in (Harmony(), Mistral(), QwenXml(), Hermes(), Pythonic(), Llama3Json())
}
"""Built-in formats by name, in the order in which a template is matched: more specific formats first."""


def resolve(name: str) -> ToolCallFormat:
    """Format of a name or an import path `module:Format` (a class without constructor arguments, or an object).

    Raises:
        UserInputError: It does not exist or is not a format.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise UserInputError(
            f"{FIELD}: {name!r} is neither built in ({', '.join(BUILT_IN)}) nor of the form package.module:Format"
        )
    candidate: Any = importing.load(name, field=FIELD)
    if inspect.isclass(candidate):
        try:
            candidate = candidate()
        except Exception as error:
            raise UserInputError(
                f"{FIELD}: {name} cannot be made without arguments: {type(error).__name__}: {error}"
            ) from error
    missing_members = [member for member in MEMBERS if not hasattr(candidate, member)]
    if missing_members:
        raise UserInputError(
            f"{FIELD}: {name} is not a ToolCallFormat: it has no {', '.join(missing_members)}; subclass "
            "kestrl.formats.ToolCallFormat "
            "for the defaults"
        )
    return cast(ToolCallFormat, candidate)
