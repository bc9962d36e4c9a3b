"""Data sets of e-mail search, in verl's row format, with the database that their tools read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kestrl.errors import UserInputError, place_error
from kestrl_email.demonstrations import FAULTY, GOOD, Habits, conversation_row, demonstrations
from kestrl_email.world import EDITION, SYSTEM_PROMPT, Split, Task, make_tasks, whole_or_nothing, write_database

TOOLS = {"": ("search_emails", "read_email", "return_final_answer"), "search": ("search_emails",)}
"""Tools of the rows, by the second part of a path."""
SPLITS = {"train": Split.TRAIN, "validation": Split.VALIDATION}
TRANSCRIPTS = {"transcripts": GOOD, "transcripts/faulty": FAULTY}
"""Habits of the demonstrator of conversations, by their path. Their people and topics occur in no other split."""


def row(task: Task, number: int, database: Path, tools: Sequence[str]) -> dict[str, Any]:
    """Converts a task to a row in verl's format, for a job with these tools."""
    create = {"create_kwargs": {"database": str(database), "inbox": task.inbox}}
    return {
        "data_source": f"kestrl-email/{task.inbox.rpartition('-')[0]}",
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task.question}],
        "reward_model": {
            "style": "rule",
            "ground_truth": {
                "answer": task.answer,
                "message_id": task.message_id,
                "attribute": task.attribute,
                "named": [task.person, task.topic],
            },
        },
        "extra_info": {"index": number, "need_tools_kwargs": True, "tools_kwargs": dict.fromkeys(tools, create)},
    }


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Writes a JSONL file atomically."""
    with whole_or_nothing(path) as partial, partial.open("w", encoding="utf-8") as lines:
        for item in rows:
            lines.write(json.dumps(item, ensure_ascii=False) + "\n")


def _conversations(habits: Habits, stem: str, size: int, seed: int, cache_dir: Path) -> Path:
    """The file of conversations for `kestrl sft`."""
    rows = cache_dir / f"{stem}-{size}-{seed}-v{EDITION}.jsonl"
    if not rows.exists():
        with TemporaryDirectory(dir=cache_dir) as folder:
            played = demonstrations(Path(folder), size, habits, seed)
            write_rows(rows, (conversation_row(messages) for messages in played))
    return rows


def provide(path: str, size: int, seed: int, cache_dir: Path) -> Path:
    """The rows of `demo://email/PATH`, generated unless they exist.

    Args:
        path: `train` or `validation`; with the suffix `/search` for a job whose only tool is search_emails.
            `transcripts` or `transcripts/faulty` for conversations to fine-tune on, of which the faulty ones often
            choose wrongly and so leave something to reinforcement learning.
        size: Number of questions.
        seed: Seed of the world, which determines mails and questions.
        cache_dir: Folder for rows and database.

    Raises:
        UserInputError: There is no such split, or the folder cannot be written to.
    """
    if path in TRANSCRIPTS:
        return _conversations(TRANSCRIPTS[path], f"email-{path.replace('/', '-')}", size, seed, cache_dir)
    split, _, kind = path.partition("/")
    if split not in SPLITS or kind not in TOOLS:
        known = [*(f"{name}/{kind}".rstrip("/") for name in SPLITS for kind in TOOLS), *TRANSCRIPTS]
        raise UserInputError(f"demo://email/{path}: there is no such data (there are: {', '.join(known)})")
    stem = f"email-{split}-{size}-{seed}-v{EDITION}"
    rows, database = cache_dir / f"{stem}{kind and f'-{kind}'}.jsonl", cache_dir / f"{stem}.db"
    if not (rows.exists() and database.exists()):
        tasks = list(make_tasks(SPLITS[split], size, seed))
        try:
            write_database(database, tasks)
        except sqlite3.OperationalError as error:
            raise place_error(error, str(database)) or error from error
        write_rows(rows, (row(task, number, database, TOOLS[kind]) for number, task in enumerate(tasks)))
    return rows
