"""Exceptions as text, whatever a user's class does."""

from __future__ import annotations

import pytest

from kestrl.errors import MAX_DESCRIBED, KestrlError, described


class Mute(KestrlError):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class NotText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("lost"), "ValueError: lost"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("a\ud800b"), "ValueError: a?b"),
        (Mute("x"), "Mute: (its __str__ raised KeyboardInterrupt)"),
        (NotText(), "NotText: (its __str__ raised TypeError)"),
    ],
)
def test_an_exception_is_described_in_utf8(error: BaseException, text: str) -> None:
    assert described(error) == text


def test_a_description_is_bounded() -> None:
    assert len(described(ValueError("x" * 10_000))) == MAX_DESCRIBED


def test_a_failure_with_any_error_text_can_be_sent() -> None:
    assert Mute("x").failure().message == "(its __str__ raised KeyboardInterrupt)"
    failure = KestrlError("a\ud800", code="b\ud800").failure()
    assert (failure.message, failure.code) == ("a?", "b?")
