"""Commands for judge models: the test bank, and scoring a stored step again."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from kestrl._app.cli.options import DEFAULT_RUNS, Overrides, RunId, Runs
from kestrl._app.local.observation import run_store
from kestrl._app.local.rundir import find_run
from kestrl._app.local.secrets import Secrets, variables_set
from kestrl._shared.checking import JudgeCheck, Rejudge, ask
from kestrl._shared.conventions import EXIT_FAILED
from kestrl._shared.plan.judges import (
    CORRECTNESS_KEY_VARIABLES,
    KEY_VARIABLES,
    correctness_entry,
    judges_of,
    reward_entries,
    ruler_entry,
    ruler_of,
)
from kestrl._shared.plan.settings.judge import JudgeEntry, RulerEntry
from kestrl._shared.safe_yaml import read as read_yaml
from kestrl._shared.spec import AgentRLJob, ProblemsError, parse_job, read_job
from kestrl.api.common.v1 import common_pb2 as pb
from kestrl.episode import Purpose
from kestrl.episode.codec import group_to_proto
from kestrl.errors import SeveralProblems, StorageError, UserInputError
from kestrl.storage.episodes import SCORED_OUTCOMES, ObjectEpisodeStore
from kestrl.terminal import safe, safe_line

console = Console()
SECONDS = 3600.0
"""Time limit of a whole check; each group has its own."""
SHOWN_FAILURES = 5
judges = typer.Typer(no_args_is_help=True, help="Check judge models.")

BaseUrl = Annotated[
    str | None, typer.Option("--base-url", help="Base URL of an OpenAI-compatible server, in place of a manifest.")
]
ModelName = Annotated[str | None, typer.Option("--model", help="Judge model on that server.")]
KeyFrom = Annotated[
    str, typer.Option("--key-from", help="Environment variable with the API key for --base-url, if it is set.")
]


@judges.command("check")
def check(
    manifest: Annotated[
        Path | None, typer.Argument(help="A manifest with a ruler or a correctness judge.", show_default=False)
    ] = None,
    base_url: BaseUrl = None,
    model: ModelName = None,
    key_from: KeyFrom = "OPENAI_API_KEY",
    correctness: Annotated[
        bool, typer.Option("--correctness", help="With --base-url: check it as a correctness judge, not as a ruler.")
    ] = False,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Ask judge models the test bank: orders, duplicates, attacks, empty answers. Exit code 1 if a check fails."""
    if (manifest is None) == (base_url is None):
        raise UserInputError("give either a manifest with a judge, or --base-url and --model")
    if manifest is not None:
        if correctness:
            raise UserInputError("--correctness: is for --base-url; a manifest's judges are all checked")
        job = read_job(manifest, overrides or [])
        settings, skipped = _remote_judges(job)
        keys = Secrets(job, manifest.parent).judge()
    else:
        settings, skipped = _endpoint_check(base_url, model, key_from, correctness=correctness), {}
        keys = {name: os.environ.get(key_from, "") for name in (KEY_VARIABLES[0], CORRECTNESS_KEY_VARIABLES[0])}
    reports = _ask("kestrl_judge.bank", settings, keys)
    passed = all(report["passed"] for report in reports.values())
    if as_json:
        typer.echo(json.dumps({"passed": passed, "judges": reports, "not_checked": skipped}, indent=2))
    else:
        for kind, report in reports.items():
            _print_report(kind, report)
        for kind, reason in skipped.items():
            console.print(f"{kind}: not checked: {reason}", markup=False, soft_wrap=True)
        console.print("passed" if passed else "not passed")
    if not passed:
        raise typer.Exit(EXIT_FAILED)


def _remote_judges(job: AgentRLJob) -> tuple[JudgeCheck, dict[str, str]]:
    """The job's judges that do not need its engines, and why the others cannot be checked, by kind.

    Raises:
        UserInputError: There is none that can.
    """
    placed = {judge.field.rpartition(".")[2]: judge for judge in judges_of(job.spec)}
    if not placed:
        raise UserInputError(
            "spec.rewards: has neither a ruler nor a correctness judge; add one, or give --base-url and --model"
        )
    skipped = {kind: _needs_engines(judge.field) for kind, judge in placed.items() if judge.judge.job_model}
    if len(skipped) == len(placed):
        raise SeveralProblems(list(skipped.values()))
    return JudgeCheck(
        ruler=None if "ruler" in skipped else ruler_entry(job.spec, ()),
        correctness=None if "correctness" in skipped else correctness_entry(job.spec, ()),
    ), skipped


def _needs_engines(field: str, instead: str = "--base-url and --model") -> str:
    return f"{field}.self: its engines run with the job only; serve the model with vLLM or SGLang and give {instead}"


def _endpoint_check(base_url: str | None, model: str | None, key_from: str, *, correctness: bool) -> JudgeCheck:
    """A judge with its defaults for an endpoint of the command line."""
    if model is None:
        raise UserInputError("--model: is missing; give the name of the judge model on the server")
    document = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "judge"},
        "spec": {"model": {"base": "none"}, "data": {"train": {"uri": "none"}}},
    }
    ruler = _remote_entry(_job_with({"baseUrl": base_url, "model": model}, document, "--base-url"))
    variable = (CORRECTNESS_KEY_VARIABLES if correctness else KEY_VARIABLES)[0]
    keyed = {"key_variable": variable if os.environ.get(key_from) else None}
    ruler = ruler.model_copy(
        update={"judges": tuple(judge_model.model_copy(update=keyed) for judge_model in ruler.judges)}
    )
    if not correctness:
        return JudgeCheck(ruler=ruler)
    return JudgeCheck(correctness=JudgeEntry(**ruler.model_dump(include=set(JudgeEntry.model_fields))))


def _job_with(ruler: Any, document: dict[str, Any], option: str) -> AgentRLJob:
    """A job whose only ruler is the given one.

    Args:
        ruler: The ruler as in a manifest.
        document: The manifest.
        option: The option that gives the ruler, for messages.

    Raises:
        UserInputError: The ruler is not valid.
    """
    rewards: list[dict[str, Any]] = document["spec"].get("rewards", [])
    weight = next((reward.get("weight", 1.0) for reward in rewards if "ruler" in reward), 1.0)
    rules = [reward for reward in rewards if "ruler" not in reward]
    document["spec"]["rewards"] = [*rules, {"ruler": ruler, "weight": weight}]
    try:
        return parse_job(document)
    except ProblemsError as error:
        raise UserInputError(str(error).replace(f"spec.rewards[{len(rules)}].ruler", option)) from error


def _remote_entry(job: AgentRLJob, instead: str = "--base-url and --model") -> RulerEntry:
    """The job's ruler, which must not need the job's engines."""
    indexed_ruler = ruler_of(job.spec)
    if indexed_ruler is None:
        raise UserInputError(f"spec.rewards: has no ruler; add one, or give {instead}")
    if indexed_ruler[1].job_model:
        raise UserInputError(_needs_engines(f"spec.rewards[{indexed_ruler[0]}].ruler", instead))
    entry = ruler_entry(job.spec, ())
    assert entry is not None
    return entry


def _ask(module: str, settings: JudgeCheck | Rejudge, keys: Mapping[str, str]) -> Mapping[str, Any]:
    with variables_set({name: value for name, value in keys.items() if value}):
        report = ask(module, settings, subject="the judge", seconds=SECONDS)
    if report.missing:
        raise UserInputError(f"this command needs {report.missing}; install it in this environment")
    if report.problems:
        raise SeveralProblems(report.problems)
    return report.facts


def _print_report(kind: str, report: Mapping[str, Any]) -> None:
    table = Table("check", "cases", "failed", "")
    for entry in report["checks"]:
        failures: list[str] = entry["failures"]
        note = f"largest difference between orders {entry['spread']:.2f}" if "spread" in entry else ""
        table.add_row(entry["name"], str(entry["cases"]), str(len(failures)), note)
    console.print(f"{kind} judge {', '.join(report['judges'])}", markup=False)
    console.print(table)
    for entry in report["checks"]:
        for failure in entry["failures"][:SHOWN_FAILURES]:
            console.print(safe_line(f"{entry['name']}: {failure}"), markup=False, soft_wrap=True)
        if len(entry["failures"]) > SHOWN_FAILURES:
            console.print(f"{entry['name']}: and {len(entry['failures']) - SHOWN_FAILURES} more (--json prints all)")
    if report["agreement"]:
        agreement = ", ".join(f"{name} {value:.2f}" for name, value in report["agreement"].items())
        console.print(f"agreement with the known answers: {agreement}")
    usage = report["usage"]
    console.print(
        f"{usage['calls']} requests, {sum(usage['tokens'].values())} tokens, {usage['seconds']:.1f} s of requests, "
        f"{usage['cost']:.4f} USD"
    )


def rejudge(
    run_id: RunId = None,
    step: Annotated[int, typer.Option(min=1, help="The training step to score again.")] = 1,
    ruler: Annotated[
        str | None,
        typer.Option(
            help="The ruler: a YAML file, or YAML such as '{baseUrl: ..., model: ...}'. Default: the job's.",
        ),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print every score and explanation as JSON.")] = False,
) -> None:
    """Score a stored step again with a judge model, without rollouts, and show the differences."""
    run = find_run(runs, run_id)
    job, base = run.job(), run.manifest_dir
    if ruler is not None:
        job, base = _with_ruler(job, ruler, base)
    entry = _remote_entry(job, "--ruler '{baseUrl: ..., model: ...}'")
    try:
        stored = ObjectEpisodeStore(run_store(run)).read(Purpose.TRAIN, step).stored
    except StorageError as error:
        if error.code != "not_found":
            raise
        raise UserInputError(f"--step: run {run.id} has no stored episodes of step {step}") from error
    groups = [
        group_to_proto(stored_group.group)
        for stored_group in stored
        if stored_group.outcome in SCORED_OUTCOMES and stored_group.group.episodes
    ]
    with tempfile.NamedTemporaryFile(prefix="kestrl-rejudge-") as file:
        file.write(pb.GroupBatch(step=step, purpose=Purpose.TRAIN, groups=groups).SerializeToString())
        file.flush()
        settings = Rejudge(
            ruler=entry, rewards=reward_entries(job.spec), max_turns=job.spec.agent.max_turns, batch=file.name
        )
        facts = _ask("kestrl_judge.rejudge", settings, Secrets(job, base).judge())
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print_differences(facts)


def _with_ruler(job: AgentRLJob, ruler: str, base: Path) -> tuple[AgentRLJob, Path]:
    """The job with another ruler, and the folder of its secrets.

    Raises:
        UserInputError: The ruler is not valid.
    """
    file = Path(ruler)
    is_file = not ruler.lstrip().startswith("{") and file.is_file()
    try:
        document: Any = read_yaml(file.read_text(encoding="utf-8") if is_file else ruler)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"--ruler: is neither a YAML file nor YAML: {error}") from error
    manifest = job.model_dump(by_alias=True, exclude_none=True, mode="json")
    return _job_with(document, manifest, "--ruler"), file.parent if is_file else base


def _print_differences(facts: Mapping[str, Any]) -> None:
    table = Table("episode", "ruler before", "ruler now", "reward before", "reward now", "why")
    swapped = pairs = 0
    for group in facts["groups"]:
        for episode in group["episodes"]:
            details: dict[str, Any] = episode["details"] or {}
            reason: str = episode["failure"] or details.get("explanation", "")
            numbers = [_number(episode[name]) for name in ("old", "new", "old_reward", "new_reward")]
            table.add_row(safe_line(episode["id"]), *numbers, safe_line(reason)[:200])
        pair_counts = _swapped(group["episodes"])
        swapped, pairs = swapped + pair_counts[0], pairs + pair_counts[1]
    console.print(table)
    console.print(f"{swapped} of {pairs} pairs of episodes changed their order by reward")
    console.print(safe(f"{facts['calls']} requests, {facts['tokens']} tokens, {facts['cost']:.4f} USD"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _swapped(episodes: list[Mapping[str, Any]]) -> tuple[int, int]:
    """Pairs of a group whose order by reward changed, and all pairs with both rewards."""
    scored_episodes = [
        episode for episode in episodes if episode["old_reward"] is not None and episode["new_reward"] is not None
    ]
    pairs = list(combinations(scored_episodes, 2))
    changed = sum(
        _sign(a["old_reward"] - b["old_reward"]) != _sign(a["new_reward"] - b["new_reward"]) for a, b in pairs
    )
    return changed, len(pairs)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def register(app: typer.Typer) -> None:
    app.command()(rejudge)
    app.add_typer(judges, name="judge")
