"""Reports of other checks of an environment, verifiers' vf-validate and `openenv validate`, as findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kestrl._app.plays.verdict import PlaysVerdict, named
from kestrl.errors import UserInputError
from kestrl.tools.shapes import is_list, is_mapping

LARGEST = 64 * 2**20
"""Bytes of a report."""
RESULTS, SUMMARY = "results.jsonl", "summary.json"
"""Files of a run of vf-validate."""
CHECKS: Mapping[str, tuple[str, str]] = {
    "gold": ("the solution", "the solution of a task does not pass it"),
    "noop": ("doing nothing", "doing nothing earns as much as the solution"),
    "setup": ("the set-up of a task", "a task cannot be set up"),
}
"""What a check of vf-validate plays, and what it says of a task that is invalid."""
REASONS = ("valid", "invalid", "unchecked", "error", "timeout")
VERDICTS = ("pass", "warn", "fail")
STATUSES = ("pass", "fail", "skip", "error")
MOST_TEXT = 300
Object = Mapping[str, Any]


def read_report(path: Path) -> PlaysVerdict:
    """The findings of a report: a folder of vf-validate, its results.jsonl, or the JSON of `openenv validate`.

    Raises:
        UserInputError: It is no such report.
    """
    file = path / RESULTS if path.is_dir() else path
    text = _text(file)
    if file.suffix == ".jsonl":
        summary = file.with_name(SUMMARY)
        return _of_verifiers(file, _rows(file, text), _object(summary, _text(summary)) if summary.exists() else {})
    report = _object(file, text)
    if is_list(report.get("results")) and "verdict" in report:
        return _of_openenv(file, report)
    if is_list(report.get("criteria")) and "passed" in report:
        return _of_server(file, report)
    raise _unknown(file)


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST:
            raise UserInputError(f"--report {file}: has more than {LARGEST} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"--report {file}: cannot be read: {error}") from error


def _object(file: Path, text: str) -> Object:
    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"--report {file}: is no JSON: {error}") from error
    if not is_mapping(content):
        raise _unknown(file)
    return cast("Object", content)


def _unknown(file: Path) -> UserInputError:
    return UserInputError(
        f"--report {file}: is no report that is known; name the folder that vf-validate has written, or the file of "
        "openenv validate --output"
    )


def _rows(file: Path, text: str) -> list[Object]:
    rows = [_object(file, line) for line in text.splitlines() if line.strip()]
    if not rows:
        raise UserInputError(f"--report {file}: has no task")
    return rows


def _of_verifiers(file: Path, rows: Sequence[Object], summary: Object) -> PlaysVerdict:
    verdict = PlaysVerdict()
    problems: dict[str, list[str]] = {}
    unchecked: list[str] = []
    for row in rows:
        place = f"task {row.get('name') or row.get('index')}"
        for name, part in _parts(file, row):
            reason = part.get("reason")
            played, invalid = CHECKS[name]
            if reason not in REASONS:
                raise _unknown(file)
            if reason == "invalid":
                problems.setdefault(f"{invalid} (vf-validate)", []).append(place)
            elif reason in ("error", "timeout"):
                error_text = f"{part.get('error_type') or reason}: {part.get('error') or ''}".strip(": ")[:MOST_TEXT]
                problems.setdefault(f"{played} failed (vf-validate): {error_text}", []).append(place)
            elif reason == "unchecked":
                unchecked.append(place)
    verdict.problems += named(problems)
    if unchecked:
        verdict.warnings += named({"vf-validate had nothing to check": unchecked})
    outcomes: object = summary.get("outcomes")
    if is_mapping(outcomes) and outcomes.get("missing"):
        missing_count = f"{outcomes['missing']} of {summary.get('total')}"
        verdict.warnings.append(f"the report of vf-validate is missing {missing_count} tasks; go on with --resume")
    return verdict


def _parts(file: Path, row: Object) -> Iterator[tuple[str, Object]]:
    """The checks of a task by their name."""
    mode = row.get("mode")
    if mode == "all":
        for name in ("gold", "noop"):
            if not is_mapping(part := row.get(name)):
                raise _unknown(file)
            yield name, cast("Object", part)
    elif mode in CHECKS:
        yield str(mode), row
    else:
        raise _unknown(file)


def _of_openenv(file: Path, report: Object) -> PlaysVerdict:
    """Findings by checks. How severe each is stands in no report, only whether all together fail."""
    verdict = PlaysVerdict()
    findings = verdict.problems if report["verdict"] == "fail" else verdict.warnings
    skipped: list[str] = []
    for check in report["results"]:
        if not is_mapping(check) or check.get("status") not in STATUSES or report["verdict"] not in VERDICTS:
            raise _unknown(file)
        name = str(check.get("check_id"))
        if check["status"] in ("fail", "error"):
            evidence: object = check.get("evidence")
            lines = [str(line) for line in evidence] if is_list(evidence) else []
            fix = [f"fix: {check['remediation']}"] if check.get("remediation") else []
            findings.append(f"openenv validate, {name}: {'; '.join((*lines, *fix))[:MOST_TEXT]}")
        elif check["status"] == "skip":
            skipped.append(name)
    if skipped:
        verdict.warnings.append(f"openenv validate has skipped {', '.join(skipped)}")
    return verdict


def _of_server(file: Path, report: Object) -> PlaysVerdict:
    """Findings of `openenv validate --url`."""
    verdict = PlaysVerdict()
    for criterion in report["criteria"]:
        if not is_mapping(criterion) or not isinstance(criterion.get("passed"), bool):
            raise _unknown(file)
        if not criterion["passed"]:
            findings = verdict.problems if criterion.get("required", True) else verdict.warnings
            details = (
                str(criterion.get("details") or "")
                or f"{criterion.get('actual')}, expected {criterion.get('expected')}"
            )
            findings.append(f"openenv validate, {criterion.get('id')}: {details[:MOST_TEXT]}")
    return verdict
