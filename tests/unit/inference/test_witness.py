"""The witness inside SGLang's server: the table of loads and unloads, what it refuses, and whom it names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from kestrl.engines import POLICY_HEADER, Generate, Request
from kestrl.engines.sglang import Sglang
from kestrl_inference.inside import witness
from kestrl_inference.inside.witness import PolicyWitness

DIALECT = Sglang()
VOCABULARY = 320
JOB = "email-search-7.12"


class Server:
    """What lies behind: it serves every name, as SGLang does, until `gate` is cleared."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, Any]] = []
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.reached.append((scope["path"], json.loads(message["body"]) if message["body"] else None))
        self.arrived.set()
        if scope["path"] == "/generate":
            await self.gate.wait()
        headers = [(b"content-type", b"application/json"), (b"X-Kestrl-Policy", b"forged")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


class Answer:
    """Status, body and stamp of an answer."""

    def __init__(self, sent: list[Any]) -> None:
        self.status: int = sent[0]["status"]
        self.body = json.loads(b"".join(message.get("body", b"") for message in sent))
        self.stamps = [value.decode() for name, value in sent[0]["headers"] if name.lower() == witness.HEADER]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def app(server: Server) -> PolicyWitness:
    return PolicyWitness(server, base=lambda: "base", vocabulary=lambda: VOCABULARY)


async def ask(app: PolicyWitness, request: Request, *parts: bytes, begun: asyncio.Event | None = None) -> Answer:
    """Sends a request, perhaps with its body in other parts."""
    bodies = list(parts or (request.body,))
    sent: list[Any] = []

    async def receive() -> Any:
        if begun is not None:
            begun.set()
        return {"type": "http.request", "body": bodies.pop(0), "more_body": bool(bodies)}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": request.method, "path": request.path, "headers": []}, receive, send)
    return Answer(sent)


def turn(policy: str, ids: tuple[int, ...] = (5, 6)) -> Request:
    return DIALECT.generate(
        Generate(id="a", policy=policy, prompt_ids=ids, temperature=1.0, max_tokens=4, seed=1, stop_token_ids=())
    )


def chat(**fields: Any) -> Request:
    return Request("POST", "/v1/chat/completions", json.dumps({"messages": [], **fields}).encode())


def posted(**fields: Any) -> Request:
    return Request("POST", "/generate", json.dumps(fields).encode())


async def test_the_base_model_needs_no_adapter_and_is_named(app: PolicyWitness, server: Server) -> None:
    answer = await ask(app, turn("base"))
    assert (answer.status, answer.stamps) == (200, ["base"])
    assert server.reached[0][1]["lora_path"] is None
    scores = await ask(app, DIALECT.score("base", [5, 6]))
    assert (scores.status, scores.stamps) == (200, ["base"])


async def test_an_adapter_is_served_from_its_load_to_its_unload(app: PolicyWitness, server: Server) -> None:
    before = await ask(app, turn(JOB))
    assert (before.status, before.stamps) == (404, [])
    assert DIALECT.is_unknown_adapter(before.status, json.dumps(before.body).encode())
    assert server.reached == []
    assert (await ask(app, DIALECT.load(JOB, "/adapters/12"))).status == 200
    loaded = await ask(app, turn(JOB))
    assert (loaded.status, loaded.stamps) == (200, [JOB])
    assert (await ask(app, DIALECT.unload(JOB))).status == 200
    after = await ask(app, turn(JOB))
    assert (after.status, after.stamps) == (404, [])
    assert [path for path, _ in server.reached] == ["/load_lora_adapter", "/generate", "/unload_lora_adapter"]


async def test_a_refused_load_adds_no_name(app: PolicyWitness, server: Server) -> None:
    server.status = 400
    assert (await ask(app, DIALECT.load(JOB, "/adapters/12"))).status == 400
    server.status = 200
    assert (await ask(app, turn(JOB))).status == 404


async def test_an_answer_with_an_error_names_no_policy(app: PolicyWitness, server: Server) -> None:
    server.status = 400
    assert (await ask(app, turn("base"))).stamps == []


async def test_an_unload_ends_the_name_first_and_waits_for_its_requests(app: PolicyWitness, server: Server) -> None:
    await ask(app, DIALECT.load(JOB, "/adapters/12"))
    server.gate.clear()
    server.arrived.clear()
    running = asyncio.create_task(ask(app, turn(JOB)))
    await server.arrived.wait()
    begun = asyncio.Event()
    unloading = asyncio.create_task(ask(app, DIALECT.unload(JOB), begun=begun))
    await begun.wait()
    assert (await ask(app, turn(JOB))).status == 404
    assert (await ask(app, DIALECT.load(JOB, "/adapters/13"))).status == 409
    assert not unloading.done()
    assert server.reached[-1][0] == "/generate"
    server.gate.set()
    assert (await running).stamps == [JOB]
    assert (await unloading).status == 200
    assert server.reached[-1][0] == "/unload_lora_adapter"


@pytest.mark.parametrize(
    ("request_", "status", "why"),
    [
        (posted(input_ids=[1], lora_id="x"), 400, "'lora_id' is not allowed"),
        (posted(input_ids=[1], lora_path=[JOB]), 400, "the name of the adapter"),
        (posted(input_ids=[1], lora_path="a\r\nx-kestrl-policy: b"), 400, "the name of the adapter"),
        (posted(input_ids=[[1], [2]]), 400, "one list of token ids"),
        (posted(input_ids=[]), 400, "one list of token ids"),
        (posted(input_ids=[True]), 400, "one list of token ids"),
        (posted(input_ids=[1.0]), 400, "one list of token ids"),
        (posted(text="hello"), 400, "'text' is not allowed"),
        (posted(input_ids=[VOCABULARY]), 400, "from 0 to 319"),
        (posted(input_ids=[3, -1]), 400, "from 0 to 319"),
        (Request("POST", "/generate", b"{"), 400, "not JSON"),
        (Request("POST", "/generate", b"[" * 100_000), 400, "not JSON"),
        (Request("POST", "/generate", b"[]"), 400, "not a JSON object"),
        (chat(model="base:unloaded"), 404, "the adapter unloaded is not loaded"),
        (chat(model=JOB), 404, "write base or base:ADAPTER"),
        (chat(), 404, "write base or base:ADAPTER"),
        (chat(model="base", lora_path=JOB), 400, "in the field model"),
        (chat(model="base", prompt=[10**9]), 400, "token ids are for /generate"),
        (DIALECT.load("base", "/a"), 400, "not the base model's"),
        (DIALECT.load("a b", "/a"), 400, "letters, digits"),
        (DIALECT.unload(""), 400, "letters, digits"),
    ],
)
async def test_what_could_be_given_to_another_policy_is_refused(
    app: PolicyWitness, server: Server, request_: Request, status: int, why: str
) -> None:
    answer = await ask(app, request_)
    assert (answer.status, answer.stamps) == (status, [])
    assert why in answer.body["error"]["message"]
    assert server.reached == []


@pytest.mark.parametrize(("model", "stamp"), [("base", "base"), (f"base:{JOB}", JOB)])
async def test_a_chat_names_its_policy(app: PolicyWitness, model: str, stamp: str) -> None:
    await ask(app, DIALECT.load(JOB, "/adapters/12"))
    assert (await ask(app, chat(model=model))).stamps == [stamp]


async def test_a_body_in_parts_arrives_whole_and_a_long_one_does_not(
    app: PolicyWitness, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = turn("base")
    assert (await ask(app, request, request.body[:9], b"", request.body[9:])).status == 200
    assert server.reached[0][1] == json.loads(request.body)
    monkeypatch.setattr(witness, "LARGEST", 100)
    assert (await ask(app, request)).status == 413


async def test_other_routes_pass_unchanged(app: PolicyWitness, server: Server) -> None:
    answer = await ask(app, Request("GET", "/v1/models"))
    assert (answer.status, answer.stamps) == (200, ["forged"])  # no reader of this route looks at the header


def test_the_names_of_the_header_are_one() -> None:
    assert witness.HEADER.decode() == POLICY_HEADER


def test_the_dialect_sends_only_what_the_witness_allows() -> None:
    for request in (turn(JOB), DIALECT.score(JOB, [1, 2])):
        body: Mapping[str, Any] = json.loads(request.body)
        assert set(body) <= witness.FIELDS
        assert witness.call_of_generate(body, "base", VOCABULARY).adapter == JOB
