"""`python -m kestrl_learner.model.merge --model M --adapter DIR --out DIR`: the program of `kestrl export --merge`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kestrl._shared.conventions import EXIT_INPUT
from kestrl.errors import UserInputError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from kestrl_learner.model.policy_model import merge

    try:
        merge(arguments.model, arguments.adapter, arguments.out)
    except UserInputError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the error message of the program
        return EXIT_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
