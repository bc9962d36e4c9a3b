"""The seam of providers: every provider passes the conformance suite, and the suite finds what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.testing.tool_provider import check_tool_provider
from kestrl.tools import ToolSchema
from kestrl.tools.arguments import Arguments
from kestrl.tools.provider import NO_KWARGS, Kwargs, ToolDefinition, ToolProvider, kwargs_failure
from kestrl_tools.catalogue import provider_of
from kestrl_tools.tool_threads import ToolThreads

COUNT = {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": {"type": "object"}}}
VERL = {"config": {"label": "n"}, "tool_schema": COUNT}


def python(name: str, use: str, **options: Any) -> Any:
    def make() -> ToolProvider:
        return provider_of(ToolEntry(name=name, use=f"tool_samples:{use}", **options), "spec.tools[0]", ToolThreads())

    return make


@pytest.mark.parametrize(
    ("make", "calls", "options"),
    [
        (python("greet", "greet"), {"greet": {"name": "ann"}}, {"invalid_create_kwargs": {"x": 1}}),
        (
            python("notebook", "Notebook"),
            {"notebook": {"note": "one"}},
            {"create_kwargs": {"owner": "ann"}, "invalid_create_kwargs": {"ownr": "ann"}},
        ),
        (
            python("Shop", "Shop", methods=("search", "buy")),
            {"search": {"word": "a"}},
            {"create_kwargs": {"stock": {"lamp": 1}}, "invalid_create_kwargs": {"stck": {}}},
        ),
        (python("indexed", "Indexed", config={"words": ["lamp"]}), {"indexed": {"word": "lamp"}}, {}),
        (
            python("count", "VerlCounter", config={"config": {"label": "n"}, "tool_schema": COUNT}),
            {"count": {"by": 2}},
            {},
        ),
    ],
    ids=["function", "class", "environment", "hooks", "verl"],
)
async def test_python_tools_conform(samples: Any, make: Any, calls: Any, options: Any) -> None:
    await check_tool_provider(make, calls, **options)


class Echo:
    """A provider of one tool, correct unless a subclass changes a part."""

    name, environment, has_state, has_prompt = "echo", False, False, False
    prompt = ""

    def __init__(self) -> None:
        self.schema: Any = {"type": "object", "properties": {"text": {"type": "string"}}}

    async def list_tools(self) -> Sequence[ToolDefinition]:
        schema = ToolSchema(name="echo", description="Repeats a text.", parameters=self.schema)
        return [ToolDefinition(schema=schema, arguments=Arguments(self.schema))]

    def check(self, create_kwargs: Kwargs) -> None:
        if create_kwargs:
            raise kwargs_failure("echo", "create_kwargs", "it takes none")

    async def start(self) -> None:
        return None

    async def open(self, create_kwargs: Kwargs) -> Any:
        self.check(create_kwargs)
        return self

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        return {**arguments, **filled}["text"]

    async def state(self) -> object:
        return None

    async def close(self) -> None:
        return None

    def health(self) -> str:
        return ""

    async def stop(self) -> None:
        return None


class Unstable(Echo):
    count = 0

    async def list_tools(self) -> Sequence[ToolDefinition]:
        Unstable.count += 1
        self.schema = {"type": "object", "title": str(Unstable.count)}
        return await super().list_tools()


class NoSchema(Echo):
    def __init__(self) -> None:
        self.schema = {"type": "string"}


class Unhealthy(Echo):
    def health(self) -> str:
        return "the server is gone"


class Careless(Echo):
    async def open(self, create_kwargs: Kwargs) -> Any:
        return self


class Bytes(Echo):
    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        return b"text"


async def check(make: Any) -> None:
    await check_tool_provider(make, {"echo": {"text": "a"}}, invalid_create_kwargs={"x": 1})


async def test_a_correct_provider_conforms() -> None:
    await check(Echo)
    assert await (await Echo().open(NO_KWARGS)).call("echo", {"text": "a"}, {"text": "b"}) == "b"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unstable, "list different tools"),
        (NoSchema, "not a JSON Schema of type object"),
        (Unhealthy, "the server is gone"),
        (Careless, r"open\(\) accepts invalid create_kwargs"),
        (Bytes, "its result has no JSON form"),
    ],
)
async def test_the_suite_names_what_does_not_hold(make: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        await check(make)
