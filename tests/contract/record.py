"""`python -m tests.contract.record`: records the public API, the CRD and the protocol (`make contracts`).

With `--check` it reports what breaks the recorded contracts: removed or changed names of the public API, removed or
narrowed fields of the CRD, and what `buf breaking` reports for the protocol. With `--additions`, as in `make gen`, it
records the rest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.contract.crd_schema import Fields, fields_of, narrowed
from tests.contract.public_api import differences, public_api, read, written

from kestrl._shared.spec.crd import crd, sft_crd
from kestrl._shared.spec.sft import SFT_KIND

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
API, CRD, PROTO = FOLDER / "public_api.txt", FOLDER / "crd.json", FOLDER / "protocol.binpb"
BUF = ("tool", "run", "--quiet", "--from", "buf-bin==1.75.0", "buf")
INTENDED = "Where this is intended, record it with `make contracts`, and write a line for users into CHANGELOG.md."


def api_differences() -> list[str]:
    """How the public API differs from the recorded one."""
    return differences(read(API.read_text(encoding="utf-8")), public_api())


def crd_fields() -> Fields:
    """The fields of both CRDs as the models define them; those of SFTJob after its name."""
    own, of_sft = (each["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for each in (crd(), sft_crd()))
    return {**dict(fields_of(own)), **{f"{SFT_KIND}.{path}": field for path, field in fields_of(of_sft)}}


def crd_differences() -> list[str]:
    """What the CRD no longer accepts."""
    return narrowed(json.loads(CRD.read_text(encoding="utf-8")), crd_fields())


def protocol_differences() -> list[str]:
    """What `buf breaking` reports against the recorded protocol."""
    done = run_buf("breaking", "proto", "--against", str(PROTO))
    if done.returncode not in (0, 100):
        raise RuntimeError(f"buf breaking failed: {done.stderr}")
    return done.stdout.splitlines()


def record() -> None:
    """Writes what is now."""
    API.write_text(written(public_api()), encoding="utf-8")
    lines = [f"{json.dumps(path)}: {json.dumps(own, sort_keys=True)}" for path, own in sorted(crd_fields().items())]
    CRD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    done = run_buf("build", "proto", "--exclude-source-info", "-o", str(PROTO))
    if done.returncode:
        raise RuntimeError(f"buf build failed: {done.stderr}")


def run_buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    uv = shutil.which("uv", path=f"{ROOT}/.tools/bin") or "uv"
    return subprocess.run([uv, *BUF, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def breaking() -> list[str]:
    """All that breaks a recorded contract."""
    checks = {"public API": api_differences, "CRD": crd_differences, "protocol": protocol_differences}
    return [f"{what}: {line}" for what, check in checks.items() for line in check()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="report what breaks the recorded contracts")
    mode.add_argument("--additions", action="store_true", help="record changes unless one breaks a contract")
    given = parser.parse_args(arguments)
    if given.check or given.additions:
        found = breaking()
        if found:
            sys.stderr.write("\n".join([*found, INTENDED, ""]))
            return 1
    if not given.check:
        record()
    return 0


if __name__ == "__main__":
    sys.exit(main())
