"""Credentials are replaced in every form in which a server may repeat them."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl._shared.redaction import REDACTED, Redactor

SECRET = 'sk-canary "é" /+? 0123'
secrets = st.text(st.characters(exclude_categories=["Cs", "Zs", "Cc"]), min_size=8, max_size=40)


@pytest.mark.parametrize(
    "repeat",
    [
        str,
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        lambda text: quote(text, safe=""),
        quote_plus,
        lambda text: base64.b64encode(text.encode()).decode(),
        lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
        lambda text: base64.b64encode(f"user:{text}".encode()).decode(),
        lambda text: base64.b64encode(f"a:{text}:b".encode()).decode(),
    ],
    ids=["plain", "json", "json utf-8", "url", "form", "base64", "base64url", "basic", "inside base64"],
)
@given(secret=secrets)
def test_a_repeated_credential_is_replaced(repeat: object, secret: str) -> None:
    assert callable(repeat)
    answer = f"401 wrong key {repeat(secret)} sent"
    shown = Redactor([secret]).text(answer)
    assert REDACTED in shown
    assert shown.startswith("401 wrong key")
    assert secret not in shown


def test_the_parts_of_a_header_are_replaced_alone() -> None:
    redactor = Redactor([f"Bearer {'k' * 20}", "short"])
    assert redactor.text(f"token {'k' * 20}, a short text") == f"token {REDACTED}, a short text"
    assert redactor.text("Bearer of news") == "Bearer of news"
