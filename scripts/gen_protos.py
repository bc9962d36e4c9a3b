"""Generates `src/kestrl/api` from `proto/`; with `--check`, only reports whether it is up to date.

The generator is deliberately older than the runtime (stubs refuse a runtime older than their generator), so it runs in
a temporary environment created by uv.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
TARGET = ROOT / "src" / "kestrl" / "api"
GENERATORS = ("grpcio-tools==1.80.0", "mypy-protobuf==5.1.0", "setuptools")


def generate(out: Path) -> None:
    """Writes the stubs of every proto file under `out`, as `out/kestrl/api/...`."""
    files = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    options = [f"--{plugin}_out={out}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    withs = [flag for name in GENERATORS for flag in ("--with", name)]
    command = ["uv", "run", "--no-project", "--isolated", "--quiet", *withs]
    command += ["python", "-m", "grpc_tools.protoc", f"--proto_path={PROTO}", *options, *files]
    subprocess.run(command, check=True, cwd=PROTO)
    for folder in [out / "kestrl" / "api", *(out / "kestrl" / "api").rglob("*")]:
        if folder.is_dir() and folder.name != "__pycache__":
            (folder / "__init__.py").write_text('"""Generated; never edited."""\n')


def relative_files(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def differences(made: Path, committed: Path) -> list[Path]:
    """Files that differ or exist on one side only."""
    here, there = relative_files(made), relative_files(committed)
    same = here & there
    changed = {path for path in same if not filecmp.cmp(made / path, committed / path, shallow=False)}
    return sorted(changed | (here ^ there))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed stubs are not what proto/ gives")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        made = Path(folder) / "kestrl" / "api"
        if check:
            stale = differences(made, TARGET)
            for path in stale:
                print(f"stale: src/kestrl/api/{path}; run `make gen`", file=sys.stderr)
            return 1 if stale else 0
        for path in relative_files(TARGET) - relative_files(made):
            (TARGET / path).unlink()
        for path in relative_files(made):
            (TARGET / path).parent.mkdir(parents=True, exist_ok=True)
            (TARGET / path).write_bytes((made / path).read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
