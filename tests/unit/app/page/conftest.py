"""Runs whose episodes are really stored, and a browser that has shown the token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kestrl._app.page.library import RunsFolder
from kestrl._app.page.server import page_app
from kestrl.episode import CallOutcome, Episode, Group, Purpose, Scenario, StopReason
from kestrl.errors import Boundary, Failure
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeBatch, GroupOutcome, ObjectEpisodeStore, StoredGroup, TrainedTokens
from kestrl.testing.attempts import make_attempt, make_call

HOST = "http://127.0.0.1:8123"
TOKEN = "a-token-of-the-test"


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    spec = {
        "model": {"base": "demo://tiny"},
        "data": {"train": {"uri": "train.jsonl"}},
        "rewards": [{"rule": "exact_answer"}],
    }
    document = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": {"name": "job"}, "spec": spec}
    (folder / "job.json").write_text(json.dumps(document))
    return folder


def episode(group: str, index: int, reward: float | None, *turns: str, scenario: str = "s", **changes: Any) -> Episode:
    calls = changes.pop("calls", ())
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How many?"}]
    for number, text in enumerate(turns):
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "tool", "content": call.text} for call in calls if call.turn == number]
    return replace(
        make_attempt(*turns, calls=calls).episode, id=f"{group}/{index}", group_id=group, scenario_id=scenario,
        index=index, reward=reward, messages=messages, rewards={} if reward is None else {"exact": reward},
        reward_weights={} if reward is None else {"exact": 1.0}, **{"stop_reason": StopReason.ANSWERED, **changes},
    )  # fmt: skip


def stored(
    name: str, outcome: GroupOutcome, episodes: Sequence[Episode], *, scenario: str = "s", **changes: Any
) -> StoredGroup:
    prompt = [{"role": "user", "content": "How many?"}]
    asked = Scenario(id=scenario, ordinal=0, messages=prompt, ground_truth="two")
    return StoredGroup(group=Group(id=name, scenario=asked, episodes=episodes), outcome=outcome, **changes)


def append(folder: Path, purpose: Purpose, step: int, groups: Sequence[StoredGroup]) -> None:
    ObjectEpisodeStore(open_store(str(folder)), "job-1").append(EpisodeBatch(purpose=purpose, step=step, stored=groups))


def failed_group() -> StoredGroup:
    """A group with a tool's failure, a wrong call, a right answer and one that a limit ended."""
    raised = Failure(boundary=Boundary.TOOL, code="tool_raised", message="the shelf is locked\x1b[31m")
    count, refused = make_call("count", {"shelf": 2}, text="7 boxes"), CallOutcome.SCHEMA_VIOLATION
    wrong = make_call("count", {"shelf": "two"}, text="shelf is no number", outcome=refused)
    late = make_call("count", {"shelf": 9}, text="", turn=1)
    close = {"ruler": {"scores": [0.75, 1.0], "explanation": "right", "judges": ["a", "a"]}}
    right = episode("g", 0, 1.0, "I count.", "seven", calls=[count], scoring=close)
    floats = type(right.rows[0].logprobs)
    sampled = right.sampled_tokens
    apart = {"ruler": {"scores": [0.25, 0.0, 0.75], "explanation": "no end", "judges": ["a", "a", "b"]}}
    tokens = TrainedTokens(advantages=floats("f", [0.5] * sampled), learner_logprobs=floats("f", [-0.75] * sampled))
    stopped = StopReason.FAILED
    episodes = [
        right,
        episode("g", 1, None, "I count.", "Again.", calls=[count, late], failure=raised, stop_reason=stopped),
        episode("g", 2, -1.0, "I count.", "two", calls=[wrong], scoring={"exact": {"reason": "seven was expected"}}),
        episode("g", 3, -0.5, "no end", stop_reason=StopReason.MAX_TOKENS, scoring=apart),
    ]
    return stored("g", GroupOutcome.SHRUNK, episodes, tokens={"g/0": tokens})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a run of two steps and an evaluation, and a run without episodes."""
    folder = tmp_path / "runs"
    run = make_run(folder / "job-1")
    even = stored("even", GroupOutcome.TRAINED, [episode("even", 0, 0.5, "two"), episode("even", 1, 0.5, "two")])
    append(run, Purpose.TRAIN, 1, [even])
    late = Failure(boundary=Boundary.INFRASTRUCTURE, code="step_deadline", message="late", retryable=True)
    whole = stored("w", GroupOutcome.RETRIED, [], scenario="x", reason="late", failure=late)
    second = replace(even, group=replace(even.group, id="even2", episodes=[episode("even2", 0, 0.5, "two")]))
    append(run, Purpose.TRAIN, 2, [second, whole, failed_group()])
    held_out = stored("e", GroupOutcome.EVALUATED, [episode("e", 0, 0.25, "two")])
    append(run, Purpose.EVALUATION, 0, [held_out])
    make_run(folder / "empty-1")
    return folder


@pytest.fixture
def browser(runs: Path) -> Iterator[TestClient]:
    """A browser that has opened the printed address."""
    with TestClient(page_app(RunsFolder(runs), TOKEN, labels=True), base_url=HOST) as client:
        assert client.get(f"/?token={TOKEN}").status_code == 200
        yield client


@pytest.fixture
def read(browser: TestClient) -> Callable[[str], str]:
    """The page at an address."""

    def page(address: str) -> str:
        answer = browser.get(address)
        assert answer.status_code == 200, answer.text
        return answer.text

    return page


@pytest.fixture
def click(read: Callable[[str], str]) -> Callable[[str, str], str]:
    """The address behind a link with a text."""

    def follow(page: str, text: str) -> str:
        links = re.findall(r'<a [^>]*?href="([^"]+)"[^>]*>(.*?)</a>', page, re.DOTALL)
        return next(address for address, shown in links if text in shown)

    return follow


@pytest.fixture
def hostile() -> Callable[[str], StoredGroup]:
    """A group that has a text wherever a model, a tool, a judge or a job may put one."""

    def group(text: str) -> StoredGroup:
        raised = Failure(boundary=Boundary.TOOL, code="tool_raised", message=text)
        call = make_call(text, {text: text}, text=text, outcome=CallOutcome.TOOL_ERROR)
        episodes = [
            episode(text, 0, 1.0, "fine", scenario=text),
            episode(
                text, 1, None, text, scenario=text, calls=[call], failure=raised, engine=text, answer=text,
                scoring={text: {"reason": text}}, metrics={text: 1.0}, environments={text: text}, info={text: text},
            ),
        ]  # fmt: skip
        return stored(text, GroupOutcome.RETRIED, episodes, scenario=text, reason=text)

    return group
