"""A program that prints an offline run of W&B as JSON lines. It runs in the environment that has `wandb`, whose file is
a log of LevelDB's format: blocks of 32 KiB, records with seven bytes before them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

pb: Any = import_module("wandb.proto.wandb_internal_pb2")
BLOCK, HEADER = 32768, 7
FULL, FIRST, LAST = 1, 2, 4


def records(content: bytes) -> Iterator[bytes]:
    at, parts = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block is empty
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        data = content[at + HEADER : at + HEADER + length]
        parts = data if kind in (FULL, FIRST) else parts + data
        if kind in (FULL, LAST):
            yield parts
        at += HEADER + length


def named(entries: Any) -> dict[str, object]:
    return {entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


for data in records(Path(sys.argv[1]).read_bytes()):
    record = pb.Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    known: dict[str, Any] = {}
    if kind == "history":
        known = {kind: named(record.history.item)}
    elif kind == "summary":
        known = {kind: named(record.summary.update)}
    elif kind == "run":
        known = {kind: record.run.run_id, "name": record.run.display_name, "project": record.run.project}
        known["config"] = named(record.run.config.update)
    elif kind == "exit":
        known = {kind: record.exit.exit_code}
    sys.stdout.write(json.dumps(known) + "\n" if known else "")
