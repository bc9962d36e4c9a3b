"""Removal of credentials from what comes back from where they were sent: servers repeat them in errors and answers,
which would carry them into logs, failures, stored episodes and to the model.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

from kestrl.tools.shapes import is_list, is_mapping

SHORTEST = 8
"""Characters of the shortest text that is taken for a credential: replacing shorter ones would garble other texts."""
SHORTEST_CUT = 16
"""Characters of the shortest form of a credential whose first half is replaced, too, since a text may be cut in it."""
MAX_PARTS = 64
"""Maximum parts of one credential that are replaced alone; a key in PEM has one for each line."""
REDACTED = "[redacted]"
CREDENTIAL = re.compile(r"(?i)secret|token|passw|passphrase|credential|signature|auth(?!or)|headers|_sas|(^|_)key(_|$)")
"""Names of environment variables that hold credentials."""


class Redactor:
    """Replaces credentials in texts, also where they are encoded (in URLs, JSON, HTML, base64 and hex) or cut off after
    their first half. The time is proportional to the text.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        """Knows the credentials.

        Args:
            secrets: Their values, as they are sent; of a header value with a scheme, such as `Bearer x`, of `user:x`
                and of the base64 of either, the parts are replaced as well.
        """
        parts = {part for secret in secrets for part in _parts(secret) if len(part) >= SHORTEST}
        plain = {form for secret in parts for form in _forms(secret) if len(form) >= SHORTEST}
        forms = {*plain, *map(_quoted, plain)}
        self._forms = sorted(forms, key=len, reverse=True)
        self._heads = sorted({(form[: (len(form) + 1) // 2], form) for form in forms if len(form) >= SHORTEST_CUT})
        self._in_json = sorted({_quoted(form) for form in (*forms, *(head for head, _ in self._heads))})
        """What a value with a credential has in its JSON."""

    def text(self, text: str) -> str:
        """The text without credentials."""
        for form in self._forms:
            text = text.replace(form, REDACTED)
        for head, form in self._heads:
            if head in text:
                text = _without_beginning(text, head, form)
        return text

    def found_in(self, text: str) -> bool:
        """Whether the text has a credential, or the beginning of one."""
        return any(form in text for form in self._forms) or any(head in text for head, _ in self._heads)

    def value(self, value: Any) -> Any:
        """A JSON value without credentials, in keys, too."""
        if isinstance(value, str):
            return self.text(value)
        if not self._forms:
            return value
        try:
            text = json.dumps(value, ensure_ascii=False)
            if not any(form in text for form in self._in_json):
                return value  # by far the most values, some of which have millions of texts
        except (TypeError, ValueError, RecursionError):
            pass  # not JSON, which a check of the result refuses
        return self._walked(value)

    def _walked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        try:
            if is_list(value):
                return [self._walked(item) for item in value]
            if is_mapping(value):
                return {self._walked(key): self._walked(item) for key, item in value.items()}
        except RecursionError:  # nested too deeply for any result
            return REDACTED
        return value


def credentials_of(environment: Mapping[str, str]) -> Iterator[str]:
    """Values of variables that are named like credentials, and passwords of URLs; a path of a file is none."""
    for name, value in environment.items():
        if CREDENTIAL.search(name) and not (value.startswith("/") and Path(value).exists()):
            yield value
            yield from (unquote(part.partition("=")[2]).strip() for part in re.split("[,;]", value) if "=" in part)
        if "://" in value:
            yield from _of_url(value)


def _of_url(text: str) -> Iterator[str]:
    try:
        parts = urlsplit(text)
        password = parts.password
    except ValueError:
        return
    if password:
        yield password
        yield unquote(password)


def _parts(secret: str) -> Iterator[str]:
    """The credential, and what in it is one without the rest."""
    yield secret
    words = secret.split()[:MAX_PARTS]
    for word in words:
        yield word
        yield word.partition(":")[2]
        pair = _decoded(word)
        yield pair
        yield pair.partition(":")[2]


def _decoded(word: str) -> str:
    """The `user:password` of a basic credential; empty for any other text."""
    try:
        text = base64.b64decode(word, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text if ":" in text and text.isprintable() else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _forms(secret: str) -> Iterator[str]:
    yield secret
    yield json.dumps(secret)[1:-1]
    yield _quoted(secret)
    yield json.dumps(secret)[1:-1].replace("/", "\\/")  # as PHP writes it
    yield repr(secret)[1:-1]
    yield html.escape(secret)
    text = secret.encode("utf-8", "replace").decode()
    for quoted in (quote(text, safe=""), quote(text), quote_plus(text)):
        yield quoted
        yield re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), quoted)
    encoded = text.encode()
    yield encoded.hex()
    yield encoded.hex().upper()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):  # where it stands behind a name in one text, as in `user:password`
            yield _inner(encode(b"\0" * shift + encoded).decode(), shift)


def _inner(encoded: str, shift: int) -> str:
    """The characters of a base64 text that depend on the secret alone, not on what stands before or behind it."""
    stripped = encoded.rstrip("=")
    cut = len(encoded) - len(stripped)
    return stripped[(0, 2, 3)[shift] : len(stripped) - (1 if cut else 0)]


def _without_beginning(text: str, head: str, form: str) -> str:
    """The text without the beginnings of a form that are at least as long as its head."""
    pieces: list[str] = []
    start = 0
    while (place := text.find(head, start)) >= 0:
        end = place + len(head)
        while end < len(text) and end - place < len(form) and text[end] == form[end - place]:
            end += 1
        pieces += [text[start:place], REDACTED]
        start = end
    return "".join([*pieces, text[start:]])


NO_SECRETS = Redactor(())
