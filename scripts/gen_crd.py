"""Writes the CustomResourceDefinition that the chart carries; with `--check`, says whether the committed one is stale."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kestrl.spec.crd import crd_yaml

TARGET = Path(__file__).parents[1] / "charts" / "kestrl" / "files" / "agentrljobs.kestrl.dev.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed file is not what the spec gives")
    if parser.parse_args().check:
        if TARGET.exists() and TARGET.read_text() == crd_yaml():
            return 0
        print(f"stale: {TARGET.relative_to(Path.cwd())}; run `make gen`", file=sys.stderr)
        return 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(crd_yaml())
    return 0


if __name__ == "__main__":
    sys.exit(main())
