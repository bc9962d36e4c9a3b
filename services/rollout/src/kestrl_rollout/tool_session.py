"""Calling tools: what the job offers, and one session with them per episode."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kestrl import rpc
from kestrl.api.tools.v1 import tools_pb2 as pb
from kestrl.episode import CallOutcome, Scenario
from kestrl.errors import ToolFailure, UserInputError
from kestrl.formats import Schemas
from kestrl.rpc.codec import dump_json
from kestrl.tools import ToolSchema
from kestrl_rollout.chat import Chat
from kestrl_rollout.toolset import NO_TOOLS, ToolSet

SERVICE = "kestrl.api.tools.v1.ToolService"
LIFETIME_SLACK = 30.0
"""Seconds a session outlives its episode's deadline at the tool service, for the case that this worker is gone."""
ID_BYTES = 24
"""Of chance in a session's id: nobody guesses it."""
RPC_SLACK = 5.0
"""Seconds by which the wire's deadline is later than ours, so that ours decides and says which one it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The tools of one episode."""

    tools: tuple[ToolSchema, ...] = ()
    toolset: ToolSet = NO_TOOLS
    names: tuple[str, ...] = ()
    has_state: bool = False
    """Whether an environment among them has a state for the reward."""

    @property
    def schemas(self) -> Schemas:
        """What the parameters of each tool are, by its name."""
        return {tool.name: tool.parameters for tool in self.tools}


def unrendered(text: str, names: Sequence[str]) -> str | None:
    """Why the model could not know of some tools, if so: the prompt does not name them."""
    absent = [name for name in names if name not in text]
    if not absent:
        return None
    return (
        f"spec.tools: the chat template does not render {', '.join(absent)}, so the model would never call "
        f"{'them' if len(absent) > 1 else 'it'}; name a template that renders tools with spec.agent.template, or describe "
        "each tool by its name in the prompt"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What a tool said."""

    outcome: CallOutcome
    text: str
    final: bool
    data: Mapping[str, Any]


def expanded(names: Sequence[str], environments: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The tools that a row names, an environment's name standing for all of its tools."""
    return tuple(dict.fromkeys(tool for name in names for tool in environments.get(name, [name])))


class Toolbox:
    """The tool service, as this worker uses it."""

    def __init__(self, service: rpc.Bundle, chat: Chat, *, seconds: float) -> None:
        self._service = service
        self._chat = chat
        self._seconds = seconds
        self._listed: tuple[ToolSchema, ...] | None = None
        self._with_state: frozenset[str] = frozenset()
        """Tools whose environment has a state for the reward."""
        self._environments: dict[str, list[str]] = {}
        """The tools of each environment."""
        self._offers: dict[tuple[str, ...] | None, Offer] = {}

    async def offer(self, scenario: Scenario) -> Offer:
        """The tools that the scenario offers, with what the chat template needs of them.

        Raises:
            UserInputError: The scenario names a tool that the job does not have.
            FailureError: The tool service cannot be asked.
        """
        wanted = None if scenario.tools is None else tuple(scenario.tools)
        if wanted in self._offers:
            return self._offers[wanted]
        if self._listed is None:
            self._listed = await self._list()
        by_name = {tool.name: tool for tool in self._listed}
        names = tuple(by_name) if wanted is None else expanded(wanted, self._environments)
        for name in names:
            if name not in by_name:
                raise UserInputError(
                    f"scenario {scenario.id}: tools: the job has no tool {name!r}; it has: {', '.join(by_name) or 'none'}",
                    code="unknown_tool",
                )
        tools = tuple(by_name[name] for name in names)
        offer = Offer(
            tools=tools,
            toolset=self._chat.toolset([tool.to_openai() for tool in tools]),
            names=names,
            has_state=not self._with_state.isdisjoint(names),
        )
        if len(self._offers) < 256:  # data sets offer few combinations; a pathological one is only slower
            self._offers[wanted] = offer
        return offer

    async def _list(self) -> tuple[ToolSchema, ...]:
        answer = await self._service.call(
            "ListTools", pb.ListToolsRequest(), pb.ListToolsResponse, timeout=self._seconds, wait=True
        )
        for tool in answer.tools:
            if tool.environment:
                self._environments.setdefault(tool.environment, []).append(tool.name)
        self._with_state = frozenset(tool.name for tool in answer.tools if tool.has_state)
        return tuple(
            ToolSchema(
                name=tool.name, description=tool.description, parameters=json.loads(tool.parameters_json or "{}")
            )
            for tool in answer.tools
        )

    def session(self, episode_id: str, scenario: Scenario, names: Sequence[str], *, seconds: float) -> ToolSession:
        """A session for an episode; opened by its first call."""
        opening = pb.Opening(
            episode_id=episode_id,
            tools=names,
            tools_kwargs_json=dump_json(scenario.tools_kwargs),
            lifetime=seconds + LIFETIME_SLACK,
        )
        return ToolSession(self._service, opening, seconds=self._seconds)


class ToolSession:
    """One episode's instances of its tools."""

    def __init__(self, service: rpc.Bundle, opening: pb.Opening, *, seconds: float) -> None:
        self._service = service
        self._seconds = seconds
        self._id = ""
        self._opening: pb.Opening | None = opening
        """Goes with every call until one was answered: those of one turn do not wait for each other."""

    @property
    def opened(self) -> bool:
        """Whether the tools are there for certain."""
        return self._opening is None

    @property
    def used(self) -> bool:
        """Whether the service may hold anything of it."""
        return bool(self._id)

    async def reachable(self) -> None:
        """Waits for the service, if it is not there: the caller bounds it."""
        await self._service.ready()

    async def call(self, name: str, arguments: Mapping[str, Any], *, seconds: float) -> ToolAnswer:
        """Calls a tool; the first call has the tools made.

        Raises:
            FailureError: A tool cannot be made, or broke, or the service cannot be reached.
            ToolFailure: The service answered what cannot be read.
        """
        self._id = self._id or secrets.token_urlsafe(ID_BYTES)
        request = pb.CallRequest(
            session_id=self._id, name=name, arguments_json=dump_json(arguments), opening=self._opening
        )
        answer = await self._service.call("Call", request, pb.CallResponse, timeout=seconds + RPC_SLACK)
        self._opening = None
        try:
            data: dict[str, Any] = json.loads(answer.data_json or "{}")
            return ToolAnswer(outcome=CallOutcome(answer.outcome), text=answer.text, final=answer.final, data=data)
        except ValueError as error:
            raise ToolFailure(f"tools: the answer of {name!r} cannot be read: {error}", code="bad_answer") from error

    async def state(self, *, seconds: float) -> Mapping[str, Any]:
        """The final state of the episode's environments; they are made if no call has made them.

        Raises:
            FailureError: One cannot be made or asked, or the service cannot be reached.
            ToolFailure: The service answered what cannot be read.
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
        """Ends the session, if there may be one.

        Raises:
            FailureError: The service cannot be reached; it will end the session by itself after its lifetime.
        """
        if not self._id:
            return
        session, self._id = self._id, ""
        await self._service.call("Close", pb.CloseRequest(session_id=session), pb.CloseResponse, timeout=self._seconds)
