"""Our adapters, against a stand-in package and a server that speaks OpenEnv's wire."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from kestrl._app.cli import data
from kestrl._app.cli.main import app
from kestrl._shared.spec.environments import Environment, EnvironmentPython
from kestrl.errors import ToolFailure, UserInputError
from kestrl.testing.environments import check_environment
from kestrl.tools import ToolError
from kestrl_tools.environments import listing, openenv_tasks
from kestrl_tools.environments.openenv import OpenEnv
from kestrl_tools.environments.reasoning_gym import ReasoningGym, rows

SCHEMA = {"action": {"properties": {"word": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["word"]}}


class Sums:
    """A data set as reasoning-gym makes it: a task is decided by seed and position."""

    def __init__(self, seed: int, most: int) -> None:
        self._seed, self._most = seed, most

    def __getitem__(self, index: int) -> dict[str, Any]:
        left, right = (self._seed + index) % self._most, index % self._most
        return {"question": f"{left} + {right} =", "answer": str(left + right), "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dataset(name: str, *, seed: int, size: int, most: int = 10) -> Sums:
        if name != "sums":
            raise ValueError(f"Dataset '{name}' not registered")
        assert size >= 1
        return Sums(seed, most)

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset))


async def test_tasks_are_listed_with_digests_and_played() -> None:
    listed = list(rows("sums", {}, seed=3, size=2))
    assert [row["prompt"] for row in listed] == ["3 + 0 =", "4 + 1 ="]
    assert len({row["digest"] for row in listed}) == 2
    assert not [row for row in listed if "answer" in row]
    columns = [{name: row[name] for name in ("index", "seed", "digest")} for row in listed]
    await check_environment(lambda: ReasoningGym("sums", {}), rows=columns, turns=["7"])


def test_a_task_of_another_version_is_refused() -> None:
    (row,) = rows("sums", {}, seed=3, size=1)
    with pytest.raises(ToolFailure, match="another one than when the row was written") as caught:
        ReasoningGym("sums", {"most": 2}).reset(index=0, seed=3, digest=row["digest"])
    assert caught.value.code == "tool_row_changed"


@pytest.mark.parametrize(("generator", "settings"), [("products", {}), ("sums", {"least": 1})])
def test_a_generator_that_does_not_fit_is_refused_at_the_start(generator: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserInputError, match=r"^reasoningGym: "):
        ReasoningGym.start_service(generator, settings)


@pytest.fixture
def list_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[Any]]]:
    """Exit status and rows of the program that lists tasks of a generator."""

    def run(generator: str, size: int, *, transcripts: bool) -> tuple[int, list[Any]]:
        out = tmp_path / "rows.jsonl"
        request = {"generator": generator, "settings": {}, "seed": 3, "size": size, "transcripts": transcripts}
        monkeypatch.setattr(sys, "argv", ["listing", "--out", str(out)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
        status = listing.main()
        return status, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    return run


def test_solved_conversations_have_the_questions_of_the_tasks(list_tasks: Callable[..., tuple[int, list[Any]]]) -> None:
    (_, tasks), (_, solved) = list_tasks("sums", 2, transcripts=False), list_tasks("sums", 2, transcripts=True)
    conversations = [[(message["role"], message["content"]) for message in row["messages"]] for row in solved]
    assert conversations == [
        [("user", tasks[0]["prompt"]), ("assistant", "3")],
        [("user", tasks[1]["prompt"]), ("assistant", "5")],
    ]


def test_a_task_without_an_answer_of_its_own_has_no_solved_conversation(
    list_tasks: Callable[..., tuple[int, list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Sums, "__getitem__", lambda self, index: {"question": "Any?", "answer": None})
    assert list_tasks("sums", 2, transcripts=True) == (2, [])
    assert "sums: task 0 names no answer" in capsys.readouterr().err


def words_api(tasks: list[dict[str, Any]]) -> Callable[[str, str, Any], Any]:
    """The Task API of a server with one split: what a route answers."""

    def answer(method: str, path: str, body: Any) -> Any:
        match method, path:
            case "GET", "/list_environments":
                return ["WordEnvironment"]
            case "GET", "/WordEnvironment/splits":
                return [{"name": "words", "type": "validation"}]
            case "POST", "/WordEnvironment/num_tasks":
                return {"num_tasks": len(tasks)}
            case "POST", "/WordEnvironment/task_range":
                return {"tasks": tasks[body["start"] : body["stop"]]}
            case "POST", "/WordEnvironment/task":
                return {"task": tasks[body["index"]]}
            case "GET", "/schema":
                return SCHEMA
            case _:
                return None

    return answer


@contextmanager
def http_server(answer: Callable[[str, str, Any], Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            content = answer(self.command, self.path, json.loads(body) if body else None)
            self.send_response(HTTPStatus.NOT_IMPLEMENTED if content is None else HTTPStatus.OK)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        do_POST = do_GET  # noqa: N815 - as the standard library names it

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as above
            """Writes no log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
            thread.join()


def test_tasks_of_a_server_of_openenv_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrl_tools.environments.openenv_tasks.PAGE", 2)
    tasks: list[dict[str, Any]] = [{"word": word} for word in ("lamp", "chair", "table")]
    with http_server(words_api(tasks)) as url:
        listed = list(openenv_tasks.rows(url, split=None, size=None))
        assert [row["id"] for row in listed] == ["words-0", "words-1", "words-2"]
        assert listed[2]["reset"] == {"split": "words", "index": 2}
        assert [row["task"] for row in listed] == tasks
        assert len(list(openenv_tasks.rows(url, split="words", size=1))) == 1
        with pytest.raises(ValueError, match="has no split test; its splits: words"):
            list(openenv_tasks.rows(url, split="test", size=None))
        out = tmp_path / "rows.jsonl"
        written = CliRunner().invoke(app, ["data", "openenv", url, "--out", str(out), "--size", "2"])
        assert written.exit_code == 0, written.output
        assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["words-0", "words-1"]
        OpenEnv.start_service(url, None)
        tasks[1] = {"word": "stool"}
        row = {name: listed[1][name] for name in ("reset", "digest")}
        with pytest.raises(ToolFailure, match="task 1 of words is another one than when the row was written") as caught:
            OpenEnv(url, None).reset(**row)
        assert caught.value.code == "tool_row_changed"


def test_a_server_of_openenv_without_tasks_is_refused(tmp_path: Path) -> None:
    def answer(method: str, path: str, body: Any) -> Any:
        return {"/list_environments": ["Echo"], "/schema": SCHEMA}.get(path)

    out = tmp_path / "rows.jsonl"
    with http_server(answer) as url:
        refused = CliRunner().invoke(app, ["data", "openenv", url, "--out", str(out)])
    assert isinstance(refused.exception, UserInputError)
    assert "its tasks cannot be listed: the server offers no tasks" in str(refused.exception)
    assert not out.exists()


@pytest.mark.parametrize("listed", [("reasoning-gym", "chain_sum"), ("verifiers", "words"), ("openenv", "words:app")])
def test_tasks_are_listed_in_the_python_that_the_manifest_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: tuple[str, str]
) -> None:
    made: list[EnvironmentPython] = []

    def interpreter(environment: Environment, *, field: str) -> str:
        made.append(environment.python)
        raise UserInputError("no interpreter is made here")

    monkeypatch.setattr(data, "interpreter_of", interpreter)
    options = ["--package", "words==1.2", "--out", str(tmp_path / "rows.jsonl")]
    CliRunner().invoke(app, ["data", *listed, *options, "--python", "3.12"])
    assert made == [EnvironmentPython(requirements=["words==1.2"], version="3.12")]
    refused = CliRunner().invoke(app, ["data", *listed, *options, "--python", "3.4"])
    assert "python.version" in str(refused.exception)


@pytest.fixture
def server() -> Iterator[str]:
    """URL of a server whose episodes end with the word lamp."""

    def schema(connection: ServerConnection, request: Request) -> Response | None:
        return connection.respond(HTTPStatus.OK, json.dumps(SCHEMA)) if request.path == "/schema" else None

    def play(connection: ServerConnection) -> None:
        for message in map(json.loads, connection):
            data, word = message.get("data", {}), message.get("data", {}).get("word")
            if message["type"] == "close":
                return
            if message["type"] == "step" and word is None:
                error = {"code": "VALIDATION_ERROR", "errors": [{"loc": ["word"], "msg": "Field required"}]}
                connection.send(json.dumps({"type": "error", "data": error}))
                continue
            text = f"seed {data.get('seed')}" if message["type"] == "reset" else "heard"
            right = word == "lamp"
            content = {"observation": {"text": text}, "reward": float(right) if word else None, "done": right}
            connection.send(json.dumps({"type": "observation", "data": content}))

    with serve(play, "127.0.0.1", 0, process_request=schema) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()
        thread.join()


def test_a_server_of_openenv_is_played_and_its_rewards_are_summed(server: str) -> None:
    OpenEnv.start_service(server, None)
    episode = OpenEnv(server, None)
    assert episode.reset(reset={"seed": 7}) == "seed 7"
    assert (episode.act("chair").text, episode.get_reward()) == ("heard", 0.0)
    with pytest.raises(ToolError, match="Field required"):
        episode.act('{"wrod": "x"}')
    last = episode.act('{"word": "lamp"}')
    assert (last.final, episode.get_reward()) == (True, 1.0)
    episode.close()


def test_what_does_not_answer_as_openenv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrl_tools.environments.openenv.REQUEST_SECONDS", 0.3)
    with pytest.raises(UserInputError, match="/schema does not answer as OpenEnv's does"):
        OpenEnv.start_service("http://127.0.0.1:1", None)


def test_a_lost_server_is_a_failure_that_another_attempt_may_not_meet(server: str) -> None:
    OpenEnv.start_service(server, None)
    episode = OpenEnv(server, None)
    episode.reset()
    episode._socket.close()
    with pytest.raises(ToolFailure, match="the server did not answer a step") as caught:
        episode.act("lamp")
    assert (caught.value.code, caught.value.retryable) == ("tool_server_lost", True)
    episode.close()
