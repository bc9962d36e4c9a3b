"""`python -m kestrl_learner.rank`: a rank of the learner other than 0. It performs what rank 0 orders."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from typing import TYPE_CHECKING

from kestrl._shared.log_lines import start_log
from kestrl._shared.processes.stopping import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before slow imports

from kestrl._shared.service import exit_code

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]


def arguments() -> argparse.Namespace:
    """The command line, which `rank_processes.start_rank` writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--per-machine", type=int, required=True, help="ranks of each machine or pod")
    parser.add_argument("--store", required=True, help="HOST:PORT of rank 0's store")
    parser.add_argument("--device", required=True, help="type of device: cpu, cuda or npu")
    return parser.parse_args()


def main() -> None:
    """Joins the ranks and follows rank 0 to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all ranks, and rank 0 decides
    from kestrl_learner.ranks.group import EXIT_LOST, RankLost, meet

    options = arguments()
    start_log(f"%(asctime)s %(levelname)s %(name)s: rank {options.rank}: %(message)s")
    try:
        store = meet(options.store, options.count)
        if options.rank < options.per_machine:
            follow_rank_0(options, store)
        else:
            follow_from_another_pod(options, store)
    except RankLost as error:
        logging.error("%s", error.failure())  # noqa: LOG015 - of this program
        raise SystemExit(EXIT_LOST) from None


def follow_rank_0(options: argparse.Namespace, store: Store) -> None:
    """Performs rank 0's commands to the end.

    Raises:
        RankLost: Another rank ended.
    """
    from kestrl_learner.ranks.group import RankGroup
    from kestrl_learner.train.commands import follow
    from kestrl_learner.train.compute import RankWork

    group = RankGroup(store, options.rank, options.count, options.device, per_machine=options.per_machine)
    follow(group, RankWork(group))
    group.leave()


def follow_from_another_pod(options: argparse.Namespace, store: Store) -> None:
    """Takes the rank's place, then does the same; a failure is reported to rank 0, which cannot see this process.

    Raises:
        RankLost: The place cannot be taken, or another rank ended.
    """
    from kestrl_learner.ranks.group import RankLost
    from kestrl_learner.ranks.places import Loss, gang_of, leave_with, report_loss, take_place

    leave_with(gang_of(store, options.count), options.store, options.count)
    take_place(store, options.rank)
    try:
        follow_rank_0(options, store)
    except RankLost:
        raise
    except Exception as error:
        report_loss(store, Loss(f"rank {options.rank}: {type(error).__name__}: {error}", failed=True))
        raise


if __name__ == "__main__":
    sys.exit(exit_code(main))
