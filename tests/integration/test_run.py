"""The whole loop on real parts: `kestrl run` with real engines, real tools, real gradients; killed, interrupted, resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kestrl.local.rundir import RunDir
from kestrl.testing.collector import Collector, collecting
from kestrl.testing.s3 import serving_s3
from kestrl_email.model_path import tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "email-search" / "quickstart.yaml"
SMALL = [
    *("--set", "data.validation.size=12", "--set", "algorithm.groupsPerStep=2"),
    *("--set", "algorithm.groupSize=4", "--set", "schedule.checkpointEvery=1"),
]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "kestrl.cli.main", *map(str, arguments)]


def kestrl(
    *arguments: str | Path, code: int = 0, timeout: float = 300, prefix: Sequence[str] = (), **environment: str
) -> str:
    done = subprocess.run(
        [*prefix, *command(*arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=ROOT,
        env=os.environ | environment,
    )
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed, printed
    assert done.returncode == code, printed
    return printed


def belonging_to(folder: Path) -> list[str]:
    """Command lines of live processes that were started for runs in a folder: they all have it in their environment or arguments."""
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            line = (process / "cmdline").read_bytes()
            place = str((process / "cwd").readlink())
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ProcessLookupError):
            continue
        if state != "Z" and (str(folder).encode() in line or place.startswith(str(folder))):
            found.append(line.replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    """Waits for what another process does; there is no event to await across processes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


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
    printed = kestrl(*arguments, "--set", f"telemetry.otlp={collector.endpoint}")
    yield RunDir(runs / "email-search-1"), printed
    assert belonging_to(runs) == []


def summary_of(run: RunDir) -> dict[str, Any]:
    summary = run.read_json("summary.json")
    assert summary is not None
    return summary


def test_the_run_succeeds_and_says_so(finished: tuple[RunDir, str]) -> None:
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
    assert "kestrl eval email-search-1" in printed


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
    listed = kestrl("episodes", "list", run.id, "--runs", run.path.parent, "--step", "1").splitlines()
    assert len(listed) == 8
    shown = [
        kestrl("episodes", "show", line.split()[0], "--run", run.id, "--runs", run.path.parent, "--tokens")
        for line in listed
    ]
    assert {line.rpartition(" ")[2] for text in shown for line in text.splitlines() if ", engine " in line} == {
        "engine-0",
        "engine-1",
    }
    policies = {line.split()[-1] for text in shown for line in text.splitlines() if "mask 1" in line}
    assert len(policies) == 1
    assert policies.pop().startswith("email-search.1.")


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


def test_the_printed_commands_serve_the_adapter(finished: tuple[RunDir, str], tmp_path: Path) -> None:
    run, printed = finished
    line = next(line for line in printed.splitlines() if "kestrl export email-search-1" in line)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    name = summary_of(run)["policy"]["version"]
    shell = f"{line} --port {port}"
    with subprocess.Popen(shell, shell=True, cwd=tmp_path, start_new_session=True) as server:
        try:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            message = {"role": "user", "content": "On which day is the meeting?"}
            body = json.dumps({"model": name, "messages": [message], "max_tokens": 8}).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            eventually(lambda: answers(f"http://127.0.0.1:{port}/health") or server.poll() is not None, 120)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["model"] == name
        finally:
            os.killpg(server.pid, signal.SIGTERM)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_one_trace_goes_through_every_hop(finished: tuple[RunDir, str], collector: Collector) -> None:
    run, _ = finished
    paths = collector.paths()
    episode = "job > group > group > episode"
    expected = {
        "job": "kestrl-learner",
        "job > publish > load > prove": "kestrl-inference",
        "job > evaluate > group > group > episode > turn > model_call": "kestrl-rollout",
        f"{episode} > turn > model_call": "kestrl-rollout",
        f"{episode} > turn > model_call > llm_request": "kestrl-engine",
        f"{episode} > turn > tool_call > tool_execute": "kestrl-tools",
        "job > group > group > score > score": "kestrl-judge",
        "job > step > update": "kestrl-learner",
        "job > step > publish > load > prove": "kestrl-inference",
        "job > checkpoint": "kestrl-learner",
    }
    assert {path: services for path, services in paths.items() if path in expected} == {
        path: {service} for path, service in expected.items()
    }
    # Beside these there are vLLM's own start and the evaluation that another test asked for, in traces of their own.
    assert len({span.trace_id for span in collector.spans.values() if span.run == run.id}) == 1
    assert not any(span.failed for span in collector.spans.values())
    stored = kestrl("episodes", "list", run.id, "--runs", run.path.parent, "--step", "1").splitlines()
    named = {span.attributes.get("kestrl.episode.id") for span in collector.spans.values()}
    assert {line.split()[0] for line in stored} <= named


def test_with_staleness_rollouts_overlap_training(tmp_path: Path) -> None:
    stale = ("--set", "algorithm.maxStaleness=1", "--set", "schedule.maxSteps=5", "--set", "inference.replicas=1")
    kestrl("run", QUICKSTART, "--runs", tmp_path, *SMALL, *stale)
    run = RunDir(tmp_path / "email-search-1")
    assert summary_of(run)["status"] == "succeeded"
    metrics = [json.loads(path.read_text()) for path in sorted((run.path / "metrics").glob("*.json"))]
    assert [step["staleness"] for step in metrics] == [0, 1, 1, 1, 1]
    # Against the version that sampled it a token of an older version differs; tokens of the newest do not.
    assert all(step["gap"]["fresh_mean"] <= 1e-5 for step in metrics)
    with closing(sqlite3.connect(run.path / "ledger.db")) as connection:
        trained = connection.execute("SELECT step, count(*) FROM work WHERE state = 'trained' GROUP BY step").fetchall()
    assert trained == [(step, 2) for step in range(1, 6)]


@pytest.mark.servers
def test_a_run_lives_in_s3_and_resumes_from_there(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = RunDir(runs / "email-search-1")
    arguments = (
        "run",
        QUICKSTART,
        "--runs",
        runs,
        *SMALL,
        "--set",
        "inference.replicas=1",
        "--set",
        "schedule.maxSteps=3",
    )
    arguments = (*arguments, "--set", "storage.uri=s3://kestrl/demo")
    with serving_s3(tmp_path / "server") as server:
        environment = server.environment()
        printed = kestrl(*arguments, code=2, **server.environment(secret="wrong"))
        assert printed.count("error: ") == 1
        assert "access is denied; check the credentials" in printed

        bucket = server.create_bucket("kestrl")
        with subprocess.Popen(command(*arguments), cwd=ROOT, env=os.environ | environment) as process:
            wait_for_step(run, process, 1)
            process.send_signal(signal.SIGINT)
        assert process.returncode == 130
        assert "resuming run email-search-1" in kestrl(*arguments, **environment)
        assert summary_of(run)["policy"]["uri"].startswith("s3://kestrl/demo/email-search-1/adapters/000003-")
        stored = {str(item["path"]) for batch in bucket.list("demo") for item in batch}
        assert {f"demo/email-search-1/episodes/train/{step:06d}.pb" for step in range(3)} <= stored
        listed = kestrl("episodes", "list", run.id, "--runs", runs, "--step", "1", **environment)
        assert len(listed.splitlines()) == 8
        kestrl("export", run.id, "--runs", runs, "--out", tmp_path / "out", **environment)
        assert (tmp_path / "out" / "adapter_model.safetensors").is_file()

        shutil.rmtree(runs)
        assert "its ledger is not here" in kestrl(*arguments, code=2, **environment)
    assert belonging_to(tmp_path) == []


def test_a_disk_that_fills_up_ends_the_run_with_one_message(tmp_path: Path) -> None:
    """On a file system of its own that has room for the data, the start and some steps."""
    inside = ["unshare", "-Urm", "sh", "-c", f'mount -t tmpfs -o size=16m none {tmp_path} && exec "$@"', "sh"]
    arguments = ("run", QUICKSTART, "--runs", tmp_path / "runs", *SMALL, "--set", "inference.replicas=1")
    printed = kestrl(*arguments, prefix=inside, code=2)
    assert printed.count("error: ") == 1
    assert "no space is left; free some, or name another place" in printed
    assert str(tmp_path / "runs" / "email-search-1") in printed
    assert belonging_to(tmp_path) == []


def wait_for_step(run: RunDir, process: subprocess.Popen[str], step: int) -> None:
    def reached() -> bool:
        assert process.poll() is None, "it ended too early"
        record = run.read_json("run.json") or {}
        return int(record.get("progress", {}).get("step", 0)) >= step

    eventually(reached, 240)


def test_killed_without_a_word_nothing_is_left_and_the_same_command_resumes(tmp_path: Path) -> None:
    arguments = [
        "run",
        QUICKSTART,
        "--runs",
        tmp_path,
        *SMALL,
        "--set",
        "schedule.maxSteps=4",
        "--set",
        "inference.replicas=1",
    ]
    run = RunDir(tmp_path / "email-search-1")
    with subprocess.Popen(command(*arguments), cwd=ROOT, text=True, stdout=subprocess.DEVNULL) as process:
        wait_for_step(run, process, 1)
        assert any("kestrl_inference.vllm_cpu" in line for line in belonging_to(tmp_path))
        process.kill()
    eventually(lambda: belonging_to(tmp_path) == [], 15)
    assert "email-search-1 dead" in kestrl("status", "--runs", tmp_path)
    with subprocess.Popen(command(*arguments), cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        wait_for_step(run, process, 2)
        assert "has stopped; run the same command again to resume" in kestrl("stop", run.id, "--runs", tmp_path)
        printed = process.communicate(timeout=120)[0]
    assert process.returncode == 130
    assert "resuming run email-search-1" in printed
    assert "run the same command again to resume email-search-1" in printed
    assert belonging_to(tmp_path) == []
    assert summary_of(run)["status"] == "suspended"
    assert "resuming run email-search-1" in kestrl(*arguments)
    summary = summary_of(run)
    assert (summary["status"], summary["steps"]) == ("succeeded", 4)
    with closing(sqlite3.connect(run.path / "ledger.db")) as connection:
        trained = connection.execute(
            "SELECT position, step FROM work WHERE state = 'trained' ORDER BY position"
        ).fetchall()
    assert trained == [(position, position // 2 + 1) for position in range(8)]


def test_a_users_own_tool_and_reward(tmp_path: Path) -> None:
    printed = kestrl("run", ROOT / "examples" / "bring-your-own" / "job.yaml", "--runs", tmp_path)
    assert summary_of(RunDir(tmp_path / "bring-your-own-1"))["status"] == "succeeded"
    assert "2 steps in" in printed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tools=[{name: t, use: 'nowhere:Tool'}]", "cannot import 'nowhere'"),
        ("rewards=[{rule: 'nowhere:reward'}]", "cannot import 'nowhere'"),
        ("agent.loop=nowhere:Loop", "cannot import 'nowhere'"),
    ],
)
def test_what_cannot_be_imported_ends_the_run_with_one_message(tmp_path: Path, override: str, message: str) -> None:
    printed = kestrl("run", QUICKSTART, "--runs", tmp_path, "--set", override, code=2)
    assert printed.count("error: ") == 1
    assert message in printed
    assert belonging_to(tmp_path) == []


def test_a_tool_that_raises_is_typed_counted_and_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "def search_emails(keywords: list[str]) -> str:\n"
        "    '''Search.\n\n    Args:\n        keywords: Words.\n    '''\n"
        "    raise RuntimeError('the index is gone')\n"
    )
    (tmp_path / "job.yaml").write_text(QUICKSTART.read_text())
    tools = "tools=[{name: search_emails, use: 'broken:search_emails'}]"
    rewards = "rewards=[{rule: format}]"
    row = {
        "id": "1",
        "prompt": [
            {"role": "system", "content": "Find the answer in the mailbox."},
            {"role": "user", "content": "When does Bo meet about tea?"},
        ],
    }
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({**row, "id": str(number)}) for number in range(8)))
    data = "data={train: {uri: train.jsonl}}"
    overrides = [flag for item in (tools, rewards, data, "inference.replicas=1") for flag in ("--set", item)]
    printed = kestrl("run", tmp_path / "job.yaml", "--runs", tmp_path / "runs", *SMALL, *overrides, code=1)
    assert "the index is gone" in printed
    status = kestrl("status", "--runs", tmp_path / "runs")
    assert "failures tool/tool_raised" in status
    assert "too_many_failures" in status
