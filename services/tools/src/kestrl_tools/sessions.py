"""Sessions: the instances of an episode's tools, kept between calls and closed once.

Invariants: a session is in the table exactly while it can be called; its instances are closed exactly once, by Close,
by the end of its lifetime, or by draining; a running call is cancelled first. The lifetime is one timer of the event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from kestrl._shared.plan.tools import NO_FILES
from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.episode import CallOutcome
from kestrl.errors import KestrlError, ToolFailure, described, text_of
from kestrl.tools import ToolError
from kestrl.tools.arguments import ArgumentsInvalid
from kestrl.tools.provider import Kwargs, ProviderSession, ToolProvider
from kestrl_tools.catalogue import JobTool, server_digests
from kestrl_tools.environments.provider import environment_failures, is_environment
from kestrl_tools.execution import Answer, answer_of, for_model, guarded, state_of
from kestrl_tools.rows import check_names, given, placed
from kestrl_tools.tool_threads import ToolThreads

log = logging.getLogger(__name__)
MAX_HANGING = 64
"""Maximum threads in calls that have not returned; above it no session is opened."""


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool bound to an instance of a session."""

    tool: JobTool
    session: ProviderSession
    filled: Kwargs

    @property
    def name(self) -> str:
        return self.tool.schema.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Parameters of a new session."""

    episode_id: str
    """For messages."""
    tools: Sequence[str]
    """Requested tools; empty means all."""
    kwargs: Mapping[str, Any]
    """`create_kwargs` and `execute_kwargs` by tool."""
    lifetime: float
    """Seconds after which the session is closed automatically."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of the servers' lists that the caller offers to the model."""


@dataclass(eq=False, slots=True)
class Session:
    """The tools of one episode."""

    id: str
    episode_id: str
    making: asyncio.Task[Mapping[str, BoundTool]]
    timer: asyncio.TimerHandle
    running: set[asyncio.Task[object]] = field(default_factory=set[asyncio.Task[object]])
    closed: bool = False


class Sessions:
    """The sessions of the service."""

    def __init__(
        self,
        tools: Mapping[str, JobTool],
        threads: ToolThreads,
        *,
        call_seconds: float,
        max_sessions: int,
        files: Mapping[str, str] = NO_FILES,
    ) -> None:
        self._tools = tools
        self._files = files
        self._digests = server_digests(tools)
        self._threads = threads
        self._call_seconds = call_seconds
        self._max = max_sessions
        of_environment = any(is_environment(tool.provider) for tool in tools.values())
        self._failures = environment_failures if of_environment else nullcontext[None]
        """Gives failures the boundary of the job's environment, which has no tools beside it."""
        self._open: dict[str, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._draining = False
        self.close_errors = 0
        """Number of instances whose `close` raised or timed out."""

    def __len__(self) -> int:
        return len(self._open)

    async def call(self, session_id: str, name: str, arguments: object, opening: Opening | None = None) -> Answer:
        """Calls a tool of a session; `opening` opens the session if it does not exist.

        Raises:
            KestrlError: The session does not exist, there are too many, or `opening` names unknown tools; or a tool
                could not be created or failed (boundary `tool`).
        """
        session = self._opened(session_id, opening)
        bound_tools = await self._made(session)
        bound = bound_tools.get(name)
        if bound is None:
            names = ", ".join(bound_tools) or "none"
            return Answer(outcome=CallOutcome.UNKNOWN_TOOL, text=f"There is no tool {name!r}. The tools are: {names}.")
        try:
            checked = bound.tool.definition.arguments.parse(arguments, filled=frozenset(bound.filled))
        except ArgumentsInvalid as error:
            text = f"{name} was not called: {error}."
            return Answer(outcome=CallOutcome.SCHEMA_VIOLATION, text=text.encode("utf-8", "replace").decode("utf-8"))
        attributes = {Attr.TOOL_NAME: name, Attr.EPISODE_ID: session.episode_id}
        with span(SpanName.TOOL_EXECUTE, attributes) as current, self._failures():
            answer = await self._run(session, bound, checked)
            current.set_attribute(Attr.OUTCOME, answer.outcome)
            return answer

    async def prompt(self, session_id: str, opening: Opening) -> str:
        """Opens a session; what its environments add to the prompt, in the order of the tools.

        Raises:
            KestrlError: As `call` does.
        """
        with self._failures():
            bound_tools = await self._made(self._opened(session_id, opening))
        instances = {bound.tool.provider.name: bound.session for bound in bound_tools.values()}
        return "".join(instance.prompt for instance in instances.values())

    async def state(self, session_id: str, opening: Opening | None = None) -> dict[str, object]:
        """State of each environment of a session with a `state()` method; `opening` as in `call`, if there was no call
        before.

        Raises:
            KestrlError: As `call` does.
        """
        with self._failures():
            session = self._opened(session_id, opening)
            bound_tools = await self._made(session)
            stateful = {
                bound.tool.provider.name: bound for bound in bound_tools.values() if bound.tool.provider.has_state
            }
            return {name: await self._state(session, name, bound) for name, bound in stateful.items()}

    def _opened(self, session_id: str, opening: Opening | None) -> Session:
        """The session, begun now if `opening` is there. Raises KestrlError if there is none."""
        session = self._open.get(session_id)
        if session is None and opening is not None:
            session = self._begin(session_id, opening)
        if session is None:
            raise KestrlError("the session is closed, expired or unknown", code="unknown_session", retryable=True)
        return session

    async def _state(self, session: Session, name: str, bound: BoundTool) -> object:
        work = self._started(session, name, bound.session.state())
        try:
            return state_of(name, await self._within(work, name, "its state took"))
        except ToolError as error:
            raise ToolFailure(f"{session.episode_id}: {name}: its state: {described(error)}") from error

    async def close(self, session_id: str) -> None:
        """Closes a session; an unknown one is not an error."""
        session = self._open.pop(session_id, None)
        if session is not None:
            await self._end(session)

    async def drain(self) -> None:
        """Refuses new sessions and closes the existing ones."""
        self._draining = True
        ending = [self._begin_end(session_id) for session_id in list(self._open)]
        if ending or self._closing:
            log.info("draining: closing %d sessions", len(ending))
            await asyncio.wait(self._closing)
        if self.close_errors:
            log.warning("%d tools could not be closed in total", self.close_errors)

    def _begin(self, session_id: str, opening: Opening) -> Session:
        """Registers a session whose tools are being created."""
        self._admit()
        episode_id, lifetime = opening.episode_id, opening.lifetime
        if not session_id:  # callers without an id would share a session
            raise KestrlError(f"{episode_id}: session_id: is empty; use a random id", code="invalid_request")
        if not 0 < lifetime < float("inf"):
            raise KestrlError(
                f"{episode_id}: a session's lifetime must be above 0, is {lifetime}", code="invalid_request"
            )
        changed = sorted(name for name, digest in opening.digests.items() if digest != self._digests.get(name))
        if changed:
            raise ToolFailure(
                f"{episode_id}: {', '.join(changed)}: the server lists other tools than the model is offered; "
                "the tools of a run cannot change: start a new run, or pin the server's version",
                code="tools_changed",
            )
        names = list(dict.fromkeys(opening.tools)) or list(self._tools)
        with _naming(episode_id):
            kwargs = placed(opening.kwargs, self._files)
            check_names(self._tools, names, kwargs)
        making = asyncio.create_task(self._make(episode_id, names, kwargs), name=f"open-{episode_id}")
        timer = asyncio.get_running_loop().call_later(lifetime, self._expire, session_id)
        session = self._open[session_id] = Session(session_id, episode_id, making, timer)
        making.add_done_callback(partial(self._made_or_gone, session))
        return session

    def _made_or_gone(self, session: Session, making: asyncio.Task[Mapping[str, BoundTool]]) -> None:
        if not _succeeded(making) and self._open.get(session.id) is session:
            del self._open[session.id]
            session.timer.cancel()

    async def _made(self, session: Session) -> Mapping[str, BoundTool]:
        """The tools once they are created, shared by concurrent calls even if some are cancelled."""
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
                f"all {self._max} sessions are in use; sessions are closed by Close or at the end of their lifetime",
                code="too_many_sessions",
                retryable=True,
            )
        hanging = self._threads.hanging()
        if len(hanging) >= MAX_HANGING:
            raise ToolFailure(
                f"{len(hanging)} calls have not returned (tools: {', '.join(sorted(set(hanging)))}); "
                "set time limits in these tools",
                code="tool_hangs",
            )

    async def _make(self, episode_id: str, names: Sequence[str], kwargs: Mapping[str, Any]) -> Mapping[str, BoundTool]:
        instances: dict[str, ProviderSession] = {}
        bound_tools: dict[str, BoundTool] = {}
        try:
            for name in names:
                tool = self._tools[name]
                filled = given(kwargs, name, "execute_kwargs")
                provider = tool.provider
                try:
                    with _naming(episode_id):
                        tool.definition.check_fill(filled)
                        if provider.name not in instances:
                            create_kwargs = given(kwargs, provider.name, "create_kwargs")
                            instances[provider.name] = await self._instance(provider, create_kwargs)
                except ToolError as error:
                    raise ToolFailure(f"{episode_id}: {provider.name}: {text_of(error)}") from error
                bound_tools[name] = BoundTool(tool, instances[provider.name], filled)
        except BaseException:
            await self._close_all(instances)
            raise
        return bound_tools

    async def _instance(self, provider: ToolProvider, create_kwargs: Kwargs) -> ProviderSession:
        making = asyncio.create_task(guarded(provider.name, provider.open(create_kwargs)), name=f"make-{provider.name}")
        return cast(ProviderSession, await self._within(making, provider.name, "making it took"))

    def _expire(self, session_id: str) -> None:
        log.warning(
            "the session of episode %s reached the end of its lifetime and is closed", self._open[session_id].episode_id
        )
        self._begin_end(session_id)

    def _begin_end(self, session_id: str) -> None:
        task = asyncio.create_task(self.close(session_id), name="close-session")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _run(self, session: Session, bound: BoundTool, arguments: Mapping[str, Any]) -> Answer:
        work = self._started(session, bound.name, bound.session.call(bound.name, arguments, bound.filled))
        try:
            return answer_of(bound.name, await self._within(work, bound.name, "the call took"))
        except ToolError as error:
            return for_model(bound.name, error)
        except ToolFailure as error:
            if session.closed and work.cancelled():
                raise _closed() from error
            raise

    def _started(self, session: Session, name: str, work: Awaitable[object]) -> asyncio.Task[object]:
        """Starts work of a tool, which is cancelled when the session ends."""
        task = asyncio.create_task(guarded(name, work), name=name)
        session.running.add(task)
        task.add_done_callback(session.running.discard)
        return task

    async def _within(self, work: asyncio.Task[object], name: str, activity: str) -> object:
        """Awaits a tool's work with the time limit of a call; a tool that ignores its cancellation is abandoned."""
        work.add_done_callback(_retrieved)
        try:
            done, _ = await asyncio.wait({work}, timeout=self._call_seconds)
        finally:
            work.cancel()  # no effect on finished work
        if not done:
            raise ToolFailure(f"{name}: {activity} longer than {self._call_seconds:g} s", code="tool_deadline")
        if work.cancelled():
            raise ToolFailure(f"{name}: cancelled itself")
        return work.result()

    async def _end(self, session: Session) -> None:
        session.closed = True
        session.timer.cancel()
        session.making.cancel()  # no effect on created tools; partially created ones are closed there
        await asyncio.wait({session.making})
        running = set(session.running)
        for work in running:
            work.cancel()
        if running:
            await asyncio.wait(running, timeout=self._call_seconds)
        if _succeeded(session.making):
            await self._close_all(
                {bound.tool.provider.name: bound.session for bound in session.making.result().values()}
            )

    async def _close_all(self, instances: Mapping[str, ProviderSession]) -> None:
        closing = [
            asyncio.create_task(self._close_one(name, instance), name=f"close-{name}")
            for name, instance in instances.items()
        ]
        if closing:
            await asyncio.wait(closing)

    async def _close_one(self, name: str, instance: ProviderSession) -> None:
        work = asyncio.create_task(guarded(name, instance.close()), name=f"close-{name}")
        try:
            await self._within(work, name, "closing it took")
        except (ToolError, KestrlError) as error:
            self.close_errors += 1
            log.error("tool %s could not be closed: %s", name, text_of(error))


@contextmanager
def _naming(episode_id: str) -> Generator[None]:
    """Adds the episode to the message of a failure."""
    try:
        yield
    except ToolFailure as error:
        text = f"{episode_id}: {error}"
        raise ToolFailure(text, code=error.code, retryable=error.retryable, boundary=error.boundary) from error


def _succeeded(work: asyncio.Task[Any]) -> bool:
    return not work.cancelled() and work.exception() is None


def _closed() -> KestrlError:
    return KestrlError("the session was closed", code="unknown_session", retryable=True)


def _retrieved(work: asyncio.Task[object]) -> None:
    """Retrieves the exception of abandoned work, which `guarded` has logged, so that asyncio does not report it."""
    if not work.cancelled():
        work.exception()
