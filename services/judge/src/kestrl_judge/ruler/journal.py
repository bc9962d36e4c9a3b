"""The journal of judge calls: what was spent, and grades by content. A restarted judge asks nothing twice.

A file of JSON lines, flushed after each, so that the end of the process loses no answered call. It is rewritten at the
start, and when it has doubled; a line that was cut by the end of a process is ignored.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from kestrl_judge.ruler.budget import Usage
from kestrl_judge.ruler.reply import Grade

log = logging.getLogger(__name__)
MOST_GRADES = 1024
"""Number of kept answers; the oldest is dropped first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """The valid answer to one prompt."""

    model: str
    grades: dict[str, Grade]
    content: str
    """The reply as received."""


class Journal:
    """Spent budget and grades, in memory and in a file if there is a folder."""

    def __init__(self, folder: str | None, name: str = "ruler") -> None:
        self._path = None if folder is None else Path(folder) / f"{name}.jsonl"
        self._file: TextIOWrapper | None = None
        self._grades: OrderedDict[str, Graded] = OrderedDict()
        self._lines = 0
        self.spent = Usage()

    def open(self) -> None:
        """Reads the journal of an earlier process, and rewrites it without what is no longer needed."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                self._read(line)
        self._rewrite()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def get(self, key: str) -> Graded | None:
        """A known answer."""
        grade = self._grades.get(key)
        if grade is not None:
            self._grades.move_to_end(key)
        return grade

    def spend(self, usage: Usage) -> None:
        """Records an answered request, whether or not its answer is valid."""
        self.spent.add(usage)
        self._write({"spent": asdict(usage)})

    def put(self, key: str, graded: Graded) -> None:
        """Records a valid answer."""
        self._grades[key] = graded
        while len(self._grades) > MOST_GRADES:
            self._grades.popitem(last=False)
        self._write({"key": key, **asdict(graded)})

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        self._lines += 1
        if self._lines > 4 * MOST_GRADES:
            self._rewrite()

    def _read(self, line: str) -> None:
        try:
            entry: dict[str, Any] = json.loads(line)
            if "spent" in entry:
                self.spent.add(Usage(**entry["spent"]))
                return
            grades = {name: Grade(**grade) for name, grade in entry["grades"].items()}
            graded = Graded(model=entry["model"], grades=grades, content=entry["content"])
            self._grades[entry["key"]] = graded
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("a line of %s is damaged and ignored", self._path)

    def _rewrite(self) -> None:
        assert self._path is not None
        self.close()
        lines = [{"spent": asdict(self.spent)}, *({"key": key, **asdict(it)} for key, it in self._grades.items())]
        new_file = self._path.with_suffix(".new")
        new_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        new_file.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._lines = len(lines)
