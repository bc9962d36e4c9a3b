"""Credentials of a job's components, derived from the operator's key: nothing is stored, and no Secret is read.
Pure.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode

from kestrl._shared.credentials import Secret


def derive(key: bytes, uid: str) -> dict[str, str]:
    """All credentials of the job with this uid, by variable: HMAC-SHA256 of uid and variable."""
    return {
        secret.value: urlsafe_b64encode(hmac.digest(key, f"{uid}/{secret.value}".encode(), hashlib.sha256))
        .decode()
        .rstrip("=")
        for secret in Secret
    }
