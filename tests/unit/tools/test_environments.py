"""Environments over the wire: tools that share one instance per episode, begun from the row, with a state for the
reward."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.plan.settings.tools import ProcessEntry, ToolEntry
from kestrl.errors import Boundary, FailureError, UserInputError
from kestrl_tools.catalogue import load_tools
from kestrl_tools.tool_threads import ToolThreads

FOLDER = str(Path(__file__).parent)
STOCK = {"lamp": 2, "lampshade": 1, "chair": 0}
ROW = {"Shop": {"create_kwargs": {"stock": STOCK}}}


def environment(use: str = "Shop", name: str | None = None, **options: Any) -> ToolEntry:
    return ToolEntry(name=name or use, use=f"tool_samples:{use}", **options)


async def test_the_methods_of_an_environment_are_tools(serve: Any) -> None:
    async with serve(environment()) as client:
        search, buy = await client.list()
    assert (search.name, search.environment, search.has_state) == ("search", "Shop", True)
    assert search.description == "Finds items by a part of their name."
    assert json.loads(search.parameters_json)["properties"] == {
        "word": {"type": "string", "description": "Part of a name."}
    }
    assert list(json.loads(buy.parameters_json)["properties"]) == ["item", "count"]


async def test_they_share_one_instance_per_episode_and_its_state(serve: Any, samples: Any) -> None:
    async with serve(environment(config={"currency": "CHF"})) as client:
        first, second = await client.open(kwargs=ROW), await client.open(kwargs=ROW)
        assert json.loads((await client.call(first, "search", {"word": "lamp"})).text) == ["lamp", "lampshade"]
        assert (await client.call(first, "buy", {"item": "lamp", "count": 2})).text == "2 lamp at 0 off"
        refused = await client.call(first, "buy", {"item": "chair"})
        assert (refused.outcome, refused.text) == ("tool_error", "there are not 1 of chair")
        assert await client.state(first) == {"Shop": {"basket": {"lamp": 2}, "currency": "CHF"}}
        assert await client.state(second) == {"Shop": {"basket": {}, "currency": "CHF"}}
        await client.close(first)
        assert samples.events.closed == ["shop {'lamp': 2}"]
    assert sorted(samples.events.closed) == ["shop {'lamp': 2}", "shop {}"]


async def test_an_episode_without_a_call_has_the_state_of_its_beginning(serve: Any, samples: Any) -> None:
    async with serve(environment()) as client:
        opening = client.opening("search", kwargs=ROW)
        assert await client.state(secrets.token_urlsafe(24), opening) == {"Shop": {"basket": {}, "currency": "EUR"}}
    assert samples.events.closed == ["shop {}"]


async def test_calls_of_one_environment_do_not_overlap(serve: Any, samples: Any) -> None:
    async with serve(environment()) as client:
        session = await client.open(kwargs=ROW)
        await asyncio.gather(*(client.call(session, "search", {"word": str(index)}) for index in range(8)))
    assert samples.events.most == 1


async def test_execute_kwargs_are_a_methods(serve: Any) -> None:
    kwargs = {**ROW, "buy": {"execute_kwargs": {"discount": 0.5, "item": "lampshade"}}}
    async with serve(environment()) as client:
        answer = await client.call(await client.open(kwargs=kwargs), "buy", {"item": "lamp"})
    assert answer.text == "1 lampshade at 0.5 off"


async def test_only_the_listed_methods_are_tools_of_a_class_that_is_called(serve: Any) -> None:
    entry = environment("AsyncShop", "shop", methods=("who", "double"), config={})
    async with serve(entry, environment("AsyncShop", "whole", config={"owner": "all"})) as client:
        assert [tool.name for tool in await client.list()] == ["who", "double", "whole"]
        session = await client.open(kwargs={"shop": {"create_kwargs": {"owner": "ann"}}})
        assert (await client.call(session, "who")).text == "ann"
        assert (await client.call(session, "double", {"number": 4})).text == "8"
        assert (await client.call(session, "whole")).text == "called"
        assert await client.state(session) == {}


@pytest.mark.parametrize(
    ("kwargs", "code", "message"),
    [
        (
            {},
            "tool_kwargs_invalid",
            "Shop: the row's create_kwargs do not fit: Shop.reset: missing a required argument",
        ),
        ({"Shop": {"create_kwargs": {"stok": {}}}}, "tool_kwargs_invalid", "Shop.reset: missing a required argument"),
        (
            {"search": {"create_kwargs": {"stock": {}}}},
            "tool_kwargs_invalid",
            "under the name of its environment, 'Shop'",
        ),
        (
            {**ROW, "Shop": {"execute_kwargs": {"item": "x"}}},
            "tool_kwargs_invalid",
            "execute_kwargs belong under the name of",
        ),
        ({"Shop": {"create_kwargs": {"stock": {}, "broken": True}}}, "tool_raised", "Shop: KeyError: 'no stock'"),
        (
            {"Shop": {"create_kwargs": {"stock": {}, "greeting": 3}}},
            "tool_result_invalid",
            "Shop: reset() returned a int: return text",
        ),
        ({"shop": {"create_kwargs": {"stock": {}}}}, "unknown_tool", "the job does not have: shop"),
    ],
)
async def test_a_row_that_does_not_fit_fails_its_episode(
    serve: Any, kwargs: dict[str, Any], code: str, message: str
) -> None:
    async with serve(environment()) as client:
        with pytest.raises(FailureError) as caught:
            await client.open(kwargs=kwargs)
    failure = caught.value.failure()
    assert (failure.boundary, failure.code) == (Boundary.TOOL, code)
    assert message in failure.message


@pytest.mark.parametrize(
    ("item", "message"),
    [("huge", "its state is 2000002 characters of JSON; at most 1000000"), ("odd", "its state has no JSON form")],
)
async def test_a_state_that_cannot_be_sent_is_the_tools_failure(serve: Any, item: str, message: str) -> None:
    async with serve(environment()) as client:
        session = await client.open(kwargs={"Shop": {"create_kwargs": {"stock": {item: 1}}}})
        await client.call(session, "buy", {"item": item})
        with pytest.raises(FailureError, match=message) as caught:
            await client.state(session)
    assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tool_result_invalid")


async def test_a_hanging_environment_is_late_and_bounded(serve: Any, samples: Any) -> None:
    try:
        async with serve(environment(), call_seconds=1.0) as client:
            session = await client.open(kwargs=ROW)
            with pytest.raises(FailureError, match="buy: the call took longer"):
                await client.call(session, "buy", {"item": "hang"})
            with pytest.raises(FailureError, match="Shop: its state took longer"):
                await client.state(session)
            await client.close(session)
    finally:
        samples.events.release.set()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            ToolEntry(name="search", use="tool_samples:Shop.search"),
            r"spec.tools\[0\].use: tool_samples:Shop.search is a method, .*`use: tool_samples:Shop` and `methods: "
            r"\[search\]`",
        ),
        (environment(methods=("sell",)), r"Shop has no method 'sell' \(it has: search, buy\)"),
        (environment(methods=("reset",)), "the method 'reset' is not for the model"),
        (environment(methods=("_private",)), "the method '_private' is not for the model"),
        (environment(config={"currncy": "EUR"}), "its config does not fit"),
        (environment("greet", methods=("search",)), r"spec.tools\[0\].methods: .* is not an environment"),
        (environment("VerlCounter", methods=("search",)), "VerlCounter"),
    ],
)
async def test_an_environment_that_cannot_be_used_is_refused(samples: Any, entry: ToolEntry, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        await load_tools([entry], ToolThreads())


@pytest.mark.parametrize(
    "entries",
    [
        [environment(name="a"), environment(name="b")],
        [environment(name="a"), ToolEntry(name="search", use="tool_samples:greet")],
        [environment(name="greet"), ToolEntry(name="greet", use="tool_samples:greet")],
    ],
)
async def test_names_are_unique_over_all_entries(samples: Any, entries: list[ToolEntry]) -> None:
    with pytest.raises(UserInputError, match=r"spec.tools\[1\]: there is another tool or environment named"):
        await load_tools(entries, ToolThreads())


async def test_rows_cannot_override_config(serve: Any) -> None:
    """One rule for functions, classes and environments."""
    entries = {
        "greet": ToolEntry(name="greet", use="tool_samples:greet", config={"times": 2}),
        "notebook": ToolEntry(name="notebook", use="tool_samples:Notebook", config={"owner": "ann"}),
        "AsyncShop": environment("AsyncShop", methods=("who",), config={"owner": "ann"}),
    }
    rows = {
        "greet": {"execute_kwargs": {"times": 3}},
        "notebook": {"create_kwargs": {"owner": "bob"}},
        "AsyncShop": {"create_kwargs": {"owner": "bob"}},
    }
    for name, entry in entries.items():
        async with serve(entry) as client:
            with pytest.raises(FailureError, match=r"the manifest's config sets \w+ for every episode") as caught:
                await client.open(kwargs={name: rows[name]})
            assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tool_kwargs_invalid")


@pytest.mark.parametrize("process", [None, ProcessEntry()])
async def test_an_environment_as_trl_has_it_gives_its_prompt_and_its_reward(
    serve: Any, process: ProcessEntry | None
) -> None:
    async with serve(environment("Guess", process=process), folder=FOLDER) as client:
        (guess,) = await client.list()
        assert (guess.name, guess.has_prompt, guess.has_state) == ("guess", True, True)
        first, second = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        kwargs = {"Guess": {"create_kwargs": {"secret": "desk"}}}
        assert await client.prompt(first, client.opening(kwargs=kwargs)) == "\nGuess the word of four letters."
        assert await client.prompt(second, client.opening()) == "\nGuess the word of four letters."
        assert (await client.call(first, "get_reward")).outcome == "unknown_tool"
        for session in (first, second):
            await client.call(session, "guess", {"word": "desk"})
        assert await client.state(first) == {"Guess": {"get_reward": 1.0}}
        assert await client.state(second) == {"Guess": {"get_reward": 0.0}}


async def test_a_reset_that_returns_none_adds_nothing(serve: Any) -> None:
    async with serve(environment("QuietGuess")) as client:
        (guess,) = await client.list()
        assert not guess.has_prompt
    async with serve(environment("Guess")) as client:
        kwargs = {"Guess": {"create_kwargs": {"secret": None}}}
        assert await client.prompt(secrets.token_urlsafe(24), client.opening(kwargs=kwargs)) == ""


async def ended(client: Any, session: str, opening: Any, word: str | None) -> None:
    """An episode of one call."""
    await client.prompt(session, opening)
    await client.call(session, "guess", {"word": word})
    await client.state(session)


@pytest.mark.parametrize(
    ("use", "secret", "word", "message"),
    [
        ("ShownGuess", "desk", None, r"ShownGuess: reset\(\) returned a list: return text"),
        ("Guess", "desk", "odd", r"Guess: get_reward\(\) returned a NoneType: return a finite number"),
        ("StatefulGuess", "list", "list", r"StatefulGuess: state\(\) must return a dict without the key 'get_reward'"),
    ],
)
async def test_a_prompt_or_reward_that_is_none_fails_the_episode(
    serve: Any, use: str, secret: str, word: str | None, message: str
) -> None:
    session = secrets.token_urlsafe(24)
    async with serve(environment(use)) as client:
        opening = client.opening(kwargs={use: {"create_kwargs": {"secret": secret}}})
        with pytest.raises(FailureError, match=message) as caught:
            await ended(client, session, opening, word)
    assert (caught.value.boundary, caught.value.code) == (Boundary.TOOL, "tool_result_invalid")


async def test_an_environments_state_and_reward_stand_side_by_side(serve: Any) -> None:
    async with serve(environment("StatefulGuess")) as client:
        session = await client.open()
        await client.call(session, "guess", {"word": "lamp"})
        assert await client.state(session) == {"StatefulGuess": {"secret": "lamp", "get_reward": 1.0}}
