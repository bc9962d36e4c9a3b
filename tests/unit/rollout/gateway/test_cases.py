"""The worker's gateway in the public suite of cases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import Completion, Fault, Prompt

from kestrl.api.tools.v1 import tools_pb2
from kestrl.episode import Episode
from kestrl.testing.gateway import CASES, EnginePrompt, Held, Options, Served, Subject, check_gateway

PARTS = 4
PAGE = Path(__file__).parents[4] / "docs" / "gateway.md"


class _Served:
    """An episode of the stage."""

    def __init__(self, stage: Any, endpoint: Any, end: Any, key: str | None, before: int) -> None:
        self._stage, self._end, self._before = stage, end, before
        self.base_url, self.api_key = endpoint.base_url, key or endpoint.api_key
        self._episode: Episode | None = None

    @property
    def prompts(self) -> Sequence[EnginePrompt]:
        return [
            EnginePrompt(token_ids=prompt.token_ids, sampling=prompt.sampling, policy=prompt.model)
            for prompt in self._stage.engine.prompts[self._before :]
        ]

    def says(self, *turns: str) -> None:
        opening = tuple(self.whole("<|im_start|>assistant"))

        def script(prompt: Prompt) -> Completion:
            ids = tuple(prompt.token_ids)  # not text: what a user writes opens no turn
            places = (ids[at : at + len(opening)] for at in range(len(ids)) if ids[at] == opening[0])
            index = sum(place == opening for place in places) - 1
            return Completion(token_ids=self.whole(turns[min(index, len(turns) - 1)] + "<|im_end|>"))

        self._stage.engine.script = script

    def holds(self) -> Held:
        held, script = Held(), self._stage.engine.script

        async def wait(prompt: Prompt) -> Completion:
            held.asked.set()
            try:
                await held.release.wait()
            except asyncio.CancelledError:
                held.aborted.set()
                raise
            return script(prompt)

        self._stage.engine.script = wait
        return held

    def fails(self) -> None:
        self._stage.engine.script = lambda prompt: Fault()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._stage.chat_model.vocabulary.decode(token_ids)

    def whole(self, text: str) -> Sequence[int]:
        return self._stage.ids(text)

    async def end(self) -> Episode:
        if self._episode is None:
            self._episode = await self._end()
        return self._episode


class _Gateway:
    """The worker's gateway."""

    def __init__(
        self, served: Any, make_stage: Any, monkeypatch: pytest.MonkeyPatch, *, key: str | None = None
    ) -> None:
        self._served, self._make_stage, self._monkeypatch, self._key = served, make_stage, monkeypatch, key

    @asynccontextmanager
    async def serve(self, options: Options) -> AsyncGenerator[Served]:
        self._monkeypatch.setattr("kestrl_rollout.gateway.streaming.KEEP_ALIVE_SECONDS", options.keep_alive)
        sampling = {name: getattr(options, name) for name in ("max_turns", "max_tokens", "temperature")}
        settings = {"refused_fields": tuple(options.refuses)}
        async with self._served(sampling=sampling, settings=settings) as (stage, endpoint, end):
            yield _Served(stage, endpoint, end, self._key, len(stage.engine.prompts))

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    async def own_loop(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], turns: Sequence[str]
    ) -> Episode:
        stage = await self._make_stage()
        stage.tools.schemas = [
            tools_pb2.ToolSchema(
                name=tool["function"]["name"],
                description=tool["function"]["description"],
                parameters_json=json.dumps(tool["function"]["parameters"]),
            )
            for tool in tools
        ]
        stage.says(*turns)
        return await stage.episode(messages=messages)


@pytest.fixture
async def gateway(served: Any, make_stage: Any, monkeypatch: pytest.MonkeyPatch) -> Subject:
    return _Gateway(served, make_stage, monkeypatch)


NUMBERS = [case.number for case in CASES.values() if case.check is not None]


@pytest.mark.parametrize("part", range(PARTS))
async def test_the_gateway_passes(gateway: Subject, part: int) -> None:
    """Cases share a stage, whose start takes longer than they do."""
    failed: list[str] = []
    for number in NUMBERS[part::PARTS]:
        try:
            await check_gateway(gateway, number)
        except AssertionError as error:
            failed.append(str(error))
    assert failed == []


async def test_a_case_names_what_does_not_hold(served: Any, make_stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _Gateway(served, make_stage, monkeypatch, key="wrong")
    with pytest.raises(AssertionError, match=r"^case 16, a prompt that is sent twice is sampled twice: "):
        await check_gateway(broken, 16)
    with pytest.raises(ValueError, match=r"case 35, .*benchmarks"):
        await check_gateway(broken, 35)


def test_there_are_57_cases_and_one_without_a_program_says_why() -> None:
    assert list(CASES) == list(range(1, 58))
    assert all(bool(case.check) != bool(case.elsewhere) for case in CASES.values())


def test_the_page_lists_the_cases() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for case in CASES.values():
        rest = " |" if case.check else f": not in the suite; {case.elsewhere} |"
        assert f"| {case.number} | {case.title}{rest}" in lines
