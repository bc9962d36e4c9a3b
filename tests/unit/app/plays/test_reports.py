"""Reports of vf-validate and of `openenv validate`, which `kestrl env check --report` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.plays.reports import read_report
from kestrl.errors import UserInputError

REPORTS = Path(__file__).parents[3] / "data" / "reports"
"""As verifiers 0.4.0 and openenv 0.10.0 have written them."""
UNTOUCHED = "doing nothing earns as much as the solution (vf-validate): at task 0, task 1"


def vf_report(folder: Path, *rows: dict[str, Any], missing: int = 0) -> Path:
    """A report of vf-validate."""
    summary = {"total": len(rows) + missing, "outcomes": {"missing": missing}}
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def part(mode: str, reason: str, **more: Any) -> dict[str, Any]:
    return {"index": 0, "name": "first", "mode": mode, "reason": reason, "error": None, "error_type": None, **more}


@pytest.mark.parametrize("path", [REPORTS / "vf_validate", REPORTS / "vf_validate" / "results.jsonl"])
def test_an_untouched_task_that_passes_is_a_problem(path: Path) -> None:
    report = read_report(path)
    assert (report.problems, report.warnings) == ([UNTOUCHED], [])


@pytest.mark.parametrize(
    ("row", "problems", "warnings"),
    [
        (part("gold", "valid"), [], []),
        (part("gold", "invalid"), ["the solution of a task does not pass it (vf-validate): at task first"], []),
        (
            part("setup", "error", error="no such image", error_type="SandboxError"),
            ["the set-up of a task failed (vf-validate): SandboxError: no such image: at task first"],
            [],
        ),
        (part("noop", "timeout"), ["doing nothing failed (vf-validate): timeout: at task first"], []),
        (part("gold", "unchecked"), [], ["vf-validate had nothing to check: at task first"]),
    ],
)
def test_each_reason_of_vf_validate_counts(
    tmp_path: Path, row: dict[str, Any], problems: list[str], warnings: list[str]
) -> None:
    report = read_report(vf_report(tmp_path, row))
    assert (report.problems, report.warnings) == (problems, warnings)


def test_a_report_that_is_not_complete_is_a_warning(tmp_path: Path) -> None:
    report = read_report(vf_report(tmp_path, part("gold", "valid"), missing=3))
    assert report.warnings == ["the report of vf-validate is missing 3 of 4 tasks; go on with --resume"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("results.jsonl", "", "has no task"),
        ("results.jsonl", '{"mode": "all", "gold": {"reason": "valid"}}\n', "is no report that is known"),
        ("results.jsonl", '{"mode": "gold", "reason": "fine"}\n', "is no report that is known"),
        ("results.jsonl", "{", "is no JSON"),
        ("report.json", "{}", "is no report that is known"),
        ("report.json", '{"results": [{"status": "odd"}], "verdict": "pass"}', "is no report that is known"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserInputError, match=f"^--report .*{message}"):
        read_report(tmp_path / name)


def test_a_report_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"^--report .*results\.jsonl: cannot be read"):
        read_report(tmp_path)
