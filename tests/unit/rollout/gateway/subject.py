"""The worker's gateway as a subject of the public suite of cases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import Completion, Fault, Prompt

from kestrl.api.tools.v1 import tools_pb2
from kestrl.episode import Episode
from kestrl.testing.gateway import EnginePrompt, Held, Options, Served


class ServedEpisode:
    """An episode of the stage."""

    def __init__(self, stage: Any, endpoint: Any, end: Any, key: str | None, before: int) -> None:
        self.stage, self._end, self._before = stage, end, before
        self.base_url, self.api_key = endpoint.base_url, key or endpoint.api_key
        self._episode: Episode | None = None

    @property
    def prompts(self) -> Sequence[EnginePrompt]:
        return [
            EnginePrompt(token_ids=prompt.token_ids, sampling=prompt.sampling, policy=prompt.model)
            for prompt in self.stage.engine.prompts[self._before :]
        ]

    def says(self, *turns: str) -> None:
        opening = tuple(self.whole("<|im_start|>assistant"))

        def script(prompt: Prompt) -> Completion:
            ids = tuple(prompt.token_ids)  # not text: what a user writes opens no turn
            places = (ids[at : at + len(opening)] for at in range(len(ids)) if ids[at] == opening[0])
            index = sum(place == opening for place in places) - 1
            return Completion(token_ids=self.whole(turns[min(index, len(turns) - 1)] + "<|im_end|>"))

        self.stage.engine.script = script

    def holds(self) -> Held:
        held, script = Held(), self.stage.engine.script

        async def wait(prompt: Prompt) -> Completion:
            held.asked.set()
            try:
                await held.release.wait()
            except asyncio.CancelledError:
                held.aborted.set()
                raise
            answer = script(prompt)
            return await answer if isawaitable(answer) else answer

        self.stage.engine.script = wait
        return held

    def fails(self) -> None:
        self.stage.engine.script = lambda prompt: Fault()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.stage.chat_model.vocabulary.decode(token_ids)

    def whole(self, text: str) -> Sequence[int]:
        return self.stage.ids(text)

    async def end(self) -> Episode:
        if self._episode is None:
            self._episode = await self._end()
        return self._episode


class WorkerGateway:
    """The worker's gateway."""

    def __init__(
        self, served: Any, make_stage: Any, monkeypatch: pytest.MonkeyPatch, *, key: str | None = None
    ) -> None:
        self._served, self._make_stage, self._monkeypatch, self._key = served, make_stage, monkeypatch, key

    @asynccontextmanager
    async def serve(self, options: Options) -> AsyncGenerator[Served]:
        async with self.opened(options) as episode:
            yield episode

    @asynccontextmanager
    async def opened(
        self, options: Options, *, folder: Path | None = None, seconds: float = 20, **settings: Any
    ) -> AsyncGenerator[Any]:
        """An episode of a stage with these settings, and so many seconds for a turn."""
        self._monkeypatch.setattr("kestrl_rollout.gateway.streaming.KEEP_ALIVE_SECONDS", options.keep_alive)
        sampling = {name: getattr(options, name) for name in ("max_turns", "max_tokens", "temperature")}
        settings |= {"refused_fields": tuple(options.refuses)}
        deadlines = {"turn": seconds, "episode": 30 + 10 * seconds, "group": 40 + 10 * seconds}
        changes = {"sampling": sampling, "deadlines": deadlines, "settings": settings}
        async with self._served(folder=folder, **changes) as (stage, endpoint, end):
            yield ServedEpisode(stage, endpoint, end, self._key, len(stage.engine.prompts))

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
