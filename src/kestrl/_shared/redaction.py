"""Removal of credentials from what comes back from where they were sent: servers repeat them in errors and answers,
which would carry them into logs, failures, stored episodes and to the model.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

SHORTEST = 8
"""Characters of the shortest text that is taken for a credential: replacing shorter ones would garble other texts."""
REDACTED = "[redacted]"


class Redactor:
    """Replaces credentials in texts, also where they are encoded: in URLs, in JSON, in base64."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Knows the credentials.

        Args:
            secrets: Their values, as they are sent; of a header value with a scheme, such as `Bearer x`, both parts.
        """
        known = {part for secret in secrets for part in (secret, *secret.split()) if len(part) >= SHORTEST}
        self._forms = sorted({form for secret in known for form in _forms(secret)}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """The text without credentials."""
        for form in self._forms:
            text = text.replace(form, REDACTED)
        return text

    def found_in(self, text: str) -> bool:
        return any(form in text for form in self._forms)


NO_SECRETS = Redactor(())


def _forms(secret: str) -> Iterator[str]:
    yield secret
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield quote(secret, safe="")
    yield quote_plus(secret)
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):  # where it stands behind a name in one text, as in `user:password`
            yield _inner(encode(b"\0" * shift + secret.encode()).decode(), shift)


def _inner(encoded: str, shift: int) -> str:
    """The characters of a base64 text that depend on the secret alone, not on what stands before or behind it."""
    stripped = encoded.rstrip("=")
    cut = len(encoded) - len(stripped)
    return stripped[(0, 2, 3)[shift] : len(stripped) - (1 if cut else 0)]
