"""Credentials of a job: the same at each derivation, and different from those of other jobs."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kestrl._shared.credentials import Secret
from kestrl_operator.credentials import derive

KEY, UID = b"a key of the operator's, 32 bytes", "5f0c2a9b-0000-4000-8000-000000000000"


def test_a_credential_is_the_keyed_hash_of_job_and_variable() -> None:
    """Written out in full: every later version of the operator must derive the same credentials."""
    for secret in Secret:
        digest = hmac.new(KEY, f"{UID}/{secret.value}".encode(), hashlib.sha256).digest()
        assert base64.urlsafe_b64decode(derive(KEY, UID)[secret.value] + "=") == digest


def test_every_variable_has_its_own_credential() -> None:
    found = derive(KEY, UID)
    assert set(found) == {secret.value for secret in Secret}
    assert len(set(found.values())) == len(Secret)


def test_a_restarted_operator_derives_the_same_credentials() -> None:
    program = f"from kestrl_operator.credentials import derive; print(sorted(derive({KEY!r}, {UID!r}).items()))"
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == str(sorted(derive(KEY, UID).items()))


@given(st.binary(min_size=16, max_size=64), st.binary(min_size=16, max_size=64), st.uuids(), st.uuids())
def test_another_key_or_job_gives_other_credentials(key: bytes, other: bytes, uid: object, another: object) -> None:
    found = derive(key, str(uid))
    assert found == derive(key, str(uid))
    if key.rstrip(b"\0") != other.rstrip(b"\0"):  # HMAC pads a key with zeros
        assert not set(found.values()) & set(derive(other, str(uid)).values())
    if uid != another:
        assert not set(found.values()) & set(derive(key, str(another)).values())


@given(st.binary(min_size=16), st.text())
def test_credentials_are_valid_header_values(key: bytes, uid: str) -> None:
    for value in derive(key, uid).values():
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", value)
