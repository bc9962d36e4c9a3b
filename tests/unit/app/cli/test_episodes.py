"""`kestrl episodes`: what it lists of a run, an evaluation and an address, conditions, differences and labels."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kestrl._app.cli import episodes as commands
from kestrl._app.cli.main import app
from kestrl._app.episodes.difference import difference
from kestrl._app.episodes.query import EpisodeCondition
from kestrl._app.local.rundir import RunDir
from kestrl.data.locate import locate_model
from kestrl.episode import Episode, Group, Purpose, Scenario, StopReason
from kestrl.errors import Boundary, Failure, UserInputError
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeBatch, GroupOutcome, ObjectEpisodeStore, StoredGroup, TrainedTokens
from kestrl.storage.table.arrow import arrow
from kestrl.testing.attempts import make_attempt

TOOL = Failure(boundary=Boundary.TOOL, code="tool_raised", message="it raised\x1b[31m")


def kestrl(*arguments: str | Path, error: str = "") -> list[str]:
    """Lines that a command prints; with `error`, it must fail with this text."""
    result = CliRunner().invoke(app, ["episodes", *map(str, arguments)])
    if error:
        assert isinstance(result.exception, UserInputError), result.exception
        assert error in str(result.exception)
    elif result.exception is not None:
        raise result.exception
    return result.stdout.splitlines()


def episode(group: str, index: int, reward: float | None, text: str = "two", **changes: Any) -> Episode:
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": text}]
    made = make_attempt(text).episode
    return replace(
        made, id=f"{group}/{index}", group_id=group, scenario_id="s", index=index, reward=reward, messages=messages,
        rewards={} if reward is None else {"exact": reward}, stop_reason=StopReason.ANSWERED, **changes,
    )  # fmt: skip


def stored(name: str, outcome: GroupOutcome, episodes: Sequence[Episode], **changes: Any) -> StoredGroup:
    scenario = Scenario(id="s", ordinal=0, messages=[{"role": "user", "content": "How many?"}], ground_truth="two")
    return StoredGroup(group=Group(id=name, scenario=scenario, episodes=episodes), outcome=outcome, **changes)


def append(folder: Path, purpose: Purpose, step: int, groups: Sequence[StoredGroup]) -> None:
    ObjectEpisodeStore(open_store(str(folder)), "job-1").append(EpisodeBatch(purpose=purpose, step=step, stored=groups))


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    document = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"base": "demo://tiny"},
            "data": {"train": {"uri": "train.jsonl"}},
            "rewards": [{"rule": "exact_answer"}],
        },
    }
    (folder / "job.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of runs with one of two steps: a shrunk group, one that was retried, one that failed as a whole."""
    run = make_run(tmp_path / "runs" / "job-1")
    failed = episode("a", 1, None, failure=TOOL)
    late = Failure(boundary=Boundary.INFRASTRUCTURE, code="step_deadline", message="late", retryable=True)
    first = stored("a", GroupOutcome.SHRUNK, [episode("a", 0, 0.5), failed, episode("a", 2, -1.0, "three\u202e")])
    append(run, Purpose.TRAIN, 1, [first, stored("b", GroupOutcome.RETRIED, [], reason="late", failure=late)])
    again = stored("c", GroupOutcome.RETRIED, [episode("c", 0, None, failure=TOOL)], reason="tool/tool_raised")
    append(run, Purpose.TRAIN, 2, [stored("d", GroupOutcome.TRAINED, [episode("d", 0, 1.0)]), again])
    append(run, Purpose.EVALUATION, 0, [stored("e", GroupOutcome.EVALUATED, [episode("e", 0, 0.25)])])
    return tmp_path / "runs"


def test_every_group_that_ended_is_listed_with_its_outcome(runs: Path) -> None:
    assert kestrl("list", "--runs", runs) == [
        "a/0  step 1  reward 0.500  turns 1  answered  shrunk",
        "a/1  step 1  reward -  turns 1  answered tool/tool_raised: it raised\\x1b[31m  shrunk",
        "a/2  step 1  reward -1.000  turns 1  answered  shrunk",
        "b  step 1  without episodes  retried infrastructure/step_deadline: late",
        "d/0  step 2  reward 1.000  turns 1  answered",
        "c/0  step 2  reward -  turns 1  answered tool/tool_raised: it raised\\x1b[31m  retried",
    ]
    assert kestrl("list", "--runs", runs, "--purpose", "eval") == ["e/0  step 0  reward 0.250  turns 1  answered"]
    assert [json.loads(line)["outcome"] for line in kestrl("list", "--runs", runs, "--step", "2", "--json")] == [
        "trained",
        "retried",
    ]


@pytest.mark.parametrize(
    ("condition", "ids"),
    [
        ("reward < 0", ["a/2"]),
        ("failure_boundary = 'tool' and outcome = 'retried'", ["c/0"]),
        ("reward > 0 -- a comment", ["a/0", "d/0"]),
        ("list_contains(list_transform(messages, lambda m: m.content = 'two'), true) and reward = 1", ["d/0"]),
        ("attempt = 0 and episode is null", ["b"]),
    ],
)
def test_a_condition_selects(runs: Path, condition: str, ids: Sequence[str]) -> None:
    assert [line.split()[0] for line in kestrl("list", "--runs", runs, "--where", condition)] == ids


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("rewrd < 0", 'Referenced column "rewrd" not found'),
        ("reward <", "syntax error"),
        ("true); DROP TABLE episodes; SELECT (true", "is not one expression"),
        ("episode in (select content from read_text('{secret}'))", "disabled by configuration"),
        ("episode in (select * from '{secret}')", "disabled by configuration"),
        ("(select count(*) from read_csv('http://127.0.0.1:9/x')) = 0", "disabled by configuration"),
        ("episode in (select name from local_table)", "local_table does not exist"),
    ],
)
def test_a_condition_that_is_wrong_or_reaches_outside_is_one_error(
    runs: Path, tmp_path: Path, condition: str, why: str
) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a/0\n")
    kestrl("list", "--runs", runs, "--where", condition.format(secret=secret), error=why)


def test_a_condition_changes_no_setting() -> None:
    local_table = arrow().table({"name": ["a/0"]})  # noqa: F841 - a variable that DuckDB could read by its name
    condition = EpisodeCondition("true")
    with pytest.raises(condition._duckdb.Error, match="locked"):
        condition._connection.execute("SET enable_external_access = true")
    with pytest.raises(condition._duckdb.Error, match="does not exist"):
        condition._connection.execute("SELECT * FROM local_table")


def test_runs_that_only_evaluate_list_what_they_have(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = stored("e", GroupOutcome.EVALUATED, [episode("e", 0, 0.25)])
    append(make_run(runs / "job-1" / "evaluations" / "2026-newest"), Purpose.EVALUATION, 0, [group])
    expected = ["e/0  step 0  reward 0.250  turns 1  answered"]
    assert kestrl("list", "job-1/evaluations/2026-newest", "--runs", runs) == expected
    monkeypatch.chdir(runs)
    assert kestrl("list", "job-1/evaluations/2026-newest", "--runs", runs.parent) == expected
    assert kestrl("list", (runs / "job-1").as_uri(), "--purpose", "eval") == expected
    kestrl("list", "nothing", "--runs", runs, error="no run 'nothing'")


def test_an_address_is_read_without_the_runs_folder(runs: Path) -> None:
    address = (runs / "job-1").as_uri()
    assert len(kestrl("list", address)) == 6
    assert kestrl("show", "a/0", "--run", address)[0].startswith("episode a/0 of scenario s")


def test_a_run_is_followed_to_its_end(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step comes while the command waits, and the runner ends with it."""
    handle = RunDir(runs / "job-1").lock()
    assert handle is not None
    polls: list[float] = []

    def wait(seconds: float) -> None:
        polls.append(seconds)
        append(runs / "job-1", Purpose.TRAIN, 3, [stored("f", GroupOutcome.TRAINED, [episode("f", 0, 0.0)])])
        if len(polls) == 2:
            os.close(handle)

    monkeypatch.setattr(commands.time, "sleep", wait)
    lines = kestrl("list", "--follow", "--runs", runs)
    assert [line.split()[0] for line in lines] == ["a/0", "a/1", "a/2", "b", "d/0", "c/0", "f/0"]
    assert len(polls) == 2


def test_an_episode_is_compared_with_the_best_of_its_group(runs: Path) -> None:
    lines = kestrl("diff", "a/2", "--runs", runs)
    assert [line.split() for line in lines[:3]] == [
        ["*", "episode", "a/2", "a/0"],
        ["*", "reward", "-1.000", "0.500"],
        ["*", "reward", "exact", "-1.000", "0.500"],
    ]
    assert lines[-3:] == [
        "the first 1 messages are equal; the first difference:",
        "<   1 assistant: three\\u202e",
        ">   1 assistant: two",
    ]
    document = json.loads("\n".join(kestrl("diff", "a/2", "--runs", runs, "--json")))
    assert [side["facts"]["reward"] for side in document["episodes"]] == ["-1.000", "0.500"]
    assert [side["messages"][1]["content"] for side in document["episodes"]] == ["three\u202e", "two"]
    assert document["first_difference"] == 1
    assert kestrl("diff", "a/0", "d/0", "--runs", runs)[-1] == "the 2 messages are equal"
    kestrl("diff", "d/0", "--runs", runs, error="no other episode of the group d has a reward")


def test_columns_of_a_comparison_fit_long_names() -> None:
    metrics = {"share_of_mails_that_were_read": 0.25}
    sides = [episode("a", index, reward, metrics=metrics) for index, reward in enumerate((0.5, -1.0))]
    lines = list(difference(*sides))
    assert len({line.rindex(" ") for line in lines if line.startswith(("* reward", "  metric"))}) == 1


def test_a_list_without_episodes_names_what_is_stored(runs: Path) -> None:
    for options in (["--step", "9"], ["--where", "reward > 7"]):
        result = CliRunner().invoke(app, ["episodes", "list", "--runs", str(runs), *options])
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr == "nothing is selected; stored are train 1 to 2, eval 0\n"


def test_labels_are_stored_beside_the_episodes(runs: Path) -> None:
    before = (runs / "job-1" / "episodes" / "train" / "step=000001.parquet").read_bytes()
    kestrl("label", "a/0", "yes", "--runs", runs)
    kestrl("label", "a/2", "no", "--note", "counts the wrong shelf", "--runs", runs)
    assert kestrl("list", "--runs", runs, "--where", "label = 'no'") == [
        "a/2  step 1  reward -1.000  turns 1  answered  shrunk  label no"
    ]
    kestrl("label", "a/2", "yes", "--runs", runs)
    kestrl("label", "a/0", "none", "--runs", runs)
    assert [line.split()[0] for line in kestrl("list", "--runs", runs, "--where", "label is not null")] == ["a/2"]
    assert (runs / "job-1" / "episodes" / "train" / "step=000001.parquet").read_bytes() == before
    kestrl("label", "x", "yes", "--runs", runs, error="no stored episode has the id 'x'")
    kestrl("label", "a/0", "maybe", "--runs", runs, error="label: 'maybe' is not yes, no or none")


def test_tokens_are_shown_with_what_training_computed_and_their_text(runs: Path) -> None:
    made = episode("g", 0, 1.0)
    sampled = made.sampled_tokens
    floats = type(made.rows[0].logprobs)
    tokens = TrainedTokens(advantages=floats("f", [0.5] * sampled), learner_logprobs=floats("f", [-0.25] * sampled))
    append(runs / "job-1", Purpose.TRAIN, 3, [stored("g", GroupOutcome.TRAINED, [made], tokens={"g/0": tokens})])
    lines = [line for line in kestrl("show", "g/0", "--tokens", "--runs", runs) if " mask 1 " in line]
    assert len(lines) == sampled > 0
    assert all("learner    -0.250000  advantage    0.5000" in line for line in lines)
    (runs / "job-1" / "settings").mkdir()
    settings = {"tokenizer": locate_model("demo://tiny", base=runs)}
    (runs / "job-1" / "settings" / "rollout-0.json").write_text(json.dumps(settings))
    with_text = [line for line in kestrl("show", "g/0", "--tokens", "--runs", runs) if " mask " in line]
    assert all(line.endswith('"') for line in with_text)


@pytest.mark.servers
def test_a_bucket_is_read_and_labelled(runs: Path, s3_environment: Any) -> None:
    address = f"s3://runs/{uuid.uuid4().hex}"
    bucket, local = open_store(address), open_store(str(runs / "job-1"))
    for path in local.list("episodes"):
        bucket.put(path, local.get(path))
    assert kestrl("list", address) == kestrl("list", (runs / "job-1").as_uri())
    kestrl("label", "a/2", "no", "--run", address)
    listed = kestrl("list", address, "--where", "label = 'no' and reward < 0")
    assert [line.split()[0] for line in listed] == ["a/2"]
    assert kestrl("diff", "a/2", "--run", address)[0].split() == ["*", "episode", "a/2", "a/0"]
