"""`kestrl bench` with a model behind a real HTTP endpoint, the job's real tools and judge, and no engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
from tests.fakes.chat_model import ScriptedChat
from tests.unit.app.cli.test_commands import ROOT, kestrl

from kestrl._app.cli.evaluations import candidates
from kestrl.errors import UserInputError

pytestmark = pytest.mark.share

BENCH = ROOT / "examples/email-search/bench.yaml"
SMALL = ("--set", "data.validation.size=6", "--set", "data.train.size=2", "--set", "rollout.concurrency=3")


def good(request: Mapping[str, Any]) -> dict[str, Any]:
    """A model that searches for what the question names, reads the first mail and answers with its day."""
    messages = request["messages"]
    results = [message for message in messages if message["role"] == "tool"]
    words = messages[1]["content"].replace("?", " ").replace(",", " ").split()
    if not results:
        names = [word for word in words[1:] if word[0].isupper()]
        return {"tool_calls": [("search_emails", {"keywords": names[-1:]})]}
    if len(results) == 1:
        found = json.loads(results[0]["content"])
        return {"tool_calls": [("read_email", {"message_id": found[0]["message_id"] if found else "none"})]}
    mail = results[1]["content"]
    source = json.loads(mail)["message_id"] if mail.startswith("{") else "none"
    return {"tool_calls": [("return_final_answer", {"answer": "Monday", "sources": [source]})]}


def clumsy(request: Mapping[str, Any]) -> dict[str, Any] | int:
    """A model that calls wrongly, and an endpoint that fails for one question."""
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    if turn == 0 and "cost" in request["messages"][1]["content"]:
        return 400
    calls: list[tuple[str, Any]] = [
        ("search_emails", "{not json"),
        ("delete_all", {}),
        ("search_emails", {"keywords": 3}),
    ]
    return {"tool_calls": [calls[turn]]} if turn < len(calls) else {"content": "I give up."}


def run_bench(chat: ScriptedChat, runs: Path, model: str, *options: str) -> tuple[str, dict[str, float]]:
    arguments = ("bench", BENCH, "--models", f"openai:{model}", "--endpoint", chat.url, "--runs", runs, *SMALL)
    printed = kestrl(*arguments, *options, OPENAI_API_KEY="secret-key")
    (kept,) = (runs / "benchmarks").glob("email-bench-*.json")
    (entry,) = json.loads(kept.read_text())
    assert entry["label"] == f"openai:{model}"
    return printed, entry["means"]


def test_a_model_behind_an_endpoint_uses_the_jobs_tools_and_rewards(tmp_path: Path):
    with ScriptedChat(good) as chat:
        printed, means = run_bench(chat, tmp_path, "org/model", "--details")
        assert chat.keys == {"Bearer secret-key"}
        first = chat.requests[0]
    assert {tool["function"]["name"] for tool in first["tools"]} == {
        "search_emails",
        "read_email",
        "return_final_answer",
    }
    assert (first["model"], first["temperature"], first["max_completion_tokens"]) == ("org/model", 0, 512)
    assert means["episodes"] == 6
    assert means["exceptions"] == 0
    assert means["num_turns"] == 3
    assert means["attempted_answer"] == 1
    assert means["completion_tokens"] == 30
    assert "openai:org/model" in printed
    assert "ground truth: " in printed
    assert printed.count("search_emails") >= 6, "--details shows every conversation"


def test_bad_calls_are_counted_and_failures_of_the_endpoint_are_never_scored(tmp_path: Path):
    with ScriptedChat(clumsy) as chat:
        printed, means = run_bench(chat, tmp_path, "clumsy", "--temperature", "-1", "--sequential")
        assert not {"temperature", "top_p"} & set(chat.requests[0])
        refused = sum("cost" in str(request["messages"][1]) for request in chat.requests)
    assert 0 < refused < 6
    assert means["exceptions"] == means["exceptions_engine"] == refused
    assert "1 sample at the model's own temperature" in " ".join(printed.split())
    assert f"engine/endpoint_refused {refused}" in printed
    for name in ("cant_parse_tool_call", "bad_tool_call_name", "bad_tool_call_args"):
        assert means[name] == 1
    assert means["attempted_answer"] == 0


def test_samples_have_estimates_and_repeated_requests_are_counted(tmp_path: Path):
    lock, answers = Lock(), Counter[str]()

    def sampled(request: Mapping[str, Any]) -> dict[str, Any] | int:
        """A model whose endpoint fails once, and that then answers every second time."""
        with lock:
            question = request["messages"][1]["content"]
            answers["all"] += 1
            if answers["all"] == 1:
                return 500
            answers[question] += 1
            even = answers[question] % 2 == 0
        final = {"answer": "Monday", "sources": []}
        return {"tool_calls": [("return_final_answer", final)]} if even else {"content": "no"}

    options = ("--samples", "4", "--temperature", "0.7", "--top-p", "0.8")
    with ScriptedChat(sampled) as chat:
        printed, means = run_bench(chat, tmp_path, "sampled", *options)
        assert {(request["temperature"], request["top_p"]) for request in chat.requests} == {(0.7, 0.8)}
        assert len(chat.requests) == 25, "four samples of six questions, and one repetition"
    assert "held-out, 4 samples at temperature 0.7, top-p 0.8" in " ".join(printed.split())
    assert {"mean@4", "pass@2", "pass@4", "best@4", "num_turns"} <= set(means)
    assert (means["episodes"], means["exceptions"], means["attempted_answer"]) == (24, 0, 0.5)
    assert means["engine_retries"] == pytest.approx(1 / 24)
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("benchmarks/*/summary.json"))
    assert (summary["sampling"]["samples"], summary["sampling"]["top_p"]) == (4, 0.8)


def test_a_budget_ends_the_requests_and_the_rest_is_not_scored(tmp_path: Path):
    with ScriptedChat(good) as chat:
        printed, means = run_bench(chat, tmp_path, "dear", "--budget-tokens", "650", "--sequential")
        assert len(chat.requests) == 6, "110 tokens each: two questions of three turns"
    assert means["episodes"] == 6
    assert means["exceptions"] == means["exceptions_engine"] == 4
    assert means["attempted_answer"] == 1
    assert "openai:dear: failures, which are in no mean: engine/budget_used_up 4" in printed


NO_COMPLETIONS = [
    b"[" * 50_000,
    b'{"choices": {"0": 1}}',
    b'{"choices": [{"message": "x"}]}',
    b'{"choices": [{"message": {"content": {"a": ' + b"[" * 200 + b"]" * 200 + b"}}}]}",
    b'{"choices": [{"message": {"content": [1]}}]}',
    b'{"choices": [{"message": {"tool_calls": {"a": 1}}}]}',
    b'{"choices": [{"message": {"tool_calls": [{"function": {"name": 1}}]}}]}',
    b'{"choices": [' + b"{}," * 1_100_000 + b"{}]}",
    b'{"choices": [{"message": {"content": "x", "n": ' + b"9" * 5_000 + b"}}]}",
    b"\xff\xfe",
]


def test_an_answer_that_is_no_completion_is_the_endpoints_failure(tmp_path: Path):
    """The rest is scored: what a server sends ends no run."""
    answers, lock = iter(NO_COMPLETIONS), Lock()

    def answer(_request: Mapping[str, Any]) -> dict[str, Any] | bytes:
        with lock:
            return next(answers, None) or {"content": "I give up."}

    with ScriptedChat(answer) as chat:
        printed, means = run_bench(chat, tmp_path, "odd", "--samples", "2", "--temperature", "1")
    assert means["episodes"] == 12
    assert means["exceptions"] == means["exceptions_engine"] == len(NO_COMPLETIONS)
    assert f"engine/bad_answer {len(NO_COMPLETIONS)}" in printed


def test_what_a_completion_says_is_taken_as_far_as_it_can_be_kept(tmp_path: Path):
    """Surrogates, arguments of any form, thousands of calls, and numbers of tokens that are none."""
    calls = [{"id": 7, "function": {"name": "search_emails", "arguments": {"keywords": 3}}}] * 5_000
    calls[1] = {"id": "x", "function": {"name": "search_emails", "arguments": '{"keywords": NaN}'}}
    odd = {
        "choices": [{"finish_reason": 3, "message": {"content": "\ud800 cut", "tool_calls": calls}}],
        "usage": {"prompt_tokens": -1_000_000, "completion_tokens": True},
    }

    def answer(request: Mapping[str, Any]) -> dict[str, Any] | bytes:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        return {"content": "I give up."} if turn else json.dumps(odd).encode()

    with ScriptedChat(answer) as chat:
        _, means = run_bench(chat, tmp_path, "odd")
        (again, *_) = [request for request in chat.requests if len(request["messages"]) > 2]
    assert (means["episodes"], means["exceptions"], means["num_turns"]) == (6, 0, 2)
    assert means["completion_tokens"] == 10
    said = again["messages"][2]
    assert (said["role"], said["content"], len(said["tool_calls"])) == ("assistant", "? cut", 128)
    assert said["tool_calls"][0]["id"] == "call_0"
    assert "cannot be sent" in again["messages"][4]["content"]


def test_no_more_episodes_run_at_once_than_the_job_says(tmp_path: Path):
    lock, full, running, most = Lock(), Event(), 0, 0

    def counted(_request: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 3:
                full.set()
        full.wait(timeout=30)
        with lock:
            running -= 1
        return {"content": "no"}

    with ScriptedChat(counted) as chat:
        _, means = run_bench(chat, tmp_path, "slow", "--samples", "3", "--temperature", "1")
    assert (means["episodes"], most) == (18, 3)


def test_an_endpoint_that_answers_nothing_fails_the_bench(tmp_path: Path):
    with ScriptedChat(lambda _request: 401) as chat:
        arguments = ("bench", BENCH, "--models", "openai:x", "--endpoint", chat.url, "--runs", tmp_path, *SMALL)
        printed = kestrl(*arguments, code=1, OPENAI_API_KEY="wrong")
    assert "none of 6 episodes was scored; the first failure: " in printed
    assert "HTTP 401" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--models", "gpt-4"), "--models: 'gpt-4' is not one of base, newest, a version such as v12, or openai:NAME"),
        (("--models", "openai:x", "--api-key-env", "NOT_SET_HERE"), "NOT_SET_HERE is not set"),
        (("--models", "v12"), "no run"),
        (("--models", "openai:x", "--top-k", "5", "--temperature", "1"), "endpoints have no such parameter"),
        (("--models", "openai:x", "--samples", "2", "--temperature", "0"), "0 samples the same episode 2 times"),
        (("--models", "base", "--top-p", "0"), "--top-p: 0 leaves no token"),
    ],
)
def test_a_candidate_that_cannot_be_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path):
    assert message in kestrl("bench", BENCH, *arguments, "--runs", tmp_path, code=2)


def test_policies_are_named_once_and_endpoints_only_for_bench():
    assert [item.label for item in candidates("base, v12,newest,base", "--policy")] == ["base", "v12", "newest"]
    with pytest.raises(UserInputError, match="--policy: 'openai:x' is not one of base, newest, a version such as v12"):
        candidates("openai:x", "--policy")
    printed = kestrl("eval", "--policy", "base", "--base", code=2)
    assert "without --step and --base" in printed


def test_candidates_are_beside_each_other_in_one_table(tmp_path: Path):
    with ScriptedChat(lambda request: good(request) if request["model"] == "a" else {"content": "no"}) as chat:
        printed = kestrl(
            *("bench", BENCH, "--models", "openai:a,openai:b", "--endpoint", chat.url, "--runs", tmp_path, *SMALL),
            OPENAI_API_KEY="key",
        )
    (kept,) = (tmp_path / "benchmarks").glob("email-bench-*.json")
    first, second = json.loads(kept.read_text())
    assert (first["means"]["attempted_answer"], second["means"]["attempted_answer"]) == (1, 0)
    (row,) = [line for line in printed.splitlines() if "attempted_answer" in line]
    assert row.split("│")[2].split() == ["1.000", "±0.000"]
    assert row.split("│")[3].split() == ["0.000", "±0.000"]
