"""Client of the tool service: the tools of the job, and one session per episode."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kestrl._shared import rpc
from kestrl._shared.environments import reset_arguments
from kestrl._shared.rpc.codec import sandboxes_from_proto
from kestrl._shared.text.chat import Chat
from kestrl._shared.text.toolset import NO_TOOLS, ToolSet
from kestrl.api.tools.v1 import tools_pb2 as pb
from kestrl.episode import CallOutcome, Scenario
from kestrl.episode.codec import dump_json
from kestrl.errors import Boundary, ToolFailure, UserInputError
from kestrl.formats import Schemas
from kestrl.tools import SandboxInUse, ToolSchema

SERVICE = "kestrl.api.tools.v1.ToolService"
LIFETIME_SLACK = 30.0
"""Seconds that a session lives beyond its episode's deadline in case this worker does not close it."""
ID_BYTES = 24
"""Random bytes of a session id, so that it cannot be guessed."""
RPC_SLACK = 5.0
"""Seconds by which the RPC deadline is later than the worker's, so that the worker's decides and names the scope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of one episode."""

    tools: tuple[ToolSchema, ...] = ()
    toolset: ToolSet = NO_TOOLS
    names: tuple[str, ...] = ()
    has_state: bool = False
    """Whether an environment among them has a state for the reward."""
    has_prompt: bool = False
    """Whether an environment among them may add to the prompt."""
    of_environment: bool = False
    """Whether they are those of the job's environment."""
    act: str = ""
    """The tool that takes turns without calls, which the model is not offered; empty if there is none."""

    @property
    def boundary(self) -> Boundary:
        """Where failures of calls come from."""
        return Boundary.ENVIRONMENT if self.of_environment else Boundary.TOOL

    @property
    def session_names(self) -> tuple[str, ...]:
        """The tools of the session, that of turns included."""
        return (self.act, *self.names) if self.act else self.names

    @property
    def schemas(self) -> Schemas:
        """Parameter schema of each tool by name."""
        return {tool.name: tool.parameters for tool in self.tools}


def unrendered(text: str, names: Sequence[str]) -> str | None:
    """The problem that the prompt does not name some tools, so that the model cannot call them; None if it names
    all.
    """
    absent = [name for name in names if name not in text]
    if not absent:
        return None
    return (
        f"spec.tools: the chat template does not render {', '.join(absent)}, so the model would never call "
        f"{'them' if len(absent) > 1 else 'it'}; name a template that renders "
        f"tools with spec.agent.template, or describe each tool by its name in the prompt"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """A tool's answer."""

    outcome: CallOutcome
    text: str
    final: bool
    data: Mapping[str, Any]


def expanded(names: Sequence[str], environments: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The tools of a row; an environment's name stands for all of its tools."""
    return tuple(dict.fromkeys(tool for name in names for tool in environments.get(name, [name])))


class ToolList:
    """The tools of the job, and sessions with them."""

    def __init__(self, service: rpc.Bundle, *, seconds: float) -> None:
        self._service = service
        self._seconds = seconds
        self._listed: dict[str, ToolSchema] | None = None
        self._with_state: frozenset[str] = frozenset()
        """Tools whose environment has a state for the reward."""
        self._with_prompt: frozenset[str] = frozenset()
        """Tools whose environment may add to the prompt."""
        self.digests: dict[str, str] = {}
        """SHA-256 of what each tool server lists, by its name; empty until the tools were listed."""
        self.sandboxes: dict[str, SandboxInUse] = {}
        """Sandboxes of tools that run code, by tool, as last reported by the service."""
        self._environments: dict[str, list[str]] = {}
        """The tools of each environment."""
        self.environment = ""
        """Name of the job's environment; empty if it has none."""
        self.act = ""
        """Its tool that takes turns without calls; empty if there is none."""

    async def of(self, scenario: Scenario) -> dict[str, ToolSchema]:
        """The tools of a scenario by name.

        Raises:
            UserInputError: The scenario names a tool that the job does not have.
            FailureError: The tool service cannot be reached.
        """
        if self._listed is None:
            self._listed = await self._list()
        schemas = self._listed
        restricted = scenario.tools is not None and not self.environment
        names = expanded(tuple(scenario.tools or ()), self._environments) if restricted else tuple(schemas)
        for name in names:
            if name not in schemas:
                raise UserInputError(
                    f"scenario {scenario.id}: tools: the job has no tool {name!r}; "
                    f"it has: {', '.join(schemas) or 'none'}",
                    code="unknown_tool",
                )
        return {name: schemas[name] for name in names}

    def has_state(self, names: Iterable[str]) -> bool:
        """Whether an environment among these tools has a state for the reward."""
        return bool(self.environment) or not self._with_state.isdisjoint(names)

    def has_prompt(self, names: Iterable[str]) -> bool:
        """Whether an environment among these tools may add to the prompt."""
        return bool(self.environment) or not self._with_prompt.isdisjoint(names)

    async def _list(self) -> dict[str, ToolSchema]:
        answer = await self._service.call(
            "ListTools", pb.ListToolsRequest(), pb.ListToolsResponse, timeout=self._seconds, wait=True
        )
        self.digests = dict(answer.digests)
        self._report(sandboxes_from_proto(answer.sandboxes))
        for tool in answer.tools:
            if tool.environment:
                self._environments.setdefault(tool.environment, []).append(tool.name)
        self.environment = next((tool.environment for tool in answer.tools if tool.of_environment), "")
        self.act = next((tool.name for tool in answer.tools if tool.acts), "")
        self._with_state = frozenset(tool.name for tool in answer.tools if tool.has_state)
        self._with_prompt = frozenset(tool.name for tool in answer.tools if tool.has_prompt)
        return {
            tool.name: ToolSchema(
                name=tool.name, description=tool.description, parameters=json.loads(tool.parameters_json or "{}")
            )
            for tool in answer.tools
            if not tool.acts
        }

    def _report(self, sandboxes: dict[str, SandboxInUse]) -> None:
        self.sandboxes = sandboxes

    def _kwargs(self, scenario: Scenario) -> Mapping[str, Any]:
        """What a row sets by name; the environment of the job is reset with its columns."""
        if not self.environment:
            return scenario.tools_kwargs
        return {self.environment: {"create_kwargs": reset_arguments(scenario)}}

    def session(self, episode_id: str, scenario: Scenario, names: Sequence[str], *, seconds: float) -> ToolSession:
        """A session for an episode; its first call opens it."""
        opening = pb.Opening(
            episode_id=episode_id,
            tools=names,
            tools_kwargs_json=dump_json(self._kwargs(scenario)),
            lifetime=seconds + LIFETIME_SLACK,
            digests=self.digests,
        )
        return ToolSession(self._service, opening, seconds=self._seconds, opened=self._report)


class Toolbox:
    """The tools of the job for a chat template."""

    def __init__(self, service: rpc.Bundle, chat: Chat, *, seconds: float) -> None:
        self._list = ToolList(service, seconds=seconds)
        self._chat = chat
        self._by_names: dict[tuple[str, ...] | None, OfferedTools] = {}
        self.session = self._list.session

    @property
    def digests(self) -> Mapping[str, str]:
        """SHA-256 of what each tool server lists, by its name; empty until the tools were listed."""
        return self._list.digests

    @property
    def sandboxes(self) -> Mapping[str, SandboxInUse]:
        """Sandboxes of tools that run code, by tool; empty until the tools were listed."""
        return self._list.sandboxes

    async def offered_tools(self, scenario: Scenario) -> OfferedTools:
        """The tools of a scenario, with their tool set for the chat template.

        Raises:
            UserInputError: The scenario names a tool that the job does not have.
            FailureError: The tool service cannot be reached.
        """
        selection = None if scenario.tools is None else tuple(scenario.tools)
        if selection in self._by_names:
            return self._by_names[selection]
        tools = await self._list.of(scenario)
        offered = OfferedTools(
            tools=tuple(tools.values()),
            toolset=self._chat.toolset([tool.to_openai() for tool in tools.values()]) if tools else NO_TOOLS,
            names=tuple(tools),
            has_state=self._list.has_state(tools),
            has_prompt=self._list.has_prompt(tools),
            of_environment=bool(self._list.environment),
            act=self._list.act,
        )
        if len(self._by_names) < 256:  # bounds the cache; data sets have few combinations
            self._by_names[selection] = offered
        return offered


class ToolSession:
    """One episode's instances of its tools."""

    def __init__(
        self,
        service: rpc.Bundle,
        opening: pb.Opening,
        *,
        seconds: float,
        opened: Callable[[dict[str, SandboxInUse]], None],
    ) -> None:
        """A session that is not open yet.

        Args:
            service: The tool service.
            opening: What its first call opens it with.
            seconds: Time limit of requests that call no tool.
            opened: Called with the service's sandboxes when a call has opened the session.
        """
        self._service = service
        self._opened = opened
        self._seconds = seconds
        self._id = ""
        self._opening: pb.Opening | None = opening
        """Sent with every call until one is answered, since calls of one turn do not wait for each other."""

    @property
    def opened(self) -> bool:
        """Whether the service has confirmed the session."""
        return self._opening is None

    @property
    def used(self) -> bool:
        """Whether the service may hold the session."""
        return bool(self._id)

    async def reachable(self) -> None:
        """Waits until the service can be reached; the caller bounds the wait."""
        await self._service.ready()

    async def prompt(self, *, seconds: float) -> str:
        """Opens the session; what its environments add to the row's prompt.

        Raises:
            FailureError: An environment cannot be created or failed, or the service cannot be reached.
        """
        self._id = self._id or secrets.token_urlsafe(ID_BYTES)
        request = pb.OpenRequest(session_id=self._id, opening=self._opening)
        answer = await self._service.call("Open", request, pb.OpenResponse, timeout=seconds + RPC_SLACK)
        self._opened(sandboxes_from_proto(answer.sandboxes))
        self._opening = None
        return answer.prompt

    async def call(self, name: str, arguments: Mapping[str, Any], *, seconds: float) -> ToolAnswer:
        """Calls a tool; the first call creates the tools.

        Raises:
            FailureError: A tool cannot be created or failed, or the service cannot be reached.
            ToolFailure: The service's answer cannot be decoded.
        """
        self._id = self._id or secrets.token_urlsafe(ID_BYTES)
        request = pb.CallRequest(
            session_id=self._id, name=name, arguments_json=dump_json(arguments), opening=self._opening
        )
        answer = await self._service.call("Call", request, pb.CallResponse, timeout=seconds + RPC_SLACK)
        if self._opening is not None:
            self._opened(sandboxes_from_proto(answer.sandboxes))
        self._opening = None
        try:
            data: dict[str, Any] = json.loads(answer.data_json or "{}")
            return ToolAnswer(outcome=CallOutcome(answer.outcome), text=answer.text, final=answer.final, data=data)
        except ValueError as error:
            raise ToolFailure(f"tools: the answer of {name!r} cannot be read: {error}", code="bad_answer") from error

    async def state(self, *, seconds: float) -> Mapping[str, Any]:
        """The final state of the episode's environments; they are created if no call has created them.

        Raises:
            FailureError: An environment cannot be created or failed, or the service cannot be reached.
            ToolFailure: The service's answer cannot be decoded.
        """
        self._id = self._id or secrets.token_urlsafe(ID_BYTES)
        request = pb.GetStateRequest(session_id=self._id, opening=self._opening)
        answer = await self._service.call("GetState", request, pb.GetStateResponse, timeout=seconds + RPC_SLACK)
        self._opening = None
        try:
            return cast(dict[str, Any], json.loads(answer.state_json or "{}"))
        except ValueError as error:
            raise ToolFailure(f"tools: the environments' state cannot be read: {error}", code="bad_answer") from error

    async def close(self) -> None:
        """Ends the session if the service may hold it.

        Raises:
            FailureError: The service cannot be reached; it ends the session by itself after its lifetime.
        """
        if not self._id:
            return
        session, self._id = self._id, ""
        await self._service.call("Close", pb.CloseRequest(session_id=session), pb.CloseResponse, timeout=self._seconds)
