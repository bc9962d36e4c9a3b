"""`python -m kestrl_tools.environments.listing --out FILE`: lists the tasks of a generator of reasoning-gym as rows.

Runs in the interpreter of the environment. Its standard input is a JSON object: generator, settings, seed and size.
What is wrong with it is one line on the standard error, with exit status 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kestrl_tools.environments.reasoning_gym import rows


def main() -> int:
    """Writes one row a line; its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    request = json.load(sys.stdin)
    try:
        listed = list(rows(request["generator"], request["settings"], seed=request["seed"], size=request["size"]))
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - read by the command
        return 2
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in listed), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
