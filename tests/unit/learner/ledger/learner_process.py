"""A process that runs learners without a model, one after another, as ordered: a JSON line each on stdin, how it ended
on stdout."""

from __future__ import annotations

import json
import sys
import time

from kestrl.storage import open_store
from kestrl_learner.ledger import Ledger, Superseded
from kestrl_learner.store import checkpoint
from kestrl_learner.store.run_record import RunRecord

GROUPS, SIZE, EPOCHS = 2, 8, 2


def open_ledger(url: str, run: str) -> Ledger:
    return Ledger(url, seed=1, size=SIZE, epochs=EPOCHS, run=run)


def learn(url: str, run: str, folder: str, pause: float) -> str:
    """A learner without a model: resume, then lease, finish, train and checkpoint to the end of the schedule."""
    ledger, store = open_ledger(url, run), open_store(folder)
    try:
        known = checkpoint.newest(store, outdated=lambda made: ledger.outdated(made.step, made.record.owner))
        done = 0 if known is None else known.step
        ledger.rewind(done)
        while done * GROUPS < SIZE * EPOCHS:
            leases = [ledger.lease(done) for _ in range(GROUPS)]
            held = [lease for lease in leases if lease is not None]
            for lease in held:
                ledger.finish(lease)
            time.sleep(pause)
            ledger.train(held, done + 1)
            done += 1
            ledger.check_owner()
            made = checkpoint.Checkpoint(step=done, state=b"%d" % done, record=RunRecord(owner=ledger.token))
            checkpoint.write(store, made, keep=2)
    except Superseded as error:
        return str(error)
    finally:
        ledger.close()
    return "done"


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(learn(*json.loads(line))) + "\n")
        sys.stdout.flush()
