"""Runs as they are stored: a folder with a manifest, episodes, metrics and a result."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kestrl.episode import CallOutcome, Episode, Group, PolicyVersion, Purpose, Scenario, StopReason
from kestrl.errors import Boundary, Failure
from kestrl.runstate.states import RunPhase
from kestrl.storage import layout, open_store
from kestrl.storage.episodes import EpisodeBatch, GroupOutcome, ObjectEpisodeStore, StoredGroup, TrainedTokens
from kestrl.storage.summary import RunSummary, write_summary
from kestrl.testing.attempts import make_attempt, make_call

POLICY = PolicyVersion(job="job", step=1, sha256="ab" * 32)
BEGIN = 1_790_000_000.0
"""Unix seconds at which the first episode of a stored run begins."""


def make_run(folder: Path) -> Path:
    """A run's folder with a manifest."""
    folder.mkdir(parents=True)
    spec: dict[str, Any] = {
        "model": {"base": "demo://tiny"},
        "data": {"train": {"uri": "train.jsonl"}},
        "rewards": [{"rule": "exact_answer"}],
        "algorithm": {"groupSize": 2},
    }
    document = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": {"name": "job"}, "spec": spec}
    (folder / "job.json").write_text(json.dumps(document))
    return folder


def make_group(name: str, *, begin: float = BEGIN) -> StoredGroup:
    """A group with a right answer after two tool calls, one of them wrong, and a failed episode."""
    wrong = make_call("count", {"shelf": "two"}, text="no number: \x1b[31m", outcome=CallOutcome.SCHEMA_VIOLATION)
    right = make_call("count", {"shelf": 2}, text="7 boxes", data={"boxes": 7}, turn=1)
    timed = [replace(wrong, seconds=0.25), replace(right, seconds=0.5)]
    answer = make_attempt("I count.", "Again.", "seven", calls=timed).episode
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How many?"}]
    for turn, text in enumerate(("I count.", "Again.", "seven")):
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "tool", "content": call.text} for call in timed if call.turn == turn]
    common: dict[str, Any] = {"group_id": name, "scenario_id": "shelf", "policy": POLICY, "engine": "engine-0"}
    first = replace(
        answer, id=f"{name}/0", index=0, messages=messages, started_at=begin, seconds=4.0, reward=0.75,
        rewards={"exact": 1.0, "short": -0.5}, reward_weights={"exact": 1.0, "short": 0.5}, metrics={"truncated": 0.0},
        turns=[replace(turn, seconds=1.0) for turn in answer.turns], stop_reason=StopReason.ANSWERED,
        trace_id="0af7651916cd43dd8448eb211c80319c", **common,
    )  # fmt: skip
    raised = Failure(boundary=Boundary.TOOL, code="tool_raised", message="the shelf is locked")
    second = replace(
        make_attempt("I count.").episode, id=f"{name}/1", index=1, started_at=begin, seconds=1.0, failure=raised,
        stop_reason=StopReason.FAILED, **common,
    )  # fmt: skip
    scenario = Scenario(id="shelf", ordinal=0, messages=[{"role": "user", "content": "How many?"}], ground_truth="7")
    tokens = TrainedTokens(
        advantages=array("f", [0.5] * first.sampled_tokens), learner_logprobs=array("f", [-0.75] * first.sampled_tokens)
    )
    group = Group(id=name, scenario=scenario, episodes=[first, second])
    return StoredGroup(group=group, outcome=GroupOutcome.SHRUNK, tokens={first.id: tokens})


def store_step(folder: Path, step: int, groups: Sequence[StoredGroup], record: Mapping[str, Any]) -> None:
    """Stores what an optimiser step leaves."""
    store = open_store(str(folder))
    ObjectEpisodeStore(store, folder.name).append(EpisodeBatch(purpose=Purpose.TRAIN, step=step, stored=groups))
    store.put(layout.step_metrics(step), json.dumps({"step": step, **record}).encode())


def store_evaluation(folder: Path, step: int, episodes: Sequence[Episode], means: Mapping[str, float]) -> None:
    """Stores an evaluation after a step."""
    store = open_store(str(folder))
    scenario = Scenario(id="held-out", ordinal=0, messages=[{"role": "user", "content": "How many?"}])
    group = Group(id=f"eval-{step}", scenario=scenario, episodes=episodes)
    ObjectEpisodeStore(store, folder.name).append(EpisodeBatch.evaluation(step, [group]))
    store.put(layout.evaluation_metrics(step), json.dumps(means).encode())


def store_summary(folder: Path, status: RunPhase, *, steps: int, **fields: Any) -> None:
    """Stores a result, also where `kestrl status` reads it."""
    summary = RunSummary(status=status, steps=steps, total_steps=steps, **fields)
    write_summary(open_store(str(folder)), summary)


def make_stored_run(folder: Path, *, steps: int = 2) -> Path:
    """A run that has succeeded, with an evaluation before it and one after it."""
    run = make_run(folder)
    for step in range(1, steps + 1):
        gap = {"mean": 1e-6 * step, "p99": float("nan")}
        group = make_group(f"g{step}", begin=BEGIN + 10 * step)
        store_step(run, step, [group], {"reward": 0.25 * step, "loss": -0.1, "gap": gap})
    for step, reward in ((0, 0.125), (steps, 0.5)):
        attempt = make_attempt("seven").episode
        asked = {"id": f"eval-{step}/0", "group_id": f"eval-{step}", "scenario_id": "held-out", "reward": reward}
        store_evaluation(run, step, [replace(attempt, started_at=BEGIN, seconds=1.0, **asked)], {"reward": reward})
    store_summary(run, RunPhase.SUCCEEDED, steps=steps, before={"reward": 0.125}, after={"reward": 0.5})
    return run
