"""The target Hugging Face Hub: a folder that the Hub's viewer shows as a data set, with a card."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kestrl._app.local.files import write_atomic
from kestrl._app.push.numbers import numbers_of
from kestrl._app.push.target import PushedRun, Target
from kestrl.episode import Purpose
from kestrl.errors import PlaceError, UserInputError
from kestrl.runstate.states import RunPhase
from kestrl.storage.episodes import EpisodeBatch
from kestrl.storage.summary import RunSummary
from kestrl.storage.table.files import file_of

CARD = "README.md"
SPLITS: Mapping[Purpose, str] = {Purpose.TRAIN: "train", Purpose.EVALUATION: "evaluation"}
OWN = "kestrl-episodes"
"""Tag of the cards that we write: a folder with another card is somebody's."""
IDENTITY = re.compile(r"^kestrl_push: ([0-9a-f]{16})-([0-9a-f]{8})$", re.MULTILINE)
"""Line of a card with the run's digest and the folder's own number."""


class HubFolder(Target):
    """A folder for the Hub.

    Args:
        folder: The folder: a new one, or one that an earlier push wrote.

    Raises:
        UserInputError: It holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self.key = f"hf {folder}"
        self._folder = folder
        self._run = PushedRun(id="", job="", storage="", settings={})
        self._summary: RunSummary | None = None
        card = folder / CARD
        self._written = IDENTITY.search(card.read_text("utf-8", "replace")) if card.is_file() else None
        self._identity = ""
        if folder.exists() and self._written is None and any(folder.iterdir()):
            raise UserInputError(f"--uri: {folder} holds something else than episodes; name a new folder")

    def open(self, run: PushedRun, *, live: bool) -> str:
        del live
        self._run = run
        digest = hashlib.sha256(f"{run.id}\n{run.storage}".encode()).hexdigest()[:16]
        if self._written is not None and self._written[1] != digest:
            raise UserInputError(f"--uri: {self._folder} holds the episodes of another run; name a new folder")
        # The number is new in a folder that was removed, which then gets everything again.
        number = secrets.token_hex(4) if self._written is None else self._written[2]
        self._identity = f"{digest}-{number}"
        self._summary = None
        self._write_card()
        return self._identity

    def metrics(self, step: int, record: Mapping[str, Any], at: float) -> None:
        """Metrics are no part of the data set; rows have the rewards."""

    def evaluation(self, step: int, means: Mapping[str, Any], at: float) -> None:
        """As `metrics`."""

    def episodes(self, batch: EpisodeBatch) -> None:
        if not batch.stored:
            return
        path = self._folder / "data" / SPLITS[batch.purpose] / f"step={batch.step:06d}.parquet"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(file_of(batch, self._run.id))
            partial.replace(path)
        except OSError as error:
            raise PlaceError(f"--uri: {path} cannot be written: {error.strerror}; name another folder") from error

    def finish(self, summary: RunSummary, at: float) -> None:
        del at
        self._summary = summary

    def close(self) -> None:
        if self._identity:
            self._write_card()

    def _write_card(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._folder / CARD, card_of(self._run, self._identity, self._splits(), self._summary))
        except OSError as error:
            raise PlaceError(f"--uri: {self._folder} cannot be written: {error.strerror}; name another") from error

    def _splits(self) -> Sequence[str]:
        return [split for split in SPLITS.values() if next((self._folder / "data" / split).glob("*.parquet"), None)]


def card_of(run: PushedRun, identity: str, splits: Sequence[str], summary: RunSummary | None) -> str:
    """The card of a data set: which files are which split, and what the run was."""
    model = run.settings.get("model", {}).get("base", "")
    head: dict[str, Any] = {
        "pretty_name": f"Episodes of {run.id}",
        "tags": [OWN, "reinforcement-learning", "agent", "tool-use"],
        "task_categories": ["text-generation", "reinforcement-learning"],
        "kestrl_push": identity,
    }
    if splits:
        files = [{"split": split, "path": f"data/{split}/*.parquet"} for split in splits]
        head["configs"] = [{"config_name": "default", "default": True, "data_files": files}]
    lines = [
        f"# Episodes of {run.id}",
        "",
        f"Every row is an attempt of a model at a task, recorded by KestRL while it trained{_of(model)}: `prompt`, "
        "`messages` and `tools` as text, `reward` and its parts, the failure with its boundary and code, and in `rows` "
        "the exact tokens with their mask, log-probabilities and advantages. A row without an episode is a group that "
        "failed as a whole.",
        "",
        *_result(summary),
    ]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n".join(lines).rstrip() + "\n"


def _of(model: str) -> str:
    return f" `{model}`" if model else ""


def _result(summary: RunSummary | None) -> Sequence[str]:
    if summary is None or summary.status not in {RunPhase.SUCCEEDED, RunPhase.FAILED}:
        return ["The run has not ended.", ""]
    status_lines = [f"The run {summary.status} after {summary.steps} of {summary.total_steps} steps.", ""]
    before, after = dict(numbers_of(summary.before or {})), dict(numbers_of(summary.after or {}))
    names = [name for name in after if name in before]
    if not names:
        return status_lines
    rows = [f"| {name} | {before[name]:.4g} | {after[name]:.4g} |" for name in names]
    return [*status_lines, "| held-out questions | before | after |", "|---|---|---|", *rows, ""]
