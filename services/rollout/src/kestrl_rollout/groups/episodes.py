"""Running one episode from its scenario to its record. Every error becomes a typed failure on that record."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kestrl._shared.telemetry import Unended, current_trace_id, span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import ChatModel
from kestrl._shared.user_tasks import enter_user_code
from kestrl.agents import LimitReached
from kestrl.episode import Episode, Json, Scenario, StopReason
from kestrl.errors import Boundary, Failure, KestrlError, UserCodeError, UserInputError, described
from kestrl.tools import SandboxInUse
from kestrl_rollout.agents.loading import EnvironmentResult, LoadedLoop, Loops
from kestrl_rollout.conversation.episode_conversation import EpisodeConversation
from kestrl_rollout.conversation.tool_calls import ToolLimits
from kestrl_rollout.conversation.tool_session import OfferedTools, Toolbox, ToolSession, unrendered
from kestrl_rollout.deadlines import GroupClock, Scope, Waiting, deadline, now
from kestrl_rollout.engine.client import EngineClient
from kestrl_rollout.engine.engine_session import EngineSession
from kestrl_rollout.engine.engine_set import EngineSet, EngineSets
from kestrl_rollout.gateway.server import Gateway
from kestrl_rollout.groups.loop_metrics import REWARD, LoopMetrics, checked_info, returned_reward
from kestrl_rollout.requests import GroupRequest

log = logging.getLogger(__name__)
_Contained = tuple[object, BaseException | None]
CANCEL_SECONDS = 2.0
"""How long a user's loop may take to end after its cancellation."""
MAX_ABANDONED = 64
"""Number of still running cancelled loops from which on no user's loop is started."""


@dataclass(slots=True)
class _Attempt:
    """State of a running episode."""

    id: str
    index: int
    seed: int
    waiting: Waiting
    loop: LoadedLoop | None = None
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    """Time when it got its slot; if it never did, when it began to wait."""
    conversation: EpisodeConversation | None = None
    engine: EngineSession | None = None
    tools: ToolSession | None = None
    tool_boundary: Boundary = Boundary.TOOL
    """Where failures of calls come from: tools, or the job's environment."""
    has_state: bool = False
    """Whether an environment has a state for the reward."""
    reward: float | None = None
    """The reward that the loop returned."""
    environments: Mapping[str, Json] = field(default_factory=dict[str, Any])
    info: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """What the loop reports for rules and people."""


class EpisodeRunner:
    """Runs episodes with one model, one loop and one set of services."""

    def __init__(
        self,
        *,
        component: str,
        chat_model: ChatModel,
        loops: Loops,
        client: EngineClient,
        toolbox: Toolbox,
        tool_limits: ToolLimits,
        gateway: Gateway,
        concurrency: int,
        describes_tools: bool = False,
    ) -> None:
        self._component = component
        self._chat_model = chat_model
        self._loops = loops
        self._client = client
        self._toolbox = toolbox
        self._tool_limits = tool_limits
        self._gateway = gateway
        self._describes_tools = describes_tools
        self._slots = asyncio.Semaphore(concurrency)
        self._metrics = LoopMetrics()
        self._closing: set[asyncio.Task[None]] = set()
        self._abandoned: set[asyncio.Task[_Contained]] = set()
        """Tasks of loops that were cancelled and still run."""
        self.engine_sets = EngineSets()

    @property
    def tool_digests(self) -> Mapping[str, str]:
        """SHA-256 of what each tool server lists, by its name; empty until the tools were listed."""
        return self._toolbox.digests

    @property
    def sandboxes(self) -> Mapping[str, SandboxInUse]:
        """Sandboxes of tools that run code, by tool; empty until the tools were listed."""
        return self._toolbox.sandboxes

    async def described_tools(self, scenario: Scenario) -> list[Mapping[str, Json]]:
        """Schemas of a scenario's tools for the judge; none if it does not show them, or they are not known."""
        if not self._describes_tools:
            return []
        try:
            offered = await self._toolbox.offered_tools(scenario)
        except KestrlError:  # then no episode could begin, and each has this failure
            return []
        return [tool.to_openai() for tool in offered.tools]

    async def run(self, request: GroupRequest, index: int, clock: GroupClock, spans: Unended) -> Episode:
        """Runs episode `index` of a group, whose span `spans` gets by the episode's id. Raises only on cancellation."""
        attempt = _Attempt(f"{request.id}/{index}", index, request.seed + index, Waiting())
        attributes = {Attr.EPISODE_ID: attempt.id, Attr.SCENARIO_ID: request.scenario.id}
        with span(SpanName.EPISODE, attributes, unended=spans, key=attempt.id) as current:
            failure = await self._settle(request, attempt, clock)
            conversation = attempt.conversation
            stopped = StopReason.ANSWERED if conversation is None else conversation.finish()
            stop_reason = stopped if failure is None else StopReason.FAILED
            current.set_attribute(Attr.STOP_REASON, stop_reason)
            if failure is not None:
                current.set_attributes({Attr.FAILURE_BOUNDARY: failure.boundary, Attr.ERROR_TYPE: failure.code})
            return Episode(
                id=attempt.id,
                group_id=request.id,
                scenario_id=request.scenario.id,
                index=index,
                seed=attempt.seed,
                rows=() if conversation is None else conversation.rows(),
                turns=() if conversation is None else tuple(conversation.turns),
                tool_calls=() if conversation is None else tuple(conversation.tool_calls),
                messages=request.scenario.messages if conversation is None else conversation.main_messages,
                main_row=None if conversation is None or conversation.main is None else conversation.main.row,
                stop_reason=stop_reason,
                failure=failure,
                policy=request.policy,
                engine="" if attempt.engine is None else attempt.engine.engine,
                started_at=attempt.started_at,
                seconds=time.monotonic() - attempt.started,
                trace_id=current_trace_id(),
                metrics=self._metrics_of(attempt),
                loop_reward=attempt.reward,
                environments=attempt.environments,
                info=attempt.info,
            )

    def _metrics_of(self, attempt: _Attempt) -> dict[str, float]:
        if attempt.conversation is None or attempt.loop is None:
            return {}
        return self._metrics.usable(attempt.loop.title, attempt.conversation.metrics)

    async def _settle(self, request: GroupRequest, attempt: _Attempt, clock: GroupClock) -> Failure | None:
        """Runs to the end; returns the failure, or None."""
        try:
            async with deadline(Scope.GROUP, clock.begin_by, attempt.waiting):
                await self._slots.acquire()
            try:
                clock.begun()
                attempt.started_at, attempt.started = time.time(), time.monotonic()
                async with deadline(Scope.EPISODE, now() + request.deadlines.episode, attempt.waiting):
                    await self._open(request, attempt)
                    await self._drive(attempt)
                    await self._take_state(attempt, request.deadlines.tool)
            finally:
                self._leave(attempt)
        except KestrlError as error:
            return error.failure(component=self._component)
        except Exception as error:
            # An internal error in one episode must not affect the others of its group.
            log.exception("episode %s: unexpected error", attempt.id)
            return KestrlError(described(error), code="internal").failure(component=self._component)
        return None

    async def _open(self, request: GroupRequest, attempt: _Attempt) -> None:
        scenario = request.scenario
        loop = attempt.loop = self._loops.of(scenario.agent)
        with attempt.waiting.on(Boundary.TOOL):
            offered = await self._toolbox.offered_tools(scenario) if loop.uses_tools else OfferedTools()
        attempt.has_state, attempt.tool_boundary = offered.has_state, offered.boundary
        names = offered.session_names
        attempt.tools = self._toolbox.session(attempt.id, scenario, names, seconds=request.deadlines.episode)
        if offered.has_prompt:
            scenario = await self._prompted(request, scenario, attempt, attempt.tools)
        if not scenario.messages and not loop.environment:
            raise UserInputError(
                f"scenario {scenario.id}: has no prompt, and no environment gives it; add one to the row",
                code="no_prompt",
            )
        if loop.built_in:  # a user's loop may write its prompts itself
            self._check_rendered(scenario, offered)
        attempt.engine = EngineSession(
            episode_id=attempt.id,
            engines=self._engines(request),
            limits=request.limits,
            client=self._client,
            sessions=self.engine_sets.sessions,
        )
        attempt.conversation = EpisodeConversation(
            scenario=scenario,
            seed=attempt.seed,
            limits=request.limits,
            deadlines=request.deadlines,
            chat_model=self._chat_model,
            engine=attempt.engine,
            offered=offered,
            tools=attempt.tools,
            tool_limits=self._tool_limits,
            waiting=attempt.waiting,
            gateway=self._gateway,
            ends=attempt.started_at + request.deadlines.episode,
        )

    def _engines(self, request: GroupRequest) -> EngineSet:
        """The engines of the group's policy, or of the newest one if the group continues over updates."""
        if request.continuation is None:
            return self.engine_sets[request.policy_name]
        return self.engine_sets.newest(request.continuation, request.engines_revision)

    async def _prompted(
        self, request: GroupRequest, scenario: Scenario, attempt: _Attempt, tools: ToolSession
    ) -> Scenario:
        """The scenario with what its environments add to the last message."""
        deadlines = request.deadlines
        with attempt.waiting.on(attempt.tool_boundary):
            async with deadline(Scope.TURN, now() + deadlines.turn, attempt.waiting):
                await tools.reachable()  # a restarting service is not a failure of the environment
            async with deadline(Scope.TOOL, now() + deadlines.tool, attempt.waiting):
                text = await tools.prompt(seconds=deadlines.tool)
        if not text:
            return scenario
        if not scenario.messages:
            return replace(scenario, messages=({"role": "user", "content": text},))
        *before, last = scenario.messages
        return replace(scenario, messages=(*before, {**last, "content": f"{last['content']}{text}"}))

    async def _take_state(self, attempt: _Attempt, seconds: float) -> None:
        """Reads the environments' state for the reward."""
        if not attempt.has_state:
            return
        assert attempt.tools is not None
        seconds *= 1 if attempt.tools.opened else 2  # the first request also creates the environments
        with attempt.waiting.on(attempt.tool_boundary):
            async with deadline(Scope.TOOL, now() + seconds, attempt.waiting):
                attempt.environments = await attempt.tools.state(seconds=seconds)

    def _check_rendered(self, scenario: Scenario, offered: OfferedTools) -> None:
        """Refuses a prompt that does not name the offered tools. Raises UserInputError with code
        `tools_not_rendered`.
        """
        if not offered.names:
            return
        messages = [Message(role=message["role"], text=message["content"]) for message in scenario.messages]
        problem = unrendered(self._chat_model.chat.text(messages, offered.toolset), offered.names)
        if problem is not None:
            raise UserInputError(f"scenario {scenario.id}: {problem}", code="tools_not_rendered")

    async def _drive(self, attempt: _Attempt) -> None:
        """Runs the loop and attributes its exceptions."""
        conversation, loop = attempt.conversation, attempt.loop
        assert conversation is not None
        assert loop is not None
        try:
            with attempt.waiting.on(loop.boundary):
                returned = await self._run_loop(loop, attempt, conversation)
        except LimitReached:
            returned = None  # the conversation has recorded which limit
        except KestrlError as error:
            raise conversation.broken or error from error.__cause__
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _raised_by_loop(loop, "CancelledError, though nothing cancelled it") from None
        except BaseException as error:
            if conversation.broken is not None:
                raise conversation.broken from error
            if loop.built_in:
                raise
            log.warning("episode %s: %s raised", attempt.id, loop.title, exc_info=error)
            raise _raised_by_loop(loop, _describe(error)) from error
        if conversation.broken is not None:
            raise conversation.broken
        if isinstance(returned, EnvironmentResult):
            attempt.environments, returned = returned.states, None
        attempt.info = checked_info(loop.title, conversation.info)
        score = returned_reward(loop.title, returned)
        if score is not None:
            attempt.reward = score.value
            conversation.metrics.update({**score.metrics, REWARD: score.value})

    async def _run_loop(self, loop: LoadedLoop, attempt: _Attempt, conversation: EpisodeConversation) -> object:
        """Runs the loop. A user's loop has its own task, so that the episode ends even if the loop ignores its
        cancellation.
        """
        if loop.built_in:
            return await loop.run(conversation)
        if len(self._abandoned) >= MAX_ABANDONED:
            raise UserCodeError(
                f"{loop.title}: {MAX_ABANDONED} episodes ignored their cancellation and still run; let "
                "asyncio.CancelledError pass",
                code="agent_hangs",
            )
        task = asyncio.create_task(_contained(loop.run(conversation)), name=f"loop-{attempt.id}")
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await self._cancel(loop, task, attempt, conversation)
            raise
        returned, error = task.result()
        if error is not None:
            raise error
        return returned

    async def _cancel(
        self, loop: LoadedLoop, task: asyncio.Task[_Contained], attempt: _Attempt, conversation: EpisodeConversation
    ) -> None:
        """Cancels a loop's task and abandons it if it does not end within `CANCEL_SECONDS`."""
        waited = attempt.waiting.boundary
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        finally:
            attempt.waiting.boundary = waited  # the deadline that passed reports what was waited for then
            if not task.done():
                log.error("episode %s: %s ignores its cancellation", attempt.id, loop.title)
                conversation.abandon(UserCodeError(f"{loop.title}: its episode is over"))

    def _leave(self, attempt: _Attempt) -> None:
        """Releases what the episode holds. Its slot is released when the tool session is closed, so that slots bound
        the sessions.
        """
        if attempt.engine is not None:
            attempt.engine.finish()
        if attempt.tools is None or not attempt.tools.used:
            self._slots.release()
            return
        task = asyncio.create_task(self._close_tools(attempt.id, attempt.tools), name=f"close-tools-{attempt.id}")
        self._closing.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        self._slots.release()

    async def _close_tools(self, episode_id: str, tools: ToolSession) -> None:
        try:
            await tools.close()
        except KestrlError as error:
            # The episode is complete; the tool service ends the session by itself after its lifetime.
            log.warning("episode %s: its tool session could not be closed: %s", episode_id, error)

    async def closed(self) -> None:
        """Waits until all tool sessions are closed."""
        if self._closing:
            await asyncio.wait(self._closing)


async def _contained(work: Awaitable[object]) -> _Contained:
    """Awaits a user's code and returns its exception: a task would let KeyboardInterrupt and SystemExit end the event
    loop.
    """
    enter_user_code()
    try:
        return await work, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised again by the caller
        return None, error


def _raised_by_loop(loop: LoadedLoop, description: str) -> UserCodeError:
    return UserCodeError(f"{loop.title}: raised {description}", code="agent_raised")


def _describe(error: BaseException) -> str:
    """The error and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{described(error)}{where}"
