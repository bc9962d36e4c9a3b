"""The whole loop on real parts: `kestrl run` with real engines, real tools, real gradients; killed, interrupted,
resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sqlite3
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.collector import Collector, collecting
from tests.fakes.ports import free_port

from kestrl._app.local.rundir import RunDir
from kestrl_demo_models.tiny import tiny

from .runs import QUICKSTART, SMALL, belonging_to, kestrl, summary_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("run"),  # all look at one run
]


def digest_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def base_before() -> dict[str, str]:
    return digest_of(tiny())


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, base_before: dict[str, str], collector: Collector
) -> Iterator[tuple[RunDir, str]]:
    """A run of three steps on two engines, traced."""
    runs = tmp_path_factory.mktemp("runs")
    arguments = ("run", QUICKSTART, "--runs", runs, *SMALL, "--set", "schedule.maxSteps=3")
    printed = kestrl(*arguments, "--set", f"telemetry.otlp={collector.endpoint}", "--set", "telemetry.tracedGroups=1")
    yield RunDir(runs / "email-search-1"), printed
    assert belonging_to(runs) == []


def test_the_run_succeeds_and_reports_it(finished: tuple[RunDir, str]) -> None:
    run, printed = finished
    summary = summary_of(run)
    assert (summary["status"], summary["steps"]) == ("succeeded", 3)
    assert summary["before"]["episodes"] == summary["after"]["episodes"] == 12
    for name in (
        "reward",
        "answer_correct",
        "sources_correct",
        "num_turns",
        "duration",
        "exceptions",
        "sampled_reward",
    ):
        assert name in summary["before"]
        assert name in printed
    assert summary["before"]["exceptions"] == summary["after"]["exceptions"] == 0
    assert "proved 2/2" in printed
    assert command_line(printed, "eval", run.id)


def command_line(printed: str, command: str, *arguments: str) -> str:
    """The printed line with a command of the program, which is quoted where its path has a space."""
    for line in printed.splitlines():
        words = shlex.split(line) if line.startswith("  ") and f" {command} " in line else []
        if words[1:] and Path(words[0]).name == "kestrl" and words[1 : 2 + len(arguments)] == [command, *arguments]:
            return line
    raise AssertionError(f"no line is a command kestrl {command} {shlex.join(arguments)}: {printed}")


def test_learner_and_engines_agree(finished: tuple[RunDir, str]) -> None:
    gap = summary_of(finished[0])["logprob_gap"]
    assert 0 < gap["worst"] <= 1e-4
    assert gap["ess"] > 0.999


def test_the_adapter_is_durable_and_is_what_the_summary_says(finished: tuple[RunDir, str]) -> None:
    run, _ = finished
    policy = summary_of(run)["policy"]
    weights = Path(policy["uri"].removeprefix("file://")) / "adapter_model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == policy["sha256"]
    assert policy["version"].startswith("email-search.3.")


def test_the_ledger_adds_up(finished: tuple[RunDir, str]) -> None:
    run, _ = finished
    with closing(sqlite3.connect(run.path / "ledger.db")) as connection:
        states = dict(connection.execute("SELECT state, count(*) FROM work GROUP BY state"))
        steps = dict(connection.execute("SELECT step, count(*) FROM work WHERE state = 'trained' GROUP BY step"))
    assert states == {"trained": 6, "dropped": 3994}
    assert steps == {1: 2, 2: 2, 3: 2}


def test_the_base_model_is_untouched(finished: tuple[RunDir, str], base_before: dict[str, str]) -> None:
    assert digest_of(tiny()) == base_before


def test_both_engines_sampled_and_every_token_names_its_policy(finished: tuple[RunDir, str]) -> None:
    run, _ = finished
    listed = kestrl("episodes", "list", run.id, "--runs", run.path.parent, "--step", "2").splitlines()
    assert len(listed) == 8
    shown = [
        kestrl("episodes", "show", line.split()[0], "--run", run.id, "--runs", run.path.parent, "--tokens")
        for line in listed
    ]
    assert {line.rpartition(" ")[2] for text in shown for line in text.splitlines() if ", engine " in line} == {
        "engine-0",
        "engine-1",
    }
    sampled = [line for text in shown for line in text.splitlines() if "mask 1" in line]
    policies = {word for line in sampled for word in line.split() if word.startswith("email-search.")}
    assert len(policies) == 1
    assert policies.pop().startswith("email-search.1.")
    assert all(any(policy.startswith("email-search.1.") for policy in line.split()) for line in sampled)


def test_status_and_evaluation_and_export(finished: tuple[RunDir, str], tmp_path: Path) -> None:
    run, _ = finished
    runs = run.path.parent
    assert "email-search-1 succeeded" in kestrl("status", "--runs", runs)
    kestrl("export", run.id, "--runs", runs, "--out", tmp_path / "adapter")
    kestrl("export", run.id, "--runs", runs, "--out", tmp_path / "merged", "--merge")
    assert (tmp_path / "merged" / "model.safetensors").stat().st_size > 1_000_000
    printed = kestrl("eval", run.id, "--runs", runs, "--set", "inference.replicas=1")
    evaluated = json.loads(next((run.path / "evaluations").glob("*/summary.json")).read_text())
    assert evaluated["after"]["reward"] == pytest.approx(summary_of(run)["after"]["reward"], abs=1e-6)
    assert "answer_correct" in printed


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for the engine's sockets."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as folder:
        yield Path(folder)


def test_the_printed_command_serves_the_adapter_to_those_who_have_the_key(
    finished: tuple[RunDir, str], tmp_path: Path, scratch: Path
) -> None:
    run, printed = finished
    line = command_line(printed, "serve", run.id)
    name = summary_of(run)["policy"]["version"]
    port = free_port()
    environment = os.environ | {"KESTRL_SERVE_KEY": "a key of clients", "TMPDIR": str(scratch)}
    with subprocess.Popen(
        f"exec {line} --port {port}", shell=True, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == f"base, {name} at http://127.0.0.1:{port}/v1\n"
            assert "$KESTRL_SERVE_KEY" in server.stdout.readline(), "a key of the user's own is not printed"
            message = {"role": "user", "content": "On which day is the meeting?"}
            body = json.dumps({"model": name, "messages": [message], "max_tokens": 8}).encode()
            assert post(port, "/v1/chat/completions", body, "a key of clients")["model"] == name
            for path, key, status in (("/v1/completions", "", 401), ("/v1/load_lora_adapter", "a key of clients", 403)):
                with pytest.raises(urllib.error.HTTPError) as refusal:
                    post(port, path, body, key)
                assert refusal.value.code == status
                refusal.value.close()
        finally:
            server.terminate()
            server.wait(60)
    assert server.returncode == 0
    assert list(scratch.glob("kestrl-serve-*")) == [], "what was fetched is removed"


def post(port: int, path: str, body: bytes, key: str) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        document: dict[str, Any] = json.load(answer)
        return document


def test_one_trace_goes_through_every_hop(finished: tuple[RunDir, str], collector: Collector) -> None:
    run, _ = finished
    paths = collector.paths()
    episode = "group > group > episode"
    expected = {
        "job": "kestrl-learner",
        "job > publish > load > prove": "kestrl-inference",
        "job > evaluate": "kestrl-learner",
        f"{episode} > model_call": "kestrl-rollout",
        f"{episode} > model_call > llm_request": "kestrl-engine",
        f"{episode} > tool_call > tool_execute": "kestrl-tools",
        "group > group > score > score": "kestrl-judge",
        "group > advantage": "kestrl-learner",
        "job > step > update": "kestrl-learner",
        "job > step > publish > load > prove": "kestrl-inference",
        "job > checkpoint": "kestrl-learner",
    }
    assert {path: services for path, services in paths.items() if path in expected} == {
        path: {service} for path, service in expected.items()
    }
    # Beside these there are vLLM's own start and the evaluation that another test asked for, in traces of their own.
    of_run = [span for span in collector.spans.values() if span.run == run.id]
    groups = {span.attributes["kestrl.group.id"]: span.trace_id for span in of_run if span.name == "kestrl.group"}
    assert len(set(groups.values())) == len(groups), "each group is a trace"
    others = {span.trace_id for span in of_run} - set(groups.values())
    assert len(others) == 1, "and the run is one"
    assert not any(span.failed for span in collector.spans.values())
    stored = kestrl("episodes", "list", run.id, "--runs", run.path.parent, "--step", "1").splitlines()
    named = {span.attributes.get("kestrl.episode.id") for span in collector.spans.values()}
    assert {line.split()[0] for line in stored} <= named
