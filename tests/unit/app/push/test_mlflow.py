"""`kestrl push --to mlflow` with a real server, in an environment of its own, read back by its API."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path

import pytest
from tests.fakes.stored_runs import BEGIN, make_group, make_run, store_step, store_summary
from tests.unit.app.push.mlflow_api import Server
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.local.rundir import RunDir
from kestrl._app.push.beside import MLflowFollower
from kestrl._app.push.mlflow.server import serving_mlflow
from kestrl._app.push.mlflow.spans import trace_id
from kestrl._shared.plan.settings.tracking import TrackingSettings
from kestrl._shared.spec.job import MLflowTracking
from kestrl.runstate.states import RunPhase

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_mlflow(f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db") as uri:
        yield Server(uri)


def push(run: Path, server: Server, experiment: str, *arguments: str) -> str:
    target = ["--to", "mlflow", "--uri", server.uri, "--experiment", experiment]
    result = CliRunner().invoke(app, ["push", run.name, "--runs", str(run.parent), *target, *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_run_and_its_episodes_are_in_mlflow(run: Path, server: Server) -> None:
    assert push(run, server, "shelves") == "sent 6 episodes in 9 parts\n"
    (known,) = server.runs("shelves")
    assert known["info"]["status"] == "FINISHED"
    tags = {tag["key"]: tag["value"] for tag in known["data"]["tags"]}
    assert (tags["kestrl.run"], tags["kestrl.storage"], tags["kestrl.result"]) == ("job-1", run.as_uri(), "succeeded")
    params = {param["key"]: param["value"] for param in known["data"]["params"]}
    assert (params["model.base"], params["algorithm.groupSize"]) == ("demo://tiny", "2")
    metrics = {metric["key"]: metric["value"] for metric in known["data"]["metrics"]}
    assert metrics["after/reward"] == metrics["eval/reward"] == 0.5
    assert metrics["before/reward"] == 0.125
    assert metrics["gap/mean"] == 2e-6
    assert "gap/p99" not in metrics, "NaN is no number"
    identity = known["info"]["run_id"]
    history = server.get("2.0/mlflow/metrics/get-history", run_id=identity, metric_key="reward")["metrics"]
    assert [(each["step"], each["value"]) for each in history] == [(1, 0.25), (2, 0.5)]

    traces = server.traces("shelves")
    assert sorted(traces) == ["eval-0/0", "eval-2/0", "g1/0", "g1/1", "g2/0", "g2/1"]
    assert sorted(server.traces("shelves", f"attributes.run_id = '{identity}'")) == sorted(traces), "linked to the run"
    assert sorted(server.traces("shelves", "tags.`kestrl.failure.boundary` = 'tool'")) == ["g1/1", "g2/1"]
    assert sorted(server.traces("shelves", "status = 'ERROR'")) == ["g1/1", "g2/1"]
    trace = traces["g1/0"]
    assert trace["trace_id"] == f"tr-{trace_id(identity, 'g1/0')}"
    assert (trace["execution_duration"], trace["state"]) == ("4s", "OK")
    assert json.loads(trace["trace_metadata"]["mlflow.trace.tokenUsage"])["output_tokens"] == 3


def test_a_trace_has_turns_calls_tokens_and_the_reward(run: Path, server: Server) -> None:
    push(run, server, "one trace")
    traces = server.traces("one trace")
    root, *spans = server.spans(traces["g1/0"])
    assert root["start_time_unix_nano"] == (BEGIN + 10) * 1_000_000_000
    assert root["mlflow.spanInputs"] == {"messages": [{"role": "user", "content": "How many?"}]}
    assert root["mlflow.spanOutputs"]["messages"][1] == {"role": "tool", "content": "no number: \x1b[31m"}
    assert root["kestrl.trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    (row,) = root["kestrl.rows"]
    assert (row["token_ids"], row["response_mask"]) == ([0, 1, 2, 3], [0, 1, 1, 1])
    assert (row["advantages"], row["learner_logprobs"]) == ([0.5] * 3, [-0.75] * 3)
    assert [(span["name"], span["mlflow.spanType"]) for span in spans] == [
        ("turn 0", "CHAT_MODEL"), ("count", "TOOL"), ("turn 1", "CHAT_MODEL"), ("count", "TOOL"),
        ("turn 2", "CHAT_MODEL"), ("score", "EVALUATOR"),
    ]  # fmt: skip
    turn, wrong, _, right, *_, score = spans
    assert wrong["parent_span_id"] == turn["span_id"]
    assert (wrong["mlflow.spanInputs"], wrong["mlflow.spanOutputs"]) == ({"shelf": "two"}, "no number: \x1b[31m")
    assert wrong["status"] == {"code": "STATUS_CODE_ERROR", "message": "schema_violation"}
    assert (right["mlflow.spanInputs"], right["mlflow.spanOutputs"]) == ({"shelf": 2}, "7 boxes")
    assert turn["kestrl.token_ids"] == [1]
    assert score["mlflow.spanOutputs"]["rewards"] == {"exact": 1.0, "short": -0.5}
    assert score["mlflow.spanOutputs"]["weights"] == {"exact": 1.0, "short": 0.5}
    assert score["mlflow.spanInputs"]["ground_truth"] == "7"
    failed, *_ = server.spans(traces["g1/1"])
    assert failed["status"]["message"] == "[tool/tool_raised] the shelf is locked"


def test_sending_everything_again_changes_nothing(run: Path, server: Server, cursors: Path) -> None:
    push(run, server, "twice")
    traces, (known,) = server.traces("twice"), server.runs("twice")
    spans = {name: server.spans(trace) for name, trace in traces.items()}
    for path in cursors.glob("*.json"):
        path.unlink()
    assert push(run, server, "twice") == "sent 6 episodes in 9 parts\n"
    assert server.traces("twice") == traces
    assert {name: server.spans(trace) for name, trace in traces.items()} == spans
    assert server.runs("twice") == [known]
    identity = known["info"]["run_id"]
    history = server.get("2.0/mlflow/metrics/get-history", run_id=identity, metric_key="reward")["metrics"]
    assert len(history) == 2


def test_a_step_that_a_resumed_run_makes_again_replaces_its_traces(run: Path, server: Server) -> None:
    push(run, server, "resumed")
    stored = make_group("g2", begin=BEGIN + 20)
    first, second = stored.group.episodes
    better = changed(stored, group=changed(stored.group, episodes=[changed(first, reward=1.5), second]))
    store_step(run, 2, [better], {"reward": 0.75})
    assert push(run, server, "resumed") == "sent 2 episodes in 2 parts\n"
    traces = server.traces("resumed")
    assert len(traces) == 6
    assert traces["g2/0"]["tags"]["kestrl.reward"] == "1.5"
    assert server.spans(traces["g2/0"])[-1]["mlflow.spanOutputs"]["reward"] == 1.5
    assert len(server.runs("resumed")) == 1


def test_a_push_that_is_killed_is_continued_with_each_trace_once(tmp_path: Path, server: Server, cursors: Path) -> None:
    run, steps = make_run(tmp_path / "runs" / "job-9"), 60
    for step in range(1, steps + 1):
        store_step(run, step, [make_group(f"g{step}")], {"reward": 0.5})
    target = ["--to", "mlflow", "--uri", server.uri, "--experiment", "killed"]
    program = [str(Path(sys.executable).with_name("kestrl")), "push", run.name, "--runs", str(run.parent), *target]
    with subprocess.Popen(program, env=dict(os.environ), stdout=subprocess.PIPE) as process:
        while True:
            assert process.poll() is None, "it was to be killed in the middle"
            try:
                if len(server.traces("killed")) > 4:
                    break
            except AssertionError:
                time.sleep(0.05)  # there is no experiment yet
        process.send_signal(signal.SIGKILL)
    kept = len(server.traces("killed"))
    assert 4 < kept < 2 * steps
    sent = push(run, server, "killed")
    assert sent.startswith("sent ")
    assert len(server.traces("killed")) == 2 * steps
    assert len(server.runs("killed")) == 1
    assert push(run, server, "killed") == "nothing new to send\n"


async def test_a_run_is_sent_while_it_goes_on_and_its_result_when_it_has_ended(tmp_path: Path, server: Server) -> None:
    folder = make_run(tmp_path / "runs" / "job-2")
    (folder / "logs").mkdir()
    store_step(folder, 1, [make_group("g1")], {"reward": 0.25})
    run, reports = RunDir(folder), list[tuple[str, bool]]()
    assert run.lock() is not None
    sent = MLflowFollower(MLflowTracking(uri=server.uri, experiment="beside"), dict, tmp_path)
    following = asyncio.create_task(sent.follow(run, lambda *report: reports.append(report)))
    async with asyncio.timeout(120):
        while "g1/1" not in await asyncio.to_thread(_traces_of, server, "beside"):
            assert not following.done()
            await asyncio.sleep(0.1)  # a server has no event
    assert [known["info"]["status"] for known in server.runs("beside")] == ["RUNNING"]
    following.cancel()
    await asyncio.wait([following])
    store_step(folder, 2, [make_group("g2")], {"reward": 0.5})
    store_summary(folder, RunPhase.SUCCEEDED, steps=2)
    await sent.finish(run, lambda *report: reports.append(report))
    assert [known["info"]["status"] for known in server.runs("beside")] == ["FINISHED"]
    assert sorted(server.traces("beside")) == ["g1/0", "g1/1", "g2/0", "g2/1"]
    assert reports[0] == (f"sends to {server.uri}", False)
    last, problem = reports[-1]  # a part that was interrupted before it was noted is sent again
    assert re.fullmatch(rf"sent [24] episodes in [34] parts: everything is at {re.escape(server.uri)}", last), last
    assert not problem


def test_a_pod_beside_a_run_sends_it_and_at_its_end_the_rest(tmp_path: Path, server: Server) -> None:
    folder = make_run(tmp_path / "runs" / "job-3")
    store_step(folder, 1, [make_group("g1")], {"reward": 0.25})
    ready, path = tmp_path / "ready", tmp_path / "settings.json"
    sent = TrackingSettings(
        job="job", run="job-3", storage=folder.as_uri(), settings={"model": {"base": "demo://tiny"}}, uri=server.uri,
        experiment="pod", sample=1.0, ready_file=str(ready),
    )  # fmt: skip
    path.write_text(sent.model_dump_json())
    program = [sys.executable, "-m", "kestrl._app.push.pod", "--settings", str(path)]
    with subprocess.Popen(program, env=dict(os.environ), stderr=subprocess.PIPE) as process:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)  # a file has no event
        assert sorted(server.traces("pod")) == ["g1/0", "g1/1"]
        (known,) = server.runs("pod")
        assert known["info"]["status"] == "RUNNING"
        assert {"key": "model.base", "value": "demo://tiny"} in known["data"]["params"]
        store_step(folder, 2, [make_group("g2")], {"reward": 0.5})
        store_summary(folder, RunPhase.SUCCEEDED, steps=2)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=120)[1]
    assert (process.returncode, errors) == (0, b"")
    assert [known["info"]["status"] for known in server.runs("pod")] == ["FINISHED"]
    assert sorted(server.traces("pod")) == ["g1/0", "g1/1", "g2/0", "g2/1"]


def _traces_of(server: Server, experiment: str) -> set[str]:
    """The episodes that have arrived; none before there is the experiment."""
    try:
        return set(server.traces(experiment))
    except AssertionError:
        return set()


def test_an_experiment_that_was_deleted_gets_the_run_again(run: Path, server: Server) -> None:
    push(run, server, "made anew")
    (known,) = server.runs("made anew")
    server.post("2.0/mlflow/runs/delete", run_id=known["info"]["run_id"])
    assert push(run, server, "made anew") == "sent 6 episodes in 9 parts\n"
    (again,) = server.runs("made anew")
    assert again["info"]["run_id"] != known["info"]["run_id"]
