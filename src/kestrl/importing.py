"""Loads import paths of users: `package.module:attribute`."""

from __future__ import annotations

import importlib
from typing import Any

from kestrl.errors import UserInputError, described


def load(path: str, *, field: str) -> Any:
    """Imports `module:attribute`.

    Args:
        path: Import path such as `my_tools:Search`.
        field: Manifest field of the path, for messages.

    Raises:
        UserInputError: The path is malformed, the module cannot be imported, or it has no such attribute.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UserInputError(f"{field}: {path!r} is not of the form package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may also raise SystemExit
        raise UserInputError(
            f"{field}: cannot import {module_name!r}: {described(error)}. Is it installed, or beside the manifest?"
        ) from error
    value: Any = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise UserInputError(f"{field}: module {module_name!r} has no {attribute!r}") from error
    return value
