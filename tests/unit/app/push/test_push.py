"""`kestrl push`: what is sent once, again, and not at all, and what becomes of a target that does not answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pyarrow.dataset
import pytest
import yaml
from tests.fakes.ports import free_port
from tests.fakes.stored_runs import make_group, make_stored_run, store_step, store_summary
from typer.testing import CliRunner, Result

from kestrl._app.cli.main import app
from kestrl._app.episodes.places import EpisodePlace, find_place
from kestrl._app.local.rundir import RunDir
from kestrl._app.push import follower
from kestrl._app.push.cursor import open_cursor
from kestrl._app.push.follower import Follower, sampled
from kestrl._app.push.target import PushedRun, Target, TargetRefused, TargetUnavailable
from kestrl._shared.backoff import Backoff
from kestrl.errors import UserInputError
from kestrl.runstate.states import RunPhase
from kestrl.storage import layout, open_store
from kestrl.storage.episodes import EpisodeBatch
from kestrl.storage.summary import RunSummary


def push(run: Path, *arguments: str, error: type[Exception] | None = None) -> Result:
    """A push of a run; with `error`, it must fail so."""
    result = CliRunner().invoke(app, ["push", run.name, "--runs", str(run.parent), *arguments])
    if error is not None:
        assert isinstance(result.exception, error), result.exception
    elif result.exception is not None:
        raise result.exception
    return result


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    """Rows of a split, as a program that reads the folder gets them."""
    table = pyarrow.dataset.dataset(folder / "data" / split, format="parquet").to_table(["step", "episode", "reward"])
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["episode"]))


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """The metadata and the text of a folder's card."""
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text


# The Hub


def test_a_folder_for_the_hub_has_every_episode_by_split(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    assert push(run, "--to", "hf", "--uri", str(folder)).stdout == "sent 6 episodes in 9 parts\n"
    assert [row["episode"] for row in rows(folder, "train")] == ["g1/0", "g1/1", "g2/0", "g2/1"]
    assert [row["step"] for row in rows(folder, "evaluation")] == [0, 2]
    head, text = card(folder)
    (config,) = head["configs"]
    paths = {each["split"]: each["path"] for each in config["data_files"]}
    assert paths == {"train": "data/train/*.parquet", "evaluation": "data/evaluation/*.parquet"}
    assert all(list(folder.glob(path)) for path in paths.values())
    assert "| reward | 0.125 | 0.5 |" in text
    assert "`demo://tiny`" in text


def test_what_was_sent_is_not_sent_again_but_what_is_written_again_is(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    push(run, "--to", "hf", "--uri", str(folder))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert push(run, "--to", "hf", "--uri", str(folder)).stdout == "nothing new to send\n"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "the run is untouched"
    store_step(run, 2, [make_group("again")], {"reward": 0.5})
    assert push(run, "--to", "hf", "--uri", str(folder)).stdout == "sent 2 episodes in 2 parts\n"
    assert [row["episode"] for row in rows(folder, "train")] == ["g1/0", "g1/1", "again/0", "again/1"]


def test_a_folder_that_was_removed_gets_everything_again(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    for _ in range(2):
        assert push(run, "--to", "hf", "--uri", str(folder)).stdout == "sent 6 episodes in 9 parts\n"
        folder.rename(tmp_path / f"moved-{len(list(tmp_path.iterdir()))}")


def test_a_folder_of_something_else_is_left_alone(run: Path, tmp_path: Path) -> None:
    other = make_stored_run(tmp_path / "runs" / "job-2")
    push(other, "--to", "hf", "--uri", str(tmp_path / "hub"))
    message = str(push(run, "--to", "hf", "--uri", str(tmp_path / "hub"), error=UserInputError).exception)
    assert "holds the episodes of another run" in message
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("mine")
    message = str(push(run, "--to", "hf", "--uri", str(tmp_path / "notes"), error=UserInputError).exception)
    assert "holds something else" in message
    assert (tmp_path / "notes" / "README.md").read_text() == "mine"


def test_a_damaged_file_is_reported_and_hides_no_other(run: Path, tmp_path: Path) -> None:
    (run / "episodes/train/step=000001.parquet").write_bytes(b"PAR1")
    result = CliRunner().invoke(
        app, ["push", "job-1", "--runs", str(run.parent), "--to", "hf", "--uri", str(tmp_path / "hub")]
    )
    assert result.exit_code == 1
    assert "step=000001.parquet is damaged" in result.stderr
    assert [row["episode"] for row in rows(tmp_path / "hub", "train")] == ["g2/0", "g2/1"]


def test_an_address_is_sent_like_a_run(run: Path, tmp_path: Path) -> None:
    arguments = ["push", run.as_uri(), "--to", "hf", "--uri", str(tmp_path / "hub")]
    assert CliRunner().invoke(app, arguments).stdout == "sent 6 episodes in 9 parts\n"


def test_a_sample_has_whole_groups_and_always_the_same(run: Path, tmp_path: Path) -> None:
    groups = [f"g{number}" for number in range(1000)]
    tenth = [group for group in groups if sampled(group, 0.1)]
    assert 70 < len(tenth) < 130
    assert {group for group in groups if sampled(group, 0.05)} <= set(tenth)
    assert all(sampled(group, 1.0) for group in groups)
    assert not any(sampled(group, 0.0) for group in groups)
    sent = push(run, "--to", "hf", "--uri", str(tmp_path / "hub"), "--sample", "0").stdout
    assert sent == "sent 0 episodes in 9 parts\n"


# Refusals


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--to", "mlflow"], "MLFLOW_TRACKING_URI"),
        (["--to", "mlflow", "--uri", "file:///tmp/mlruns"], "uvx mlflow server"),
        (["--to", "mlflow", "--uri", "mlruns"], "uvx mlflow server"),
        (["--to", "mlflow", "--uri", "http://"], "http://127.0.0.1:5000"),
        (["--to", "hf"], "--uri FOLDER"),
    ],
)
def test_bad_input_names_the_fix(run: Path, arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert named in str(push(run, *arguments, error=UserInputError).exception)


def test_a_target_that_is_down_is_a_typed_failure(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    failed = push(run, "--to", "mlflow", "--uri", f"http://127.0.0.1:{free_port()}", error=TargetUnavailable)
    assert "nothing new to send before that, and the same command sends the rest" in str(failed.exception)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def answering(status: int, body: str) -> str:
    """The address of a server that answers every request alike, for as long as the test's process lives."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.sendall((head + body).encode())

    Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("status", "body", "error", "named"),
    [
        (503, "busy", TargetUnavailable, "answers 503: busy"),
        (401, "no", TargetRefused, "TOKEN, in the file of --secret or the Secret of spec.telemetry.mlflow"),
        (200, "<html>", TargetRefused, "is no MLflow server"),
        (404, "not here", TargetRefused, "MLflow 3.6"),
        (400, "the key hunter2-hunter2 is bad", TargetRefused, "the key [redacted] is bad"),
    ],
)
def test_an_answer_says_what_to_do(
    run: Path, status: int, body: str, error: type[Exception], named: str, tmp_path: Path
) -> None:
    secret = tmp_path / "mlflow.env"
    secret.write_text("MLFLOW_TRACKING_USERNAME=me\nMLFLOW_TRACKING_PASSWORD=hunter2-hunter2\n")
    uri = answering(status, body)
    failed = push(run, "--to", "mlflow", "--uri", uri, "--secret", str(secret), error=error)
    assert named in str(failed.exception)


def test_one_process_at_a_time_sends_a_run(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    with open_cursor(run.as_uri(), f"hf {folder} 1.0"):
        failed = push(run, "--to", "hf", "--uri", str(folder), error=UserInputError)
    assert "another `kestrl push` sends" in str(failed.exception)


# Following


class Recorder(Target):
    """Records what it gets; refuses the first `down` attempts as a target that does not answer."""

    key = "recorder"

    def __init__(self, down: int = 0) -> None:
        self.got: Queue[str] = Queue()
        self._down = down

    def open(self, run: PushedRun, *, live: bool) -> str:
        self.got.put(f"open {run.id} {live}")
        return "one"

    def metrics(self, step: int, record: Mapping[str, Any], at: float) -> None:
        if self._down:
            self._down -= 1
            raise TargetUnavailable("it is down")
        self.got.put(f"metrics {step}")

    def evaluation(self, step: int, means: Mapping[str, Any], at: float) -> None:
        self.got.put(f"evaluation {step}")

    def episodes(self, batch: EpisodeBatch) -> None:
        self.got.put(f"episodes {batch.purpose} {batch.step}")

    def finish(self, summary: RunSummary, at: float) -> None:
        self.got.put(f"finish {summary.status}")

    def close(self) -> None: ...

    def next(self, count: int) -> list[str]:
        return [self.got.get(timeout=20) for _ in range(count)]


def following(place: EpisodePlace, target: Target, said: list[str]) -> Thread:
    def follow() -> None:
        run = PushedRun(id="job-1", job="job", storage=place.store.uri, settings={})
        with open_cursor(run.storage, target.key) as cursor:
            Follower(place, run, target, cursor, say=said.append).push(follow=True)

    thread = Thread(target=follow)
    thread.start()
    return thread


def test_a_run_is_followed_until_it_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(follower, "BACKOFF", Backoff(0.01, 60))
    open_store(str(run)).delete(layout.SUMMARY)
    folder = RunDir(run)
    assert folder.lock() is not None
    said: list[str] = []
    target = Recorder(down=3)
    thread = following(find_place(run.parent, "job-1"), target, said)
    assert target.next(9) == [
        "open job-1 True", "evaluation 0", "episodes evaluation 0", "metrics 1", "episodes train 1", "evaluation 2",
        "metrics 2", "episodes evaluation 2", "episodes train 2",
    ]  # fmt: skip
    assert said == ["waiting: it is down", "it answers again"]
    store_step(run, 3, [make_group("g3")], {"reward": 1.0})
    assert set(target.next(2)) == {"metrics 3", "episodes train 3"}
    store_summary(run, RunPhase.FAILED, steps=3, reason="it broke")
    assert target.next(1) == ["finish failed"]
    (run / "lock").unlink()
    thread.join(20)
    assert not thread.is_alive()


def test_a_kill_forgets_at_most_what_is_sent_again(run: Path, cursors: Path) -> None:
    place, target = find_place(run.parent, "job-1"), Recorder()
    pushed = PushedRun(id="job-1", job="job", storage=place.store.uri, settings={})
    with open_cursor(pushed.storage, target.key) as cursor:
        Follower(place, pushed, target, cursor, say=print).push(follow=False)
    (written,) = cursors.glob("*.json")
    content = json.loads(written.read_text())
    assert len(content["sent"]) == 9
    del content["sent"]["metrics/000001.json"]
    written.write_text(json.dumps(content))
    target = Recorder()
    with open_cursor(pushed.storage, target.key) as cursor:
        Follower(place, pushed, target, cursor, say=print).push(follow=False)
    assert target.next(2) == ["open job-1 False", "metrics 1"]
    assert target.got.empty()
    written.write_text("{half")
    with open_cursor(pushed.storage, target.key) as cursor:
        assert Follower(place, pushed, Recorder(), cursor, say=print).push(follow=False).parts == 9
