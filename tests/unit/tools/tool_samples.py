"""Tools of a user's, as the tests need them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kestrl.errors import ToolFailure, UserInputError
from kestrl.tools import Hidden, SandboxInUse, ToolError, ToolResult, WarmPool


class Events:
    """What the tools did, for the tests to wait for instead of sleeping."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.any_closed = threading.Event()
        self.started = threading.Event()
        self.release = threading.Event()
        self.made = 0
        self.running = 0
        self.most = 0
        self.lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1


events = Events()


def greet(name: str, times: Annotated[int, Field(ge=1, le=3)] = 1) -> str:
    """Says hello.

    Args:
        name: Whom to greet.
        times: How often.
    """
    return " ".join([f"hello {name}"] * times)


async def shout(text: str, mark: str) -> dict[str, str]:
    return {"said": text.upper() + mark}


class Notebook:
    """Keeps notes in a database that only its own thread may use."""

    def __init__(self, owner: str, first: str = "") -> None:
        self.owner = owner
        self.table = sqlite3.connect(":memory:")
        self.table.execute("create table notes (note text)")
        if first:
            self(first)

    def __call__(self, note: str) -> list[str]:
        """Adds a note and returns all."""
        self.table.execute("insert into notes values (?)", (note,))
        return [row[0] for row in self.table.execute("select note from notes")]

    def close(self) -> None:
        self.table.close()
        events.closed.append(self.owner)
        events.any_closed.set()


class Finish:
    async def __call__(self, answer: str, expected: Annotated[str, Hidden()]) -> ToolResult:
        """Ends the episode."""
        return ToolResult(text="thank you", final=True, data={"right": answer == expected})


class Shop:
    """An environment: two tools that share a basket."""

    def __init__(self, currency: str = "EUR", stock: dict[str, int] | None = None) -> None:
        self.currency, self.stock = currency, stock
        self.thread = threading.get_ident()

    def reset(self, stock: dict[str, int], broken: bool = False, greeting: Any = None) -> Any:
        if broken:
            raise KeyError("no stock")
        self.stock, self.basket = dict(stock), dict[str, int]()
        return greeting

    def search(self, word: str) -> list[str]:
        """Finds items by a part of their name.

        Args:
            word: Part of a name.
        """
        assert threading.get_ident() == self.thread
        with events.counted():
            return [name for name in self.stock or {} if word in name]

    def buy(self, item: str, count: int = 1, discount: Annotated[float, Hidden()] = 0.0) -> str:
        """Puts an item into the basket."""
        if item == "hang":
            events.started.set()
            events.release.wait()
        with events.counted():
            if (self.stock or {}).get(item, 0) < count:
                raise ToolError(f"there are not {count} of {item}")
            self.basket[item] = self.basket.get(item, 0) + count
            return f"{count} {item} at {discount:g} off"

    def state(self) -> Any:
        if "huge" in self.basket:
            return "x" * 2_000_000
        if "odd" in self.basket:
            return {"basket": {1, 2}}
        return {"basket": self.basket, "currency": self.currency}

    def close(self) -> None:
        events.closed.append(f"shop {self.basket}")
        events.any_closed.set()

    def _private(self) -> None: ...


class AsyncShop:
    """An environment without reset and state; its constructor takes the row's kwargs."""

    def __init__(self, owner: str) -> None:
        self.owner = owner

    async def who(self) -> str:
        return self.owner

    @staticmethod
    async def double(number: int) -> int:
        return 2 * number

    async def __call__(self) -> str:
        return "called"


async def nested() -> None:
    async def inner() -> None:
        raise KeyboardInterrupt

    await asyncio.gather(inner(), asyncio.sleep(0))


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class MuteRefusal(ToolError):
    def __str__(self) -> str:
        raise ValueError("mute")


class MoodyClass:
    """As `moody`, async and with a constructor that raises."""

    def __init__(self, mood: str = "") -> None:
        moody(mood)

    async def __call__(self, mood: str) -> Any:
        return moody(mood)


def moody(mood: str) -> Any:
    match mood:
        case "refuse":
            raise ToolError("not today")
        case "raise":
            raise KeyError("lost")
        case "exit":
            sys.exit(3)
        case "stop":
            raise StopIteration
        case "interrupt":
            raise KeyboardInterrupt
        case "generator":
            raise GeneratorExit("closed")
        case "group":
            raise BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError("x")])
        case "own":
            raise Own("base")
        case "mute":
            raise Mute
        case "mute refusal":
            raise MuteRefusal
        case "cancel":
            raise asyncio.CancelledError
        case "set":
            return {1, 2}
        case "nan":
            return float("nan")
        case "deep data":
            return ToolResult(text="", data={"value": json.loads("[" * 500 + "]" * 500)})
        case "no mapping":
            return ToolResult(text="", data=[1])  # type: ignore[arg-type]
        case "wordy":
            raise ToolFailure("word " * 100_000, code="wordy")
        case "surrogate":
            return "a\ud800b"
        case "long":
            return "x" * 2_000_000
        case _:
            return None


def hang() -> str:
    events.started.set()
    events.release.wait()
    return "late"


async def hang_politely() -> str:
    events.started.set()
    await asyncio.Event().wait()
    return "late"


async def stubborn() -> str:
    """Ignores its first cancellation."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0)
    return "late"


async def one_at_a_time() -> int:
    with events.counted():
        for _ in range(5):
            await asyncio.sleep(0)
    return events.most


class BadCloser:
    def __call__(self) -> str:
        return "ok"

    def close(self) -> None:
        raise OSError("disk gone")


class Refuses:
    def __init__(self) -> None:
        raise ConnectionError("no database")

    def __call__(self) -> str:
        return "never"


class MadeSlowly:
    def __init__(self) -> None:
        events.made += 1
        events.started.set()
        events.release.wait()

    def __call__(self) -> str:
        return "ready"

    def close(self) -> None:
        events.closed.append("slowly")
        events.any_closed.set()


class ClosedBadly(MadeSlowly):
    async def close(self) -> None:  # type: ignore[override]
        super().close()
        raise OSError("disk gone")


class VerlCounter:
    """Written for verl: one object, instances by id."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.name = tool_schema.function.name
        self.counts: dict[str, int] = {}

    async def create(
        self, instance_id: str | None = None, start: int | None = None, **kwargs: Any
    ) -> tuple[str, dict[str, str]]:
        made = instance_id or f"instance-{len(self.counts)}"
        self.counts[made] = start if start is not None else kwargs["create_kwargs"].get("begin", 0)
        return made, {}

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        self.counts[instance_id] += parameters["by"] * kwargs.get("factor", 1)
        return {"text": f"{self.config['label']} {self.counts[instance_id]}"}, 0.5, {"calls": 1}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        events.closed.append(instance_id)


no_tool = 5


def untyped(query, limit: int = 3) -> str:
    return str((query, limit))


def spread(*words: str) -> str:
    return " ".join(words)


def opaque(connection: sqlite3.Connection) -> str:
    return str(connection)


class NotCallable:
    pass


class Indexed:
    """Searches an index that all episodes share."""

    index: ClassVar[list[str]] = []

    def __init__(self, words: list[str]) -> None:
        del words

    @classmethod
    def start_service(cls, words: list[str]) -> None:
        if "bad" in words:
            raise UserInputError("words: `bad` cannot be indexed")
        cls.index = [*words]

    @classmethod
    async def stop_service(cls) -> None:
        cls.index = []

    def __call__(self, word: str) -> bool:
        """Whether the index has a word."""
        return word in self.index


class Runner:
    """Runs code in sandboxes that a user's own class claims."""

    @classmethod
    async def start_service(cls, *, warm_pool: WarmPool | None = None) -> SandboxInUse:
        backend = "mine" if warm_pool is None else f"claim of {warm_pool.name} by {warm_pool.token}"
        return SandboxInUse(backend=backend, isolation="namespaces")

    def __call__(self, code: str) -> str:
        """Runs code."""
        return code


class Unstartable:
    """A tool whose hook needs an instance."""

    def start_service(self) -> None:
        raise AssertionError("is never called")

    def __call__(self, word: str) -> bool:
        return bool(word)


class Guess:
    """An environment as TRL documents it: `reset` returns the prompt, `get_reward` the reward."""

    def reset(self, secret: Any = "lamp", **_: Any) -> str | None:
        self.secret, self.reward = secret, 0.0
        return "\nGuess the word of four letters." if secret else None

    def guess(self, word: str) -> str:
        """Guesses a word."""
        self.reward = float(word == self.secret) if word != "odd" else None  # type: ignore[assignment]
        return "right" if self.reward else "wrong"

    async def get_reward(self) -> float:
        return self.reward


class StatefulGuess(Guess):
    """The same with a state of its own."""

    def guess(self, word: str) -> str:
        """Guesses a word."""
        return super().guess(word)

    def state(self) -> Any:
        return {"secret": self.secret} if self.secret != "list" else []


class QuietGuess(Guess):
    """The same, begun without text."""

    def reset(self, secret: Any = "lamp", **_: Any) -> None:
        super().reset(secret)

    def guess(self, word: str) -> str:
        """Guesses a word."""
        return super().guess(word)


class ShownGuess(Guess):
    """The same with a prompt that is no text."""

    def reset(self, secret: Any = "lamp", **_: Any) -> Any:
        super().reset(secret)
        return [secret]

    def guess(self, word: str) -> str:
        """Guesses a word."""
        return super().guess(word)
