"""Sessions: the instances of one episode's tools, kept between calls, closed once.

What must stay true: a session is in the table exactly while it can be called; its instances are closed exactly once, whether by
Close, by the end of its lifetime, or by draining; a call that is running then is cancelled first. Nothing sleeps for a session:
its end of life is one timer of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from kestrl.episode import CallOutcome
from kestrl.errors import KestrlError, ToolFailure, described, text_of
from kestrl.telemetry import span
from kestrl.telemetry.names import Attr, SpanName
from kestrl.tools import ToolError
from kestrl.tools.arguments import ArgumentsInvalid
from kestrl_tools.catalogue import Kwargs, Origin, Tool
from kestrl_tools.execution import Answer, answer_of, for_model, guarded, state_of
from kestrl_tools.instances import Instance
from kestrl_tools.lanes import Lanes

log = logging.getLogger(__name__)
MAX_HANGING = 64
"""Threads lost in calls that never come back, before no session is opened any more."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A tool in a session."""

    tool: Tool
    instance: Instance
    filled: Kwargs

    @property
    def name(self) -> str:
        return self.tool.schema.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a session is opened with."""

    episode_id: str
    """For messages."""
    tools: Sequence[str]
    """Wanted; none means all."""
    kwargs: Mapping[str, Any]
    """Per tool, `create_kwargs` and `execute_kwargs`."""
    lifetime: float
    """Seconds after which the session is closed by itself."""


@dataclass(eq=False, slots=True)
class Session:
    """The tools of one episode."""

    id: str
    episode_id: str
    making: asyncio.Task[Mapping[str, Seat]]
    timer: asyncio.TimerHandle
    running: set[asyncio.Task[object]] = field(default_factory=set[asyncio.Task[object]])
    closed: bool = False


class Sessions:
    """All sessions of the service."""

    def __init__(self, tools: Mapping[str, Tool], lanes: Lanes, *, call_seconds: float, max_sessions: int) -> None:
        self._tools = tools
        self._lanes = lanes
        self._call_seconds = call_seconds
        self._max = max_sessions
        self._open: dict[str, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._draining = False
        self.close_errors = 0
        """Instances whose `close` raised or hung."""

    def __len__(self) -> int:
        return len(self._open)

    async def call(self, session_id: str, name: str, arguments: object, opening: Opening | None = None) -> Answer:
        """Calls a tool of a session, which `opening` opens if there is none of this id.

        Raises:
            KestrlError: There is no such session, no room for it, or an `opening` that names tools that are not the job's; a tool
                could not be made or broke (boundary `tool`).
        """
        session = self._open.get(session_id)
        if session is None and opening is not None:
            session = self._begin(session_id, opening)
        if session is None:
            raise KestrlError("the session is closed, expired or unknown", code="unknown_session", retryable=True)
        seats = await self._made(session)
        seat = seats.get(name)
        if seat is None:
            known = ", ".join(seats) or "none"
            return Answer(outcome=CallOutcome.UNKNOWN_TOOL, text=f"There is no tool {name!r}. The tools are: {known}.")
        try:
            checked = seat.tool.arguments.parse(arguments, filled=frozenset(seat.filled))
        except ArgumentsInvalid as error:
            text = f"{name} was not called: {error}."
            return Answer(outcome=CallOutcome.SCHEMA_VIOLATION, text=text.encode("utf-8", "replace").decode("utf-8"))
        attributes = {Attr.TOOL_NAME: name, Attr.EPISODE_ID: session.episode_id}
        with span(SpanName.TOOL_EXECUTE, attributes) as current:
            answer = await self._run(session, seat, checked)
            current.set_attribute(Attr.OUTCOME, answer.outcome)
            return answer

    async def state(self, session_id: str, opening: Opening | None = None) -> dict[str, object]:
        """The state of each environment of a session that has one; `opening` as in `call`: no call may have been made.

        Raises:
            KestrlError: As `call` does.
        """
        session = self._open.get(session_id)
        if session is None and opening is not None:
            session = self._begin(session_id, opening)
        if session is None:
            raise KestrlError("the session is closed, expired or unknown", code="unknown_session", retryable=True)
        seats = await self._made(session)
        stateful = {seat.tool.origin.name: seat for seat in seats.values() if seat.tool.origin.has_state}
        return {name: await self._state(session, name, seat) for name, seat in stateful.items()}

    async def _state(self, session: Session, name: str, seat: Seat) -> object:
        work = self._started(session, name, seat.instance.state())
        try:
            return state_of(name, await self._within(work, name, "its state took"))
        except ToolError as error:
            raise ToolFailure(f"{session.episode_id}: {name}: its state: {described(error)}") from error

    async def close(self, session_id: str) -> None:
        """Ends a session; one that is gone already is no error."""
        session = self._open.pop(session_id, None)
        if session is not None:
            await self._end(session)

    async def drain(self) -> None:
        """Takes no more sessions and closes those there are."""
        self._draining = True
        ending = [self._begin_end(session_id) for session_id in list(self._open)]
        if ending or self._closing:
            log.info("draining: %d sessions are closed", len(ending))
            await asyncio.wait(self._closing)
        if self.close_errors:
            log.warning("%d tools could not be closed in all", self.close_errors)

    def _begin(self, session_id: str, opening: Opening) -> Session:
        """Enters a session whose tools are being made."""
        self._admit()
        episode_id, lifetime = opening.episode_id, opening.lifetime
        if not session_id:  # all who forget it would share one
            raise KestrlError(f"{episode_id}: session_id: must be chosen, and hard to guess", code="invalid_request")
        if not 0 < lifetime < float("inf"):
            raise KestrlError(
                f"{episode_id}: a session's lifetime must be above 0, is {lifetime}", code="invalid_request"
            )
        wanted = list(dict.fromkeys(opening.tools)) or list(self._tools)
        self._check_names(episode_id, wanted, opening.kwargs)
        making = asyncio.create_task(self._make(episode_id, wanted, opening.kwargs), name=f"open-{episode_id}")
        timer = asyncio.get_running_loop().call_later(lifetime, self._expire, session_id)
        session = self._open[session_id] = Session(session_id, episode_id, making, timer)
        making.add_done_callback(partial(self._made_or_gone, session))
        return session

    def _check_names(self, episode_id: str, wanted: Sequence[str], kwargs: Mapping[str, Any]) -> None:
        """Whether the row's names are the job's, and each of its arguments stands under the right one."""
        origins = {tool.origin.name: tool.origin for tool in self._tools.values()}
        unknown = sorted((set(wanted) - set(self._tools)) | (set(kwargs) - set(self._tools) - set(origins)))
        if unknown:
            raise ToolFailure(
                f"{episode_id}: the row names tools that the job does not have: {', '.join(unknown)} "
                f"(it has: {', '.join(self._tools) or 'none'})",
                code="unknown_tool",
            )
        for name in kwargs:
            if _given(kwargs, name, "create_kwargs") and name not in origins:
                environment = self._tools[name].origin.name
                raise ToolFailure(
                    f"{episode_id}: {name}: create_kwargs stand under the name of its environment, {environment!r}",
                    code="tool_kwargs_invalid",
                )
            if _given(kwargs, name, "execute_kwargs") and name not in self._tools:
                raise ToolFailure(
                    f"{episode_id}: {name}: execute_kwargs stand under the name of a tool, not of its environment",
                    code="tool_kwargs_invalid",
                )

    def _made_or_gone(self, session: Session, making: asyncio.Task[Mapping[str, Seat]]) -> None:
        if not _succeeded(making) and self._open.get(session.id) is session:
            del self._open[session.id]
            session.timer.cancel()

    async def _made(self, session: Session) -> Mapping[str, Seat]:
        """The tools, once they are made: for all calls that came meanwhile, whichever of them is taken back."""
        if not session.making.done():
            await asyncio.wait({session.making})
        if session.closed or session.making.cancelled():
            raise _closed()
        return session.making.result()

    def _admit(self) -> None:
        if self._draining:
            raise KestrlError("the tool service is shutting down", code="draining", retryable=True)
        if len(self._open) >= self._max:
            raise KestrlError(
                f"all {self._max} sessions are taken; sessions are closed by Close or at the end of their lifetime",
                code="too_many_sessions",
                retryable=True,
            )
        hanging = self._lanes.hanging()
        if len(hanging) >= MAX_HANGING:
            raise ToolFailure(
                f"{len(hanging)} calls never came back (tools: {', '.join(sorted(set(hanging)))}); "
                "a tool must end by itself: give what it waits for a time limit",
                code="tool_hangs",
            )

    async def _make(self, episode_id: str, wanted: Sequence[str], kwargs: Mapping[str, Any]) -> Mapping[str, Seat]:
        made: dict[str, Instance] = {}
        seats: dict[str, Seat] = {}
        try:
            for name in wanted:
                tool = self._tools[name]
                filled = _given(kwargs, name, "execute_kwargs")
                origin = tool.origin
                try:
                    tool.check_fill(filled)
                    if origin.name not in made:
                        create_kwargs = _given(kwargs, origin.name, "create_kwargs")
                        made[origin.name] = await self._instance(origin, create_kwargs)
                except ToolFailure as error:
                    raise ToolFailure(f"{episode_id}: {error}", code=error.code, retryable=error.retryable) from error
                except ToolError as error:
                    raise ToolFailure(f"{episode_id}: {origin.name}: {text_of(error)}") from error
                seats[name] = Seat(tool, made[origin.name], filled)
        except BaseException:
            await self._close_all(made)
            raise
        return seats

    async def _instance(self, origin: Origin, create_kwargs: Kwargs) -> Instance:
        making = asyncio.create_task(guarded(origin.name, origin.make(create_kwargs)), name=f"make-{origin.name}")
        return cast(Instance, await self._within(making, origin.name, "making it took"))

    def _expire(self, session_id: str) -> None:
        log.warning("the session of episode %s outlived its lifetime and is closed", self._open[session_id].episode_id)
        self._begin_end(session_id)

    def _begin_end(self, session_id: str) -> None:
        task = asyncio.create_task(self.close(session_id), name="close-session")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _run(self, session: Session, seat: Seat, arguments: Mapping[str, Any]) -> Answer:
        work = self._started(session, seat.name, seat.instance.call(seat.tool.method, arguments, seat.filled))
        try:
            return answer_of(seat.name, await self._within(work, seat.name, "the call took"))
        except ToolError as error:
            return for_model(seat.name, error)
        except ToolFailure as error:
            if session.closed and work.cancelled():
                raise _closed() from error
            raise

    def _started(self, session: Session, name: str, work: Awaitable[object]) -> asyncio.Task[object]:
        """Starts what a tool does; the session's end cancels it."""
        task = asyncio.create_task(guarded(name, work), name=name)
        session.running.add(task)
        task.add_done_callback(session.running.discard)
        return task

    async def _within(self, work: asyncio.Task[object], name: str, what: str) -> object:
        """Awaits a tool's work, but not longer than a call may take: a tool that ignores its cancellation is left behind."""
        work.add_done_callback(_retrieved)
        try:
            done, _ = await asyncio.wait({work}, timeout=self._call_seconds)
        finally:
            work.cancel()  # of no effect on what is done
        if not done:
            raise ToolFailure(f"{name}: {what} longer than {self._call_seconds:g} s", code="tool_deadline")
        if work.cancelled():
            raise ToolFailure(f"{name}: cancelled itself")
        return work.result()

    async def _end(self, session: Session) -> None:
        session.closed = True
        session.timer.cancel()
        session.making.cancel()  # of no effect on what is made; what was made so far is closed there
        await asyncio.wait({session.making})
        running = set(session.running)
        for work in running:
            work.cancel()
        if running:
            await asyncio.wait(running, timeout=self._call_seconds)
        if _succeeded(session.making):
            await self._close_all({seat.tool.origin.name: seat.instance for seat in session.making.result().values()})

    async def _close_all(self, instances: Mapping[str, Instance]) -> None:
        closing = [
            asyncio.create_task(self._close_one(name, instance), name=f"close-{name}")
            for name, instance in instances.items()
        ]
        if closing:
            await asyncio.wait(closing)

    async def _close_one(self, name: str, instance: Instance) -> None:
        work = asyncio.create_task(guarded(name, instance.close()), name=f"close-{name}")
        try:
            await self._within(work, name, "closing it took")
        except (ToolError, KestrlError) as error:
            self.close_errors += 1
            log.error("tool %s could not be closed: %s", name, text_of(error))


def _given(kwargs: Mapping[str, Any], name: str, which: str) -> Kwargs:
    """The `create_kwargs` or `execute_kwargs` that a row gives, if any."""
    entry: Any = kwargs.get(name) or {}
    return cast(Kwargs, entry.get(which) or {})


def _succeeded(work: asyncio.Task[Any]) -> bool:
    return not work.cancelled() and work.exception() is None


def _closed() -> KestrlError:
    return KestrlError("the session was closed", code="unknown_session", retryable=True)


def _retrieved(work: asyncio.Task[object]) -> None:
    """Looks at the error of work that nobody waits for any more, or asyncio would call it lost; `guarded` has logged it."""
    if not work.cancelled():
        work.exception()
