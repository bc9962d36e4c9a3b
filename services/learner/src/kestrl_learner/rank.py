"""`python -m kestrl_learner.rank`: a rank of the learner other than 0. It performs what rank 0 orders."""

from __future__ import annotations

import argparse
import logging
import sys

import kestrl.stopping  # noqa: F401  # pyright: ignore[reportUnusedImport] - it takes SIGTERM from here on
from kestrl.service import exit_code


def arguments() -> argparse.Namespace:
    """The command line, which `launcher` writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="port of rank 0's store on the loopback interface")
    parser.add_argument("--device", required=True, help="type of device: cpu, cuda or npu")
    return parser.parse_args()


def main() -> None:
    """Joins the ranks and follows rank 0 to its end."""
    from kestrl_learner.commands import follow
    from kestrl_learner.compute import RankWork
    from kestrl_learner.ranks import EXIT_LOST, Group, RankLost, meet

    given = arguments()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s %(name)s: rank {given.rank}: %(message)s",
        stream=sys.stderr,
    )
    try:
        group = Group(meet(given.port, given.count), given.rank, given.count, given.device)
        follow(group, RankWork(group))
        group.leave()
    except RankLost as error:
        logging.error("%s", error.failure())  # noqa: LOG015 - of this program
        raise SystemExit(EXIT_LOST) from None


if __name__ == "__main__":
    sys.exit(exit_code(main))
