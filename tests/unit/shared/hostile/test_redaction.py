"""Credentials are replaced in every form in which a server may repeat them."""

from __future__ import annotations

import base64
import html
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl._shared.log_lines import RedactedLines
from kestrl.redaction import REDACTED, Redactor, credentials_of

secrets = st.text(st.characters(exclude_categories=["Cs", "Zs", "Cc"]), min_size=8, max_size=40).filter(
    lambda text: text not in REDACTED
)
REPEATS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "json": json.dumps,
    "json utf-8": lambda text: json.dumps(text, ensure_ascii=False),
    "json of php": lambda text: json.dumps(text).replace("/", "\\/"),
    "json in json": lambda text: json.dumps(json.dumps(text, ensure_ascii=False), ensure_ascii=False),
    "python": repr,
    "html": html.escape,
    "url": lambda text: quote(text, safe=""),
    "path": quote,
    "url in lower case": lambda text: quote(text, safe="").lower() if text.islower() else quote(text),
    "form": quote_plus,
    "hex": lambda text: text.encode().hex(),
    "HEX": lambda text: text.encode().hex().upper(),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64url": lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    "base64url unpadded": lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    "basic": lambda text: base64.b64encode(f"user:{text}".encode()).decode(),
    "inside base64": lambda text: base64.b64encode(f"a:{text}:b".encode()).decode(),
}


@pytest.mark.parametrize("form", REPEATS)
@given(secret=secrets)
def test_a_repeated_credential_is_replaced(form: str, secret: str) -> None:
    repeated = REPEATS[form](secret)
    redactor = Redactor([secret])
    shown = redactor.text(f"401 wrong key {repeated} sent")
    assert REDACTED in shown
    assert shown.startswith("401 wrong key")
    assert secret not in shown
    assert not redactor.found_in(shown)
    value = redactor.value({"headers": [{repeated: f"it is {repeated}"}], "status": 401})
    assert REDACTED in json.dumps(value, ensure_ascii=False)
    assert secret not in json.dumps(value, ensure_ascii=False) + "".join(map(str, value["headers"][0]))


@pytest.mark.parametrize("length", range(16, 41))
def test_a_credential_that_is_cut_is_replaced_from_its_half_on(length: int) -> None:
    secret = "0123456789abcdefghijklmnopqrstuvwxyzABCD"[:length]
    redactor = Redactor([secret])
    for end in range((length + 1) // 2, length + 1):
        for repeated in (secret[:end], f"key {secret[:end]}\n[cut after 9 bytes]", f"{secret[:end]} {secret}"):
            assert secret[: (length + 1) // 2] not in redactor.text(repeated)


def test_the_parts_of_a_header_are_replaced_alone() -> None:
    redactor = Redactor([f"Bearer {'k' * 20}", "short"])
    assert redactor.text(f"token {'k' * 20}, a short text") == f"token {REDACTED}, a short text"
    assert redactor.text("Bearer of news") == "Bearer of news"


def test_a_basic_credential_is_replaced_as_what_it_encodes() -> None:
    for sent in ("jane:correct-horse", base64.b64encode(b"jane:correct-horse").decode()):
        redactor = Redactor([f"Basic {sent}"])
        for repeated in ("jane:correct-horse", "correct-horse", base64.b64encode(b"jane:correct-horse").decode()):
            assert redactor.text(f"no user {repeated}") == f"no user {REDACTED}"


def test_values_without_credentials_stay_the_same_object() -> None:
    value = {"a": ["x" * 100] * 1_000, "b": None, "c": 1.5}
    assert Redactor(["s" * 20]).value(value) is value


def test_the_cost_is_bounded_and_linear() -> None:
    pem = "\n".join(f"line {number} of a key {'k' * 64}" for number in range(10_000))
    redactor = Redactor([pem, "a" * 4_096])
    started = time.perf_counter()
    redactor.text("a" * 8_000_000)
    redactor.text(("a" * 2_047 + "b") * 2_000)
    redactor.value([{"key": "v"}] * 100_000)
    assert time.perf_counter() - started < 20
    assert "k" * 64 not in redactor.text(f"it is {pem}")


def test_credentials_of_an_environment_are_known_by_their_names(tmp_path: object) -> None:
    environment = {
        "KESTRL_TOOL_SECRET_0": "tool-0123",
        "KESTRL_ROLLOUT_TO_TOOLS_TOKEN": "rollout-0123",
        "KESTRL_JUDGE_KEY_1": "judge-0123",
        "KESTRL_ENGINE_KEY": "engine-0123",
        "AWS_SECRET_ACCESS_KEY": "aws-0123",
        "AZURE_STORAGE_SAS_TOKEN": "sv=2024&sig=azure-0123",
        "AZURE_STORAGE_CONNECTION_STRING": "no",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=otel%2F0123,other=otel-4567",
        "PROXY": "http://jane:proxy-0123@proxy:3128",
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path),
        "GIT_AUTHOR_NAME": "Jane Miller",
        "HOME": "/home/jane-miller",
    }
    redactor = Redactor(credentials_of(environment))
    text = " ".join(environment.values()) + " otel/0123"
    shown = redactor.text(text)
    assert "0123" not in shown.replace(str(tmp_path), "")
    assert "otel-4567" not in shown
    for kept in (str(tmp_path), "Jane Miller", "/home/jane-miller", "@proxy:3128"):
        assert kept in shown


def test_a_traceback_in_the_log_has_no_credential() -> None:
    lines = RedactedLines("%(levelname)s %(message)s", Redactor(["sk-canary-0123"]))
    try:
        try:
            raise ValueError("the server says sk-canary-0123")
        except ValueError as error:
            raise RuntimeError("cannot be read") from error
    except RuntimeError:
        record = logging.LogRecord("a", logging.ERROR, __file__, 1, "%s failed", ("sk-canary-0123",), sys.exc_info())
    shown = lines.format(record)
    assert f"ERROR {REDACTED} failed" in shown
    assert f"the server says {REDACTED}" in shown
    assert "canary" not in shown


PROGRAM = """
import logging
from kestrl._shared.log_lines import start_log
from kestrl._shared.service import exit_code
from kestrl.errors import UserInputError

start_log()
logging.getLogger("opentelemetry.exporter").error("401 Unauthorized: no such key %s", "otel-canary-0123")

def run():
    raise UserInputError("the server says token-canary-0123")

raise SystemExit(exit_code(run))
"""


def test_the_log_and_the_last_line_of_a_service_have_no_credential() -> None:
    environment = {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=otel-canary-0123", "HF_TOKEN": "token-canary-0123"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert done.returncode == 2
    assert f"401 Unauthorized: no such key {REDACTED}" in done.stderr
    assert f"error: the server says {REDACTED}" in done.stderr
    assert "canary" not in done.stderr
