"""`kestrl judge check` and `kestrl rejudge` against a scripted judge: what they print, and their exit codes."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes.judge_model import Asked, Said, ScriptedJudge, decided, graded
from tests.fakes.ports import free_port
from tests.program import run_program
from tests.unit.judge.rulers import episode, group, honest

from kestrl._app.local.rundir import open_run
from kestrl._shared.spec import parse_job
from kestrl.episode import Purpose
from kestrl.errors import Boundary, Failure
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeBatch, GroupOutcome, ObjectEpisodeStore, StoredGroup


def fair(asked: Asked) -> Said:
    return graded(asked, honest, explanation="by the <b>book</b>\x1b[31m")


async def kestrl(*arguments: str | Path, code: int = 0, **environment: str) -> str:
    """Runs the program as a person would; returns what it printed."""
    ended = await asyncio.to_thread(run_program, *arguments, env={**os.environ, "COLUMNS": "200", **environment})
    printed = ended.stdout + ended.stderr
    assert "Traceback" not in printed, printed
    assert ended.returncode == code, printed
    return printed


def manifest(folder: Path, *rewards: dict[str, Any]) -> Path:
    document = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "job"},
        "spec": {"model": {"base": "m"}, "data": {"train": {"uri": "train.jsonl"}}, "rewards": [*rewards]},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


async def test_judge_check_asks_the_judge_of_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "keys.env").write_text("OPENAI_API_KEY=sk-of-the-manifest\n")
    async with ScriptedJudge(fair) as server:
        ruler = {"baseUrl": server.url, "model": "m", "secretRef": {"name": "keys"}}
        path = manifest(tmp_path, {"ruler": ruler})
        printed = await kestrl("judge", "check", path, "--set", "rewards[0].ruler.concurrency=16", code=1)
    assert {asked.headers["Authorization"] for asked in server.asked} == {"Bearer sk-of-the-manifest"}
    assert "sk-of-the-manifest" not in printed
    for line in (
        "ruler judge m",
        "permutation",
        "injections",
        "agreement with the known answers: accuracy",
        "not passed",
    ):
        assert line in printed
    assert "monotonicity: right above wrong: 13: wrong (0.2) is not below right (0.2)" in printed


async def test_judge_check_asks_an_endpoint(tmp_path: Path) -> None:
    async with ScriptedJudge(lambda _: Said(content="no")) as server:
        arguments = ("judge", "check", "--base-url", server.url, "--model", "m", "--json")
        report = json.loads(await kestrl(*arguments, code=1, OPENAI_API_KEY="sk-of-the-environment"))
    assert server.asked[0].headers["Authorization"] == "Bearer sk-of-the-environment"
    assert report["passed"] is False
    assert list(report["judges"]) == ["ruler"]
    assert "not scored (malformed)" in report["judges"]["ruler"]["checks"][0]["failures"][0]


async def test_judge_check_asks_an_endpoint_as_a_judge_of_correctness() -> None:
    async with ScriptedJudge(lambda asked: decided(asked, lambda _: True)) as server:
        arguments = ("judge", "check", "--base-url", server.url, "--model", "m", "--correctness")
        printed = await kestrl(*arguments, code=1, OPENAI_API_KEY="sk-of-the-environment")
    assert {asked.headers["Authorization"] for asked in server.asked} == {"Bearer sk-of-the-environment"}
    for line in ("correctness judge m", "wrong answers", "master keys: 'Solution': is taken for correct", "not passed"):
        assert line in printed


async def test_judge_check_asks_every_judge_of_a_manifest_that_it_can(tmp_path: Path) -> None:
    (tmp_path / "keys.env").write_text("OPENAI_API_KEY=sk-of-the-manifest\n")
    async with ScriptedJudge(lambda asked: decided(asked, lambda _: False)) as server:
        remote = {"baseUrl": server.url, "model": "m", "secretRef": {"name": "keys"}, "concurrency": 16}
        path = manifest(tmp_path, {"rule": "a:b", "correctness": remote}, {"ruler": {"self": True}})
        printed = await kestrl("judge", "check", path, code=1)
        report = json.loads(await kestrl("judge", "check", path, "--json", code=1))
    assert {asked.headers["Authorization"] for asked in server.asked} == {"Bearer sk-of-the-manifest"}
    assert "right answers: '13': is taken for wrong" in printed
    assert "ruler: not checked: spec.rewards[1].ruler.self: its engines run with the job only" in printed
    assert list(report["judges"]) == ["correctness"]
    assert list(report["not_checked"]) == ["ruler"]
    assert report["judges"]["correctness"]["agreement"]["false_negatives"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a manifest with a judge, or --base-url and --model"),
        (["job.yaml", "--correctness"], "--correctness: is for --base-url"),
        (["--base-url", "http://x/v1"], "--model: is missing"),
        (["--base-url", "ftp://x", "--model", "m"], "--base-url.baseUrl: String should match"),
    ],
)
async def test_judge_check_refuses_what_it_cannot_ask(arguments: list[str], message: str) -> None:
    assert message in await kestrl("judge", "check", *arguments, code=2)


async def test_judge_check_reports_an_endpoint_that_is_not_there() -> None:
    printed = await kestrl("judge", "check", "--base-url", f"http://127.0.0.1:{free_port()}/v1", "--model", "m", code=2)
    assert "the judge gave no reply to the first case: not scored (unavailable)" in printed


async def test_judge_check_needs_a_ruler_that_runs_outside_the_job(tmp_path: Path) -> None:
    assert "spec.rewards: has neither a ruler nor a correctness judge" in await kestrl(
        "judge", "check", manifest(tmp_path, {"rule": "format"}), code=2
    )
    own = manifest(tmp_path, {"ruler": {"self": True}})
    assert "spec.rewards[0].ruler.self: its engines run with the job only" in await kestrl(
        "judge", "check", own, code=2
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one stored step, scored by a rule and a ruler; one group was not scored."""
    rewards = [
        {"rule": "exact_answer"},
        {"weight": 0.5, "ruler": {"baseUrl": "http://127.0.0.1:1/v1", "model": "old"}},
    ]
    job = parse_job(yaml.safe_load(manifest(tmp_path, *rewards).read_text()))
    folder, _ = open_run(tmp_path / "runs", job, new=True)
    from kestrl._app.local.rundir import make_folders

    make_folders(folder, job, tmp_path)
    unscored = Failure(boundary=Boundary.JUDGE, code="unscored", message="ruler: not scored (timeout)")
    scored = [
        replace(episode(0, "4"), reward=1.0, rewards={"exact_answer": 1.0, "ruler": 0.0}),
        replace(episode(1, "So 4"), reward=0.5, rewards={"exact_answer": 0.0, "ruler": 1.0}),
        replace(episode(2, "5"), reward=0.45, rewards={"exact_answer": 0.0, "ruler": 0.9}),
    ]
    masked = [
        replace(episode(index, text), id=f"h/{index}", failure=unscored, rewards={"exact_answer": 0.0})
        for index, text in enumerate(("3", "4!"))
    ]
    groups = [group(*scored), replace(group(*masked), id="h")]
    outcomes = (GroupOutcome.TRAINED, GroupOutcome.MASKED, GroupOutcome.RETRIED)
    again = replace(groups[0], id="not scored again")
    stored = [
        StoredGroup(group=each, outcome=outcome) for each, outcome in zip([*groups, again], outcomes, strict=True)
    ]
    batch = EpisodeBatch(purpose=Purpose.TRAIN, step=1, stored=stored)
    ObjectEpisodeStore(open_store(str(folder.path))).append(batch)
    return tmp_path / "runs"


async def test_rejudge_shows_the_differences(run: Path, tmp_path: Path) -> None:
    async with ScriptedJudge(fair) as server:
        (tmp_path / "keys.env").write_text("TOKEN=sk-rejudge\n")
        ruler = {"baseUrl": server.url, "model": "new", "secretRef": {"name": "keys"}, "secretKey": "TOKEN"}
        (tmp_path / "ruler.yaml").write_text(yaml.safe_dump(ruler))
        arguments = ("rejudge", "--runs", run, "--step", "1", "--ruler", tmp_path / "ruler.yaml")
        printed = await kestrl(*arguments)
        facts = json.loads(await kestrl(*arguments, "--json"))
    assert server.asked[0].headers["Authorization"] == "Bearer sk-rejudge"
    lines = [line for line in printed.splitlines() if "g/" in line or "h/" in line]
    assert [[part.strip() for part in line.split("│")[1:6]] for line in lines] == [
        ["g/0", "0.000", "1.000", "1.000", "1.500"],
        ["g/1", "1.000", "1.000", "0.500", "0.500"],
        ["g/2", "0.900", "0.200", "0.450", "0.100"],
        ["h/0", "-", "0.200", "-", "0.100"],
        ["h/1", "-", "0.200", "-", "0.100"],
    ]
    assert "0 of 3 pairs of episodes changed their order by reward" in printed
    assert "\x1b" not in printed
    assert facts["groups"][0]["episodes"][2]["details"]["judges"] == ["new"]


async def test_an_episode_is_shown_with_what_its_judge_was_sent(run: Path) -> None:
    calls = [
        {
            "model": "m", "seed": 7, "ids": ["t-1", "t-2"], "order": [["g/1"], ["g/0", "g/2"]],
            "content": '{"scores": []}',
            "messages": [{"role": "system", "content": "Score."}, {"role": "user", "content": "data\x1b[31m"}],
        },
        {"model": "n", "seed": 8, "ids": [], "order": [], "messages": [], "error": "refused: status 401"},
    ]  # fmt: skip
    shown = replace(
        group(replace(episode(0, "4"), scoring={"ruler": {"explanation": "right"}})),
        scoring={"ruler": {"calls": calls}},
    )
    stored = [StoredGroup(group=shown, outcome=GroupOutcome.TRAINED)]
    episodes = ObjectEpisodeStore(open_store(str(run / "job-1")))
    episodes.append(EpisodeBatch(purpose=Purpose.TRAIN, step=1, stored=stored))
    printed = await kestrl("episodes", "show", "g/0", "--judge", "--runs", run)
    assert '  ruler: {"explanation": "right"}' in printed
    assert "ruler: m, order by seed 7: t-1 is g/1, t-2 is g/0/g/2" in printed
    assert "system: Score." in printed
    assert 'reply: {"scores": []}' in printed
    assert "no scores: refused: status 401" in printed
    assert "\x1b" not in printed
    assert "order by seed" not in await kestrl("episodes", "show", "g/0", "--runs", run)


async def test_rejudge_reports_what_is_wrong(run: Path) -> None:
    printed = await kestrl("rejudge", "--runs", run, "--step", "7", code=2)
    assert "--step: run job-1 has no stored episodes of step 7" in printed
    printed = await kestrl("rejudge", "--runs", run, "--ruler", "{model: m}", code=2)
    assert "--ruler.baseUrl: is missing" in printed
    printed = await kestrl("rejudge", "--runs", run, "--ruler", "{baseurl: 'http://x'}", code=2)
    assert "--ruler.baseurl: unknown field; did you mean baseUrl?" in printed
    printed = await kestrl("rejudge", "--runs", run, "--ruler", "{self: true}", code=2)
    assert "its engines run with the job only" in printed
    assert "give --ruler '{baseUrl: ..., model: ...}'" in " ".join(printed.split())
