"""OpenAPI documents: parsed, checked for their version, with local references."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from kestrl._shared import safe_yaml
from kestrl.tools.references import ReferenceInvalid, pointed
from kestrl.tools.shapes import is_list, is_mapping

MAX_BYTES = 8 * 1024 * 1024
"""Maximum size of a document."""
VERSION = re.compile(r"3\.[01]\.\d+")


class DocumentInvalid(ValueError):
    """The document cannot be used; the message says why."""


class Unsupported(ValueError):
    """An operation needs something that is not supported, or is described wrongly; the message has the reason."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C parser where there is one
    """YAML with the scalars of JSON, as OpenAPI asks: `on` and `2026-01-01` are strings."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - an attribute of the base class


for kind, pattern, first in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("merge", r"<<", ["<"]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"-?(0|[1-9][0-9]*)", list("-0123456789")),
    ("float", r"-?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?", list("-0123456789")),
):
    _Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
        f"tag:yaml.org,2002:{kind}", re.compile(rf"^(?:{pattern})$"), first
    )


class Document:
    """A parsed document."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.version: str = root["openapi"]

    @property
    def before_3_1(self) -> bool:
        """Whether its schemas are OpenAPI 3.0's dialect, not JSON Schema 2020-12."""
        return self.version.startswith("3.0.")

    def resolve(self, reference: object) -> Any:
        """The value that a reference names.

        Raises:
            Unsupported: The reference leaves the document, or names nothing.
        """
        try:
            return pointed(reference, self.root)
        except ReferenceInvalid as error:
            raise Unsupported(f"{error}; include what it names") from error

    def at(self, value: Any) -> Mapping[str, Any]:
        """An object of the document, or the one that its references lead to.

        Raises:
            Unsupported: It is not an object, or its references are wrong or cyclic.
        """
        references: set[str] = set()
        while is_mapping(value) and "$ref" in value:
            reference = str(value["$ref"])
            if reference in references:
                raise Unsupported(f"the reference {reference} leads to itself")
            references.add(reference)
            value = self.resolve(reference)
        if not is_mapping(value):
            raise Unsupported("a part of it is not an object")
        return value

    def items(self, value: Any) -> list[Any]:
        """A list of the document; an empty one if there is none.

        Raises:
            Unsupported: It is not a list.
        """
        if value is not None and not is_list(value):
            raise Unsupported("a part of it that must be a list is none")
        return value or []


def parsed(content: bytes) -> Document:
    """The document of a file.

    Raises:
        DocumentInvalid: It is too large, not JSON or YAML, or not OpenAPI 3.0 or 3.1.
    """
    if len(content) > MAX_BYTES:
        raise DocumentInvalid(f"it is longer than {MAX_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
        root = json.loads(text) if text.lstrip().startswith("{") else safe_yaml.read(text, _Loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DocumentInvalid(f"it is neither JSON nor YAML: {type(error).__name__}: {reason}") from error
    if not is_mapping(root):
        raise DocumentInvalid("it is not an object")
    version: Any = root.get("openapi", f"swagger {root['swagger']}" if "swagger" in root else None)
    if not isinstance(version, str) or not VERSION.fullmatch(version):
        raise DocumentInvalid(f"its version is {version!r}; convert it to OpenAPI 3.0 or 3.1")
    if not is_mapping(root.get("paths")):
        raise DocumentInvalid("it has no `paths`")
    return Document(root)
