"""Writes what Kubernetes and its users read of our models: the CRD that the chart carries, and the list of conditions and reasons.

With `--check` it says which of the committed files are stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from kestrl.spec.crd import crd_yaml
from kestrl_operator.conditions import NOT_OBSERVED, REASONS

ROOT = Path(__file__).parents[1]


def conditions_page() -> str:
    lines = [
        "# Conditions of an AgentRLJob",
        "",
        "Made by `make gen` from `operator/src/kestrl_operator/conditions.py`; a reason that is not here is never written. A condition says what was",
        f"observed for the generation in its `observedGeneration`; what was not looked at yet is `Unknown` with reason `{NOT_OBSERVED}`.",
    ]
    for kind, reasons in REASONS.items():
        lines += ["", f"## {kind}", "", "| reason | means |", "|---|---|"]
        lines += [f"| `{reason}` | {told} |" for reason, told in reasons.items()]
    return "\n".join(lines) + "\n"


def files() -> Iterator[tuple[Path, str]]:
    yield ROOT / "charts" / "kestrl" / "files" / "agentrljobs.kestrl.dev.yaml", crd_yaml()
    yield ROOT / "docs" / "conditions.md", conditions_page()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a committed file is not what the models give")
    if parser.parse_args().check:
        stale = [path for path, text in files() if not path.exists() or path.read_text() != text]
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)}; run `make gen`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
