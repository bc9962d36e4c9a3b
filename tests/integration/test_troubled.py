"""Whole runs that do not go as planned: stale, interrupted, killed, without room, with a mistake in the manifest or in
a tool."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import statistics
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from math import exp
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file
from tests.fakes.s3 import serving_s3

from kestrl._app.local.rundir import RunDir
from kestrl.episode import Episode, Purpose
from kestrl.storage import open_store
from kestrl.storage.episodes import TRAINED_OUTCOMES, EpisodeFilter, ObjectEpisodeStore, StoredGroup
from kestrl_demo_models.tiny import tiny

from .runs import QUICKSTART, ROOT, SMALL, belonging_to, command, eventually, kestrl, summary_of, wait_for_step

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.share(3)]


def test_with_staleness_rollouts_overlap_training(tmp_path: Path) -> None:
    stale = ("--set", "algorithm.maxStaleness=1", "--set", "schedule.maxSteps=5", "--set", "inference.replicas=1")
    kestrl("run", QUICKSTART, "--runs", tmp_path, *SMALL, *stale)
    run = RunDir(tmp_path / "email-search-1")
    assert summary_of(run)["status"] == "succeeded"
    metrics = [json.loads(path.read_text()) for path in sorted((run.path / "metrics").glob("*.json"))]
    assert [step["staleness"] for step in metrics] == [0, 1, 1, 1, 1]
    # To the newest version an older one's tokens differ by what was learned, to their own they do not.
    assert all(step["gap"]["own"]["tokens"] > 0 and step["gap"]["own"]["max"] <= 1e-4 for step in metrics)
    assert max(step["gap"]["max"] for step in metrics) > 1e-3
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
        "schedule.maxSteps=5",
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
        assert summary_of(run)["policy"]["uri"].startswith("s3://kestrl/demo/email-search-1/adapters/000005-")
        stored = {str(item["path"]) for batch in bucket.list("demo") for item in batch}
        assert {f"demo/email-search-1/episodes/train/step={step:06d}.parquet" for step in range(1, 6)} <= stored
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
    assert "no space left; free some, or use another location" in printed
    assert str(tmp_path / "runs" / "email-search-1") in printed
    assert belonging_to(tmp_path) == []


def test_a_store_that_turns_read_only_ends_the_run_without_damage(tmp_path: Path) -> None:
    """Nothing is open there between two writes, so that the mount can be changed under a run."""
    store, runs = tmp_path / "store", tmp_path / "runs"
    store.mkdir()
    first_step = store / "email-search-1" / "metrics" / "000001.json"
    turns = f"until test -e {first_step}; do sleep 0.05; done; until mount -o remount,bind,ro {store}; do :; done"
    inside = ["unshare", "-Urm", "sh", "-c", f'mount --bind {store} {store} && ({turns}) & exec "$@"', "sh"]
    arguments = ["run", QUICKSTART, "--runs", runs, *SMALL, "--set", "inference.replicas=1"]
    arguments += ["--set", f"storage.uri={store.as_uri()}", "--set", "schedule.maxSteps=4"]
    printed = kestrl(*arguments, prefix=inside, code=2)
    assert printed.count("error: ") == 1
    assert "the file system is read-only; use another location" in printed
    assert belonging_to(tmp_path) == []
    assert "resuming run email-search-1" in kestrl(*arguments)
    run = RunDir(runs / "email-search-1")
    assert (summary_of(run)["status"], summary_of(run)["steps"]) == ("succeeded", 4)
    with closing(sqlite3.connect(run.path / "ledger.db")) as connection:
        trained = connection.execute("SELECT position, step FROM work WHERE state = 'trained' ORDER BY position")
        assert trained.fetchall() == [(position, position // 2 + 1) for position in range(8)]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc makes the library that lets the clock jump")
def test_jumps_of_the_clock_change_nothing(tmp_path: Path) -> None:
    """The clocks of all processes jump hours ahead in one step, and back to yesterday in the next."""
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("clock.c")], check=True)
    offset.write_bytes(struct.pack("q", 0))
    environment = os.environ | {"LD_PRELOAD": str(library), "CLOCK_FILE": str(offset)}
    arguments = ["run", QUICKSTART, "--runs", tmp_path / "runs", *SMALL, "--set", "schedule.maxSteps=4"]
    run = RunDir(tmp_path / "runs" / "email-search-1")
    with subprocess.Popen(command(*arguments, "--set", "inference.replicas=1"), cwd=ROOT, env=environment) as process:
        for step, jump in ((1, 3 * 3600), (2, -24 * 3600)):
            wait_for_step(run, process, step)
            with offset.open("r+b") as file:
                file.write(struct.pack("q", jump))
        assert process.wait(300) == 0
    summary = summary_of(run)
    assert (summary["status"], summary["steps"], summary["failures"]) == ("succeeded", 4, {})
    assert 0 < summary["seconds"] < 600
    assert all(0 <= summary[when]["duration"] < 60 for when in ("before", "after"))


def test_an_engine_that_is_short_of_cache_gets_fewer_episodes(tmp_path: Path) -> None:
    """Room for a dozen sequences, asked for 64: vLLM puts some back for want of cache, and the learner reduces the
    load."""
    arguments = ["run", QUICKSTART, "--runs", tmp_path, "--set", "inference.replicas=1", "--set", "schedule.maxSteps=2"]
    arguments += ["--set", "inference.args.kv-cache-memory-bytes=8388608", "--set", "data.validation.size=4"]
    kestrl(*arguments)
    run = RunDir(tmp_path / "email-search-1")
    assert (summary_of(run)["status"], summary_of(run)["failures"]) == ("succeeded", {})
    limits = re.findall(
        r"the engines' load allows (\d+) concurrent episodes", (run.path / "logs" / "learner-0.log").read_text()
    )
    assert limits
    assert 8 <= min(map(int, limits)) < 64


class Retired(Exception):
    """The engine no longer has the adapter, or has ended."""


def control(run: RunDir, path: str, **body: str) -> None:
    """A request on an engine's control route, with the key that only the engine and its agent have."""
    engine = (run.read_json("run.json") or {})["components"]["engine-0"]
    try:
        variables = Path(f"/proc/{engine['pid']}/environ").read_bytes().split(b"\0")
    except OSError as error:
        raise Retired from error
    key = next(item.partition(b"=")[2] for item in variables if item.startswith(b"KESTRL_ENGINE_CONTROL_KEY="))
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine['ports']['http']}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key.decode()}"},
    )
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 404:
                raise
        raise Retired from error
    except urllib.error.URLError as error:
        raise Retired from error


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_adapter_replaced_in_the_engine_is_caught_within_a_step(staleness: int, tmp_path: Path) -> None:
    """Under the very name that the engine proved a moment ago."""
    runs = tmp_path / "runs"
    run = RunDir(runs / "email-search-1")
    arguments = ["run", QUICKSTART, "--runs", runs, *SMALL, "--set", "inference.replicas=1"]
    arguments += ["--set", "algorithm.groupsPerStep=8", "--set", "schedule.maxSteps=12"]
    arguments += ["--set", f"algorithm.maxStaleness={staleness}"]
    swapped: list[str] = []
    with subprocess.Popen(command(*arguments), cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        wait_for_step(run, process, 1)
        while process.poll() is None:  # a version that is replaced after its last rollout changes nothing
            record = run.record()
            assert record is not None
            assert record.state is not None
            assert record.state.policy.version is not None
            name = record.state.policy.version.name
            if name in swapped:
                time.sleep(0.05)
                continue
            step, digest = name.split(".")[-2:]
            other = tmp_path / name
            shutil.copytree(run.path / "adapters" / f"{int(step):06d}-{digest}", other)
            weights = load_file(other / "adapter_model.safetensors")
            save_file({key: value * 1.5 for key, value in weights.items()}, other / "adapter_model.safetensors")
            swapped.append(name)
            with suppress(Retired):  # while it was copied; the next version is replaced instead
                control(run, "/v1/unload_lora_adapter", lora_name=name)
                control(run, "/v1/load_lora_adapter", lora_name=name, lora_path=str(other))
        printed = process.communicate(timeout=240)[0]
    assert process.returncode == 1, printed
    if "the name is taken by" in printed:  # the agent looked between unloading and loading
        assert "engine/adapter_refused" in printed, printed
    else:
        assert "engine/logprob_gap" in printed, printed
        names = "|".join(map(re.escape, swapped))
        assert re.search(rf"differ, in nats per token: engine-0 on ({names}): mean", printed)
        assert "logprob_gap" in summary_of(run)["reason"]
    assert belonging_to(tmp_path) == []


def assert_prometheus_can_read(run: RunDir) -> None:
    """Reads the metrics of every service of a live run and of its engine."""
    components = (run.read_json("run.json") or {})["components"]
    ports = {
        name.rsplit("-", 1)[0]: seen["ports"].get("metrics", seen["ports"].get("http"))
        for name, seen in components.items()
    }

    def metric(role: str, name: str) -> float:
        """-1 where it is not offered."""
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[role]}/metrics", timeout=60) as answer:
            page = answer.read().decode()
        found = re.search(rf"^{name}(?:{{.*}})? (.*)$", page, re.MULTILINE)
        return float(found[1]) if found else -1.0

    assert metric("learner", "kestrl_learner_step") >= 1
    assert metric("learner", "kestrl_learner_engines") == 1
    # None has, for as long as a version just published is on its way.
    eventually(lambda: metric("learner", "kestrl_learner_engines_proved") == 1, 60)
    assert 0 < metric("learner", "kestrl_learner_logprob_gap") < 1
    # A step is reported before its version is written; one whose groups were each rewarded alike changes nothing.
    eventually(lambda: metric("learner", "kestrl_learner_probe_distance") >= 0, 60)
    assert metric("rollout", "kestrl_rollout_episodes_total") >= 24
    assert metric("rollout", "kestrl_rollout_tokens_total") > 100
    assert metric("tools", "kestrl_tools_sessions") >= 0
    assert metric("judge", "kestrl_rpc_calls_total") >= 1
    assert metric("inference", "kestrl_inference_up") == 1
    assert metric("engine", "vllm:num_requests_running") >= 0


def assert_status_reports_the_run(runs: Path) -> None:
    printed = kestrl("status", "--runs", runs)
    assert "email-search-1 running" in printed
    assert re.search(r"step [1-8]/8 ", printed)
    assert re.search(r"policy email-search\.\S+ proved [01]/1", printed)
    assert "end it: kestrl stop email-search-1" in printed
    for name in ("learner", "rollout-0", "tools", "judge", "inference-0", "engine-0"):
        assert re.search(rf"{name}\b.*\brunning\b", printed), printed


def test_when_killed_nothing_is_left_and_the_same_command_resumes(tmp_path: Path) -> None:
    arguments = [
        "run",
        QUICKSTART,
        "--runs",
        tmp_path,
        *SMALL,
        "--set",
        "schedule.maxSteps=8",
        "--set",
        "inference.replicas=1",
    ]
    run = RunDir(tmp_path / "email-search-1")
    with subprocess.Popen(command(*arguments), cwd=ROOT, text=True, stdout=subprocess.DEVNULL) as process:
        wait_for_step(run, process, 1)
        assert any("kestrl_inference.inside.launcher" in line for line in belonging_to(tmp_path))
        assert_prometheus_can_read(run)
        assert_status_reports_the_run(tmp_path)
        process.kill()
    eventually(lambda: belonging_to(tmp_path) == [], 60)
    assert "email-search-1 dead" in kestrl("status", "--runs", tmp_path)
    with subprocess.Popen(command(*arguments), cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        wait_for_step(run, process, 2)
        assert "has stopped; run the same command again to resume" in kestrl("stop", run.id, "--runs", tmp_path)
        printed = process.communicate(timeout=240)[0]
    assert process.returncode == 130
    assert "resuming run email-search-1" in printed
    assert "run the same command again to resume email-search-1" in printed
    assert belonging_to(tmp_path) == []
    assert summary_of(run)["status"] == "suspended"
    assert "resuming run email-search-1" in kestrl(*arguments)
    summary = summary_of(run)
    assert (summary["status"], summary["steps"]) == ("succeeded", 8)
    with closing(sqlite3.connect(run.path / "ledger.db")) as connection:
        trained = connection.execute(
            "SELECT position, step FROM work WHERE state = 'trained' ORDER BY position"
        ).fetchall()
    assert trained == [(position, position // 2 + 1) for position in range(16)]


def test_a_users_own_environment_loops_and_reward(tmp_path: Path) -> None:
    printed = kestrl("run", Path(__file__).parent / "shop" / "job.yaml", "--runs", tmp_path)
    run = RunDir(tmp_path / "shop-1")
    assert summary_of(run)["status"] == "succeeded"
    assert "2 steps in" in printed
    store = open_store(run.path.as_uri())
    trained = EpisodeFilter(purpose=Purpose.TRAIN, outcomes=TRAINED_OUTCOMES)
    stored = [*ObjectEpisodeStore(store).select(trained)]
    episodes = [(each.group.scenario.agent, each.episode) for each in stored]
    assert len(episodes) == 16
    assert {agent for agent, _ in episodes} == {"", "brief"}
    for agent, episode in episodes:
        assert episode.failure is None
        calls = [(call.name, call.outcome, call.text) for call in episode.tool_calls]
        basket = {} if agent else {"lamp": 2}
        assert calls == ([] if agent else [("search", "ok", '["lamp"]'), ("buy", "ok", "3 left")])
        assert episode.environments == {"Shop": {"basket": basket, "currency": "CHF"}}
        assert (len(episode.turns), len(episode.rows)) == (1 if agent else 2, 1)
        written = len(set(episode.final_text)) / 100
        judged = episode.rewards["ruler"]
        assert 0.0 <= judged <= 1.0
        assert judged * 20 == pytest.approx(round(judged * 20))  # a step of the schema
        assert episode.rewards == {
            "loop_reward": pytest.approx(written),
            "bought": basket.get("lamp", 0),
            "ruler": judged,
        }
        assert episode.reward == pytest.approx(written + 0.1 * basket.get("lamp", 0))
    groups = {each.group.id: each.group for each in stored}
    for group in groups.values():  # the base model on the job's own engine, held to the schema
        calls = group.scoring["ruler"]["calls"]
        assert {call["model"] for call in calls} == {"base"}
        assert [tool["function"]["name"] for tool in group.tools] == ["search", "buy"]
        reply = json.loads(calls[-1]["content"])
        assert [item["trajectory_id"] for item in reply["scores"]] == calls[-1]["ids"]
        assert all(episode.scoring["ruler"]["explanation"] for episode in group.episodes)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tools=[{name: t, use: 'nowhere:Tool'}]", "cannot import 'nowhere'"),
        ("rewards=[{rule: 'nowhere:reward'}]", "cannot import 'nowhere'"),
        ("agent.loop=nowhere:Loop", "cannot import 'nowhere'"),
    ],
)
def test_a_failed_import_ends_the_run_with_one_message(tmp_path: Path, override: str, message: str) -> None:
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


def test_a_server_of_tools_that_lists_others_after_an_interruption_ends_the_run(tmp_path: Path) -> None:
    listed, sample = tmp_path / "listed.json", ROOT / "tests" / "unit" / "tools" / "mcp_sample.py"
    manifest = yaml.safe_load(QUICKSTART.read_text())
    manifest["spec"]["tools"].append({"name": "notes", "mcp": {"command": [sys.executable, str(sample), str(listed)]}})
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(manifest))

    def lists(*names: str) -> None:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        tools = [{"name": name, "description": "Repeats text.", "inputSchema": parameters} for name in names]
        listed.write_text(json.dumps({"tools": tools}))

    lists("echo")
    runs = tmp_path / "my runs"
    run = RunDir(runs / "email-search-1")
    arguments = ["run", job, "--runs", runs, *SMALL, "--set", "schedule.maxSteps=3"]
    arguments += ["--set", "inference.replicas=1"]
    with subprocess.Popen(command(*arguments), cwd=ROOT) as process:
        wait_for_step(run, process, 1)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    lists("echo", "repeat")
    printed = kestrl(*arguments, code=1)
    assert printed.count("error: ") == 1
    assert "spec.tools: notes: the server lists other tools than at the start of the run" in printed
    assert f"logs: kestrl logs email-search-1 --runs '{runs}'\n" in printed
    assert belonging_to(tmp_path) == []
    lists("echo")
    assert "resuming run email-search-1" in kestrl(*arguments)
    assert (summary_of(run)["status"], summary_of(run)["steps"]) == ("succeeded", 3)
    warning = "warning: newest: spec.tools: notes: the server lists other tools than in training"
    evaluation = ("eval", run.id, "--runs", runs, "--set", "inference.replicas=1")
    assert warning not in kestrl(*evaluation)
    lists("echo", "repeat")
    assert warning in kestrl(*evaluation)


# Groups that continue over updates

CONTINUED_STEPS = 6
CORRECTION_CAP = 2.0
"""Largest importance weight, the default of the spec."""
CONTINUING = f"""
apiVersion: kestrl.dev/v1alpha1
kind: AgentRLJob
metadata: {{name: continuing}}
spec:
  model: {{base: demo://tiny, adapter: {{rank: 16, alpha: 32}}}}
  data: {{train: {{uri: demo://email/train, size: 400}}, seed: 42}}
  agent: {{maxTurns: 4, maxTokens: 160, maxTokensPerTurn: 40}}
  tools:
    - {{name: search_emails, use: "late:SearchEmails"}}
    - {{name: read_email, use: "kestrl_email.tools:ReadEmail"}}
    - {{name: return_final_answer, use: "kestrl_email.tools:ReturnFinalAnswer"}}
  rewards: [{{rule: "kestrl_email.rewards:art_e"}}]
  algorithm: {{groupSize: 4, groupsPerStep: 2, learningRate: 2.0e-3, maxStaleness: 1}}
  schedule: {{maxSteps: {CONTINUED_STEPS}, checkpointEvery: {CONTINUED_STEPS}, staleGroups: continue}}
  inference: {{contextLength: 2048, adapterSlots: 3}}
  rollout: {{concurrency: 64, deadlines: {{tool: 20s, turn: 40s, episode: 3m}}}}
"""
LATE = '''
"""The search with a delay: of one mailbox in three it takes as long as several steps."""

import asyncio
import zlib

from kestrl_email import tools


class SearchEmails:
    """Search the mailbox."""

    def __init__(self, *, database: str, inbox: str) -> None:
        self._search = tools.SearchEmails(database=database, inbox=inbox)
        self._seconds = 6.0 if zlib.crc32(inbox.encode()) % 3 == 0 else 0.1

    async def __call__(self, keywords: list[str]) -> object:
        """Find mails that contain all keywords.

        Args:
            keywords: Words that must all occur.
        """
        await asyncio.sleep(self._seconds)
        return self._search(keywords)

    def close(self) -> None:
        self._search.close()
'''


class Recomputed:
    """Log-probs under any published version, by transformers and peft."""

    def __init__(self, run: RunDir) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        folders = {int(path.name[:6]): path for path in (run.path / "adapters").iterdir()}
        base = AutoModelForCausalLM.from_pretrained(tiny(), dtype="float32")
        self._model: Any = PeftModel.from_pretrained(base, str(folders[0]), adapter_name="0").eval()
        for step, folder in folders.items():
            if step:
                self._model.load_adapter(str(folder), adapter_name=f"{step}")

    def score(self, step: int, ids: Sequence[int]) -> list[float]:
        """Log-prob of every token; 0 of the first."""
        import torch

        self._model.set_adapter(f"{step}")
        with torch.no_grad():
            logprobs = torch.log_softmax(self._model(torch.tensor([list(ids)])).logits[0, :-1], -1)
        return [0.0, *logprobs.gather(1, torch.tensor(list(ids)[1:])[:, None])[:, 0].tolist()]


def steps_of(episode: Episode) -> list[int]:
    """Steps of the versions of the turns."""
    return [int(turn.policy.split(".")[1]) for turn in episode.turns]


def trained(run: RunDir) -> Mapping[int, Sequence[StoredGroup]]:
    store = ObjectEpisodeStore(open_store(run.path.as_uri()))
    return {
        step: [group for group in store.read(Purpose.TRAIN, step).stored if group.outcome in TRAINED_OUTCOMES]
        for step in range(1, CONTINUED_STEPS + 1)
    }


def record(run: RunDir, step: int) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((run.path / "metrics" / f"{step:06d}.json").read_text())
    return facts


def test_episodes_of_several_versions_are_trained_on(tmp_path: Path) -> None:
    """Groups continue over updates; what was stored is computed again from the published adapters alone."""
    (tmp_path / "job.yaml").write_text(CONTINUING)
    (tmp_path / "late.py").write_text(LATE)
    kestrl("run", tmp_path / "job.yaml", "--runs", tmp_path)
    run = RunDir(tmp_path / "continuing-1")
    assert summary_of(run)["status"] == "succeeded"
    assert summary_of(run)["failures"] == {}
    assert summary_of(run)["stale"]["groups"] == 0
    versions = [
        steps_of(each) for groups in trained(run).values() for group in groups for each in group.trained.episodes
    ]
    several = [steps for steps in versions if len(set(steps)) > 1]
    assert several, "no episode went on over an update"
    assert all(steps == sorted(steps) for steps in versions)
    with closing(sqlite3.connect(run.path / "ledger.db")) as connection:
        rows = connection.execute("SELECT step, count(*) FROM work WHERE state = 'trained' GROUP BY step").fetchall()
    assert rows == [(step, 2) for step in range(1, CONTINUED_STEPS + 1)], "each scenario is trained on once"
    check_recomputed(run)


def check_recomputed(run: RunDir) -> None:
    """Compares log-probs of each token by its own version and by the one that the step began with, advantages, and the
    loss.
    """
    model = Recomputed(run)
    masked = 0
    for step, groups in trained(run).items():
        terms: list[float] = []
        ages: dict[str, int] = {}
        for group in groups:
            rewards = [each.reward for each in group.trained.episodes if each.reward is not None]
            for each in group.trained.episodes:
                computed = iter(zip(*group_tokens(group, each), strict=True))
                for number, row in enumerate(each.rows):
                    scores = {version: model.score(version, row.token_ids) for version in {*steps_of(each), step - 1}}
                    for turn, version in zip(each.turns, steps_of(each), strict=True):
                        if turn.row != number:
                            continue
                        is_old = step - 1 - version > 4
                        for place in range(turn.start, turn.end):
                            assert row.mask[place] == (not is_old)
                            if is_old:
                                masked += 1
                                continue
                            learner, advantage = next(computed)
                            assert row.logprobs[place] == pytest.approx(scores[version][place], abs=1e-3)
                            assert learner == pytest.approx(scores[step - 1][place], abs=1e-3)
                            assert advantage == pytest.approx(advantage_of(each, rewards), abs=1e-3)
                            terms.append(-min(exp(learner - row.logprobs[place]), CORRECTION_CAP) * advantage)
                            ages[str(step - 1 - version)] = ages.get(str(step - 1 - version), 0) + 1
        facts = record(run, step)
        assert facts["loss"] == pytest.approx(sum(terms) / len(terms), abs=1e-4)
        assert facts["tokens_by_staleness"] == ages
        assert facts["staleness"] == max(map(int, ages))
        assert facts["gap"]["own"]["max"] <= 1e-3
    assert summary_of(run)["stale"]["masked"] == masked


def group_tokens(group: StoredGroup, episode: Episode) -> tuple[Sequence[float], Sequence[float]]:
    """The learner's log-probs and advantages of an episode's trained tokens."""
    tokens = group.tokens[episode.id]
    return tokens.learner_logprobs, tokens.advantages


def advantage_of(episode: Episode, rewards: Sequence[float]) -> float:
    """GRPO's, by the rewards of the group."""
    assert episode.reward is not None
    spread = statistics.pstdev(rewards)
    return (episode.reward - statistics.fmean(rewards)) / (spread + 1e-6)
