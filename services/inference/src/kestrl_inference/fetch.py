"""Downloads and verifies a version; on a failure nothing is left on disk."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from kestrl.episode import PolicyVersion
from kestrl.errors import KestrlError, StorageError, place_error
from kestrl.storage import AdapterManifest, fetch_adapter, open_store
from kestrl.storage.adapters import WEIGHTS


def fetch(uri: str, policy: PolicyVersion, target: Path) -> AdapterManifest:
    """Downloads `policy` into the new folder `target`.

    Raises:
        StorageError: It was not completely published, is corrupt, is another version, or has an unusable probe.
        PlaceError: The engine's own disk is full or cannot be written.
        UserInputError: The address is invalid.
    """
    remove(target)
    try:
        manifest = fetch_adapter(open_store(uri), target)
        check(manifest, policy, uri)
    except OSError as error:
        remove(target)
        unusable = place_error(error, str(target))
        raise unusable or StorageError(f"cannot write {target}: {error}", code="disk_failed") from error
    except KestrlError:
        remove(target)
        raise
    return manifest


def remove(target: Path) -> None:
    for folder in (target, target.with_name(target.name + ".partial")):
        shutil.rmtree(folder, ignore_errors=True)


def check(manifest: AdapterManifest, policy: PolicyVersion, uri: str) -> None:
    """Checks that the manifest is of the version, and that its probe is usable.

    Raises:
        StorageError: Code `wrong_policy` or `manifest_malformed`.
    """
    if manifest.policy != policy:
        raise StorageError(f"{uri} contains {manifest.policy.name}, not {policy.name}", code="wrong_policy")
    if manifest.files.get(WEIGHTS) != manifest.sha256:
        raise StorageError(
            f"{uri}: the manifest's version is not the digest of its {WEIGHTS}", code="manifest_malformed"
        )
    probe = manifest.probe
    if not all(math.isfinite(value) for value in (*probe.logprobs, *probe.base_logprobs)):
        raise StorageError(f"{uri}: the probe has a log-prob that is not finite", code="manifest_malformed")
    expected = len(probe.token_ids) - 1
    if expected < 1 or len(probe.logprobs) != expected or len(probe.base_logprobs) != expected:
        raise StorageError(
            f"{uri}: a probe of {len(probe.token_ids)} tokens with {len(probe.logprobs)} and "
            f"{len(probe.base_logprobs)} "
            "log-probs proves nothing",
            code="manifest_malformed",
        )
