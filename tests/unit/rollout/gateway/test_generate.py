"""The face for clients that own their tokens, over real HTTP, beside the loop that serves the episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.fakes.engine import Completion, Fault, Prompt

from kestrl.agents import Endpoint
from kestrl.engines import Generate
from kestrl.engines.registry import DIALECTS
from kestrl.episode import Episode
from kestrl.errors import Boundary
from kestrl_rollout.engine.client import EngineAddress, EngineClient
from kestrl_rollout.gateway.opened import _Running


class Client:
    """A program that samples through an endpoint."""

    def __init__(self, endpoint: Endpoint, http: aiohttp.ClientSession) -> None:
        self.endpoint, self.http = endpoint, http
        self.root = endpoint.base_url.removesuffix("/v1")

    async def send(
        self, token_ids: Any, *, key: str | None = None, headers: dict[str, str] | None = None, **changes: Any
    ) -> tuple[int, Any, Any]:
        """Status, JSON and headers of a generate call."""
        body = {"model": "policy", "token_ids": token_ids, "sampling_params": changes.pop("sampling", {}), **changes}
        sent = {"authorization": f"Bearer {key or self.endpoint.api_key}"} if headers is None or key else {}
        async with self.http.post(
            f"{self.root}/inference/v1/generate", json=body, headers={**sent, **(headers or {})}
        ) as response:
            return response.status, await response.json(), response.headers

    async def ids(self, token_ids: Any, **options: Any) -> list[int]:
        status, answer, _ = await self.send(token_ids, **options)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    def retrying(self, count: int) -> dict[str, str]:
        return {"authorization": f"Bearer {self.endpoint.api_key}", "x-stainless-retry-count": str(count)}


@pytest.fixture
async def serve(served: Callable[..., Any]) -> AsyncIterator[Callable[..., Any]]:
    """Runs an episode whose loop serves it; gives its client, and a way to its end."""
    async with aiohttp.ClientSession() as http:

        @asynccontextmanager
        async def serving(**changes: Any) -> AsyncIterator[tuple[Any, Client, Callable[[], Awaitable[Episode]]]]:
            async with served(**changes) as (stage, endpoint, end):
                yield stage, Client(endpoint, http), end

        yield serving


async def test_what_a_client_samples_is_what_is_trained(serve: Any) -> None:
    async with serve() as (stage, client, end):
        first = await client.ids([1, 2], sampling={"max_tokens": 4, "logprobs": 1, "stop_token_ids": [7]})
        second = await client.ids([1, 2, *first, 3], sampling={"max_tokens": 4})
        other = await client.ids([9], sampling={"max_tokens": 4})
        episode = await end()
        assert episode.failure is None
        assert [list(row.token_ids) for row in episode.rows] == [[1, 2, *first, 3, *second], [9, *other]]
        assert [turn.row for turn in episode.turns] == [0, 0, 1]
        assert episode.main_row == 0
        assert stage.engine.prompts[0].sampling["stop_token_ids"] == [258, 7]


async def test_the_face_is_vllms(serve: Any) -> None:
    """The worker's own client of vLLM reads what the gateway answers."""
    async with serve() as (_, client, end):
        request = Generate(
            id="x", policy="base", prompt_ids=[1, 2], temperature=1.0, max_tokens=5, seed=3, stop_token_ids=[4]
        )
        async with EngineClient(client.endpoint.api_key, DIALECTS["vllm"]) as vllm:
            sampled = await vllm.generate(EngineAddress(name="gateway", url=client.root), request)
        status, answer, _ = await client.send([5], sampling={"max_tokens": 3})
        async with client.http.get(
            f"{client.endpoint.base_url}/models", headers={"x-api-key": client.endpoint.api_key}
        ) as response:
            models = await response.json()
        episode = await end()
    assert list(episode.rows[0].token_ids) == [1, 2, *sampled.token_ids]
    assert list(episode.rows[0].logprobs[2:]) == pytest.approx(sampled.logprobs, abs=1e-6)
    assert status == 200
    tokens = answer["choices"][0]["token_ids"]
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == [
        f"token_id:{token}" for token in tokens
    ]
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": len(tokens), "total_tokens": 1 + len(tokens)}
    assert models["data"][0]["max_model_len"] == 4096


async def test_calls_and_final_text_are_the_jobs_to_read(serve: Any, call_text: Any) -> None:
    """Rules and judges read the same of a client that owns its tokens: each call, malformed ones too, and the text."""
    async with serve(sampling={"max_turns": 9, "max_tokens": 3000}) as (stage, client, end):
        stage.says(
            call_text("search", word="kestrel") + call_text("lift", x=1) + '<tool_call>{"name": "sea</tool_call>',
            call_text("search", word="falcon"),
            "A falcon.",
        )
        stage.tools.handlers["search"] = lambda arguments: f"found {arguments['word']}"
        row: list[int] = []
        for _ in range(3):
            row += stage.ids("<|im_start|>assistant\n")
            row += await client.ids(row)
        answer = await mcp_call(client, "search", {"word": "falcon"})
        episode = await end()
    assert answer["content"][0]["text"] == "found falcon"
    assert [(call.turn, call.name, call.outcome) for call in episode.tool_calls] == [
        (0, "search", "unanswered"),
        (0, "lift", "unanswered"),  # a tool of the client's own for all that is known here
        (0, "", "invalid_json"),
        (1, "search", "ok"),
    ]
    assert episode.tool_calls[0].arguments == {"word": "kestrel"}
    assert (episode.tool_calls[3].text, episode.final_text) == ("found falcon", "A falcon.")
    assert episode.metrics["tool_errors.invalid_json"] == 1
    assert not {"tool_results_not_shown", "tool_calls_by_agent"} & episode.metrics.keys()


async def test_a_turn_ends_before_the_clients_stop_token(serve: Any, call_text: Any) -> None:
    async with serve() as (stage, client, end):
        stage.says(call_text("search", word="kestrel"))
        said = await client.ids([1], sampling={"stop_token_ids": [7]})
        stage.engine.script = lambda prompt: Completion(token_ids=[*said[:-1], 7])
        assert await client.ids([2], sampling={"stop_token_ids": [7]}) == [*said[:-1], 7]
        episode = await end()
    assert [call.arguments for call in episode.tool_calls] == [{"word": "kestrel"}] * 2
    assert episode.turns[0].text == episode.turns[1].text


async def mcp_call(client: Client, name: str, arguments: dict[str, Any]) -> Any:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
    headers = {"authorization": f"Bearer {client.endpoint.api_key}"}
    async with client.http.post(client.endpoint.mcp_url, json=message, headers=headers) as response:
        return (await response.json())["result"]


async def test_a_key_opens_its_own_episode_until_its_end(serve: Any) -> None:
    async with serve() as (stage, client, end), serve() as (_, other, _end):
        key, prompt = client.endpoint.api_key, [1]
        refused = [
            {"headers": {}},
            {"key": "wrong"},
            {"key": other.endpoint.api_key},
            {"key": key, "headers": {"x-api-key": other.endpoint.api_key}},
            {"headers": {"authorization": key}},
            {"headers": {"authorization": "Bearer "}},
        ]
        for options in refused:
            status, answer, _ = await client.send(prompt, **options)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), options
        for header in ("x-api-key", "x-goog-api-key"):
            assert (await client.send(prompt, headers={header: key}, sampling={"max_tokens": 2}))[0] == 200
        for path in ("reward", "v1/completions", "inference/v1/generate/../../v1/load_lora_adapter", ""):
            async with client.http.post(f"{client.root}/{path}", headers={"x-api-key": key}) as response:
                assert response.status in (401, 404), path
        assert len(stage.engine.prompts) == 2
        assert (await end()).failure is None
        status, answer, headers = await client.send(prompt)
        assert (status, answer["error"]["code"], headers["x-should-retry"]) == (410, "episode_over", "false")
        assert (await client.send(prompt, key="wrong"))[0] == 401
        assert (await other.send(prompt))[0] == 200
    assert key not in repr(client.endpoint)


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"sampling": {"n": 2}}, "sampling_params.n", "unsupported_parameter"),
        ({"sampling": {"n": True}}, "sampling_params.n", "unsupported_parameter"),
        ({"sampling": {"logit_bias": {"5": 1}}}, "sampling_params.logit_bias", "unsupported_parameter"),
        ({"sampling": {"stop": ["x"]}}, "sampling_params.stop", "unsupported_parameter"),
        ({"sampling": {"structured_outputs": {}}}, "sampling_params.structured_outputs", "unsupported_parameter"),
        (
            {"sampling": {"truncate_prompt_tokens": 5}},
            "sampling_params.truncate_prompt_tokens",
            "unsupported_parameter",
        ),
        ({"sampling": {"min_tokens": 5}}, "sampling_params.min_tokens", "unsupported_parameter"),
        ({"sampling": {"new_sampler": 1}}, "sampling_params.new_sampler", "unsupported_parameter"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"features": {}}, "features", "unsupported_parameter"),
        ({"sampling": []}, "sampling_params", "invalid_value"),
        ({"sampling": [1]}, "sampling_params", "invalid_value"),
        ({"sampling": {"max_tokens": 0}}, "sampling_params.max_tokens", "invalid_value"),
        ({"sampling": {"max_tokens": "5"}}, "sampling_params.max_tokens", "invalid_value"),
        ({"sampling": {"stop_token_ids": [-1]}}, "sampling_params.stop_token_ids", "invalid_value"),
        ({"token_ids": []}, "token_ids", "invalid_value"),
        ({"token_ids": [10**6]}, "token_ids", "invalid_value"),
        ({"token_ids": [1.0]}, "token_ids", "invalid_value"),
        ({"token_ids": None}, "token_ids", "invalid_value"),
        ({"token_ids": [1] * 4096}, "token_ids", "context_length_exceeded"),
    ],
)
async def test_a_field_that_would_change_the_sample_is_refused_by_name(
    serve: Any, changes: dict[str, Any], field: str, code: str
) -> None:
    async with serve() as (stage, client, end):
        status, answer, _ = await client.send(**{"token_ids": [1], **changes})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, field, code)
        assert stage.engine.prompts == []
        # The client can go on.
        assert (await client.send([1], sampling={"max_tokens": 2}))[0] == 200
        assert (await end()).failure is None


async def test_sampling_is_the_jobs(serve: Any) -> None:
    async with serve(sampling={"max_tokens": 30, "temperature": 1.0}) as (stage, client, end):
        asked = {"temperature": 0.0, "top_p": 0.5, "top_k": -1, "seed": 1, "max_tokens": 10**6, "n": 1}
        await client.ids([1], sampling=asked)
        episode = await end()
        (prompt,) = stage.engine.prompts
        assert {name: prompt.sampling[name] for name in ("temperature", "top_p", "top_k", "max_tokens")} == {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": 30,
        }
        assert prompt.sampling["seed"] != 1
        forced = {name: value for name, value in episode.metrics.items() if name.startswith("sampling_forced.")}
        assert forced == {"sampling_forced.temperature": 1.0, "sampling_forced.top_p": 1.0}


async def test_a_retry_gets_the_answer_again(serve: Any) -> None:
    async with serve() as (stage, client, end):
        first = await client.send([1], sampling={"max_tokens": 4})
        again = await client.send([1], sampling={"max_tokens": 4}, headers=client.retrying(1))
        assert again[1] == first[1]
        assert len(stage.engine.prompts) == 1
        await client.send([1], sampling={"max_tokens": 4}, headers=client.retrying(0))
        await client.send([1], sampling={"max_tokens": 5}, headers=client.retrying(2))  # the lost one never arrived
        episode = await end()
        assert episode.num_turns == len(stage.engine.prompts) == 3
        assert len({turn.seed for turn in episode.turns}) == 3


async def test_answers_for_retries_are_bounded(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrl_rollout.gateway.opened.ANSWER_BYTES", 1000)
    async with serve() as (stage, client, end):
        for number in range(4):
            await client.send([number], sampling={"max_tokens": 4})
        (opened,) = stage.groups._episodes._gateway._episodes.values()
        assert sum(map(len, opened._answers.values())) == opened._answer_bytes <= 1000
        for number in (3, 0):  # the newest is there, the oldest is sampled anew
            await client.send([number], sampling={"max_tokens": 4}, headers=client.retrying(1))
        assert (await end()).num_turns == len(stage.engine.prompts) == 5


async def test_a_retry_of_a_call_in_flight_waits_for_it(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, left = asyncio.Event(), asyncio.Event()

    def count(running: Any, clients: int) -> None:
        counts[id(running)] = clients
        (joined if clients == 2 else left if joined.is_set() else asyncio.Event()).set()

    counts: dict[int, int] = {}
    monkeypatch.setattr(_Running, "clients", property(lambda running: counts.get(id(running), 0), count))
    async with serve() as (stage, client, end):
        gate, asked = asyncio.Event(), asyncio.Event()

        def script(prompt: Prompt) -> Completion:
            asked.set()
            return Completion(token_ids=[5, 6], after=gate)

        stage.engine.script = script
        first = asyncio.create_task(client.send([1]))
        await asked.wait()
        second = asyncio.create_task(client.send([1], headers=client.retrying(1)))
        await joined.wait()
        first.cancel()  # the client's first connection is lost
        await left.wait()
        gate.set()
        status, answer, _ = await second
        assert (status, answer["choices"][0]["token_ids"]) == (200, [5, 6])
        assert (await end()).num_turns == len(stage.engine.prompts) == 1


async def test_a_call_whose_client_is_gone_is_aborted_and_not_trained(serve: Any) -> None:
    async with serve() as (stage, client, end):
        gate, asked, aborted = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def script(prompt: Prompt) -> Completion:
            if list(prompt.token_ids) != [1]:
                return Completion(token_ids=[5])
            asked.set()
            try:
                await gate.wait()
            except asyncio.CancelledError:
                aborted.set()
                raise
            return Completion(token_ids=[6])

        stage.engine.script = script
        call = asyncio.create_task(client.send([1]))
        await asked.wait()
        call.cancel()
        await aborted.wait()
        assert await client.ids([2]) == [5]
        episode = await end()
        assert episode.failure is None
        assert [list(row.token_ids) for row in episode.rows] == [[2, 5]]


async def test_calls_in_flight_end_with_the_episode(serve: Any) -> None:
    async with serve() as (stage, client, end):
        gate, asked = asyncio.Event(), asyncio.Event()

        def script(prompt: Prompt) -> Completion:
            asked.set()
            return Completion(token_ids=[5], after=gate)

        stage.engine.script = script
        call = asyncio.create_task(client.send([1]))
        await asked.wait()
        episode = await end()
        status, answer, _ = await call
        assert (status, answer["error"]["code"]) == (410, "episode_over")
        assert (episode.failure, list(episode.rows)) == (None, [])
        gate.set()


async def test_the_end_of_the_budget_is_an_error_that_a_client_can_act_on(serve: Any) -> None:
    async with serve(sampling={"max_turns": 2}) as (_, client, end):
        statuses = [(await client.send([number], sampling={"max_tokens": 2}))[0] for number in range(3)]
        status, answer, _ = await client.send([1])
        episode = await end()
    assert statuses == [200, 200, 400]
    assert (status, answer["error"]["code"]) == (400, "limit_reached")
    assert (episode.failure, episode.stop_reason) == (None, "max_turns")


async def test_a_failure_of_the_engine_is_the_episodes_whatever_the_client_does(serve: Any) -> None:
    async with serve() as (stage, client, end):
        stage.engine.script = lambda prompt: Fault(status=500)
        status, answer, headers = await client.send([1])
        assert (status, answer["error"]["code"], headers["x-should-retry"]) == (500, "engine/engine_error", "false")
        episode = await end()
    assert episode.failure is not None
    assert episode.failure.boundary is Boundary.ENGINE


async def test_calls_at_once_share_the_budget(serve: Any) -> None:
    async with serve(sampling={"max_tokens": 40, "max_turns": 100}) as (stage, client, end):
        stage.engine.script = lambda prompt: Completion(token_ids=[5] * 9)
        answers = await asyncio.gather(*(client.send([number], sampling={"max_tokens": 6}) for number in range(20)))
        assert sorted({status for status, *_ in answers}) == [200, 400]
        episode = await end()
        assert episode.failure is None
        assert episode.sampled_tokens == 40
        assert len({turn.seed for turn in episode.turns}) == episode.num_turns


async def test_a_body_that_is_no_request_is_refused(serve: Any) -> None:
    async with serve() as (_, client, end):
        for body in (b"", b"{", b"[" * 100_000, b"[1]", json.dumps("x").encode(), b"\xff"):
            async with client.http.post(
                f"{client.root}/inference/v1/generate", data=body, headers={"x-api-key": client.endpoint.api_key}
            ) as response:
                assert response.status == 400
                assert (await response.json())["error"]["code"] == "invalid_json"
        assert (await end()).failure is None
