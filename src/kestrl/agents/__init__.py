"""Agent loops: code that decides when the model generates, which tools run, and when the episode ends.

A loop is an `async` function of a `Conversation`, or a class with `async def run(self, conversation)`; one instance is
made per episode, with the manifest's `agent.config` as keyword arguments (those of a function stand beside the
conversation). Nothing needs to be subclassed. The built-in `tool_agent` in full:

    async def run(self, conversation: Conversation) -> None:
        while reply := await conversation.generate():
            if reply.calls:
                await conversation.call_tools(reply.calls)
            elif not await conversation.act(reply.content):
                return

A loop may return the episode's reward, a finite number or a `Score`: it is recorded as `Episode.loop_reward`, and the
rule `loop_reward` makes it a component of the reward.

The conversation owns the tokens: a loop never renders history and never sees a mask. A failure of the platform (an
engine, a tool, a deadline) is raised as a `KestrlError` and ends the episode as failed even if the loop catches it; an
exception of the loop itself is a failure with boundary `user_code`. Neither affects the other episodes of the group.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kestrl.episode import CallOutcome, Json, Scenario, StopReason, ToolCall
from kestrl.errors import Boundary, KestrlError
from kestrl.rewards import Score
from kestrl.tools import ToolSchema

__all__ = [
    "AgentLoop",
    "Call",
    "Completion",
    "Conversation",
    "Endpoint",
    "LimitReached",
    "Limits",
    "Loop",
    "Reply",
    "Tokenizer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call as the model wrote it. `call_tools` answers a malformed one with how to fix it."""

    name: str
    """Empty when it could not be read."""
    arguments: Mapping[str, Json] | None
    raw: str
    """Text between the markers of the call."""
    problem: CallOutcome | None = None
    """Why it cannot be dispatched; None when it can."""
    message: str = ""
    """Message to the model about the problem."""
    id: str = ""
    """Id that the model gave the call, in formats that have one; its result repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn of the model."""

    index: int
    text: str
    """All text of the turn, reasoning and calls included."""
    content: str
    """Text of the turn without reasoning and calls."""
    calls: Sequence[Call]
    finish_reason: str
    """`stop`, or `length` when a limit cut the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens as returned by the engine."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    policy: str
    """Version name reported by the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An episode by URL, for a program that the loop starts."""

    base_url: str
    """Ends with `/v1`, as clients of OpenAI's API have it."""
    api_key: str = field(repr=False)
    """The episode's own: it samples and calls tools for this episode until its end, and can do nothing else."""

    @property
    def mcp_url(self) -> str:
        """URL at which a client of MCP, with the same key as `Authorization: Bearer`, calls the episode's tools."""
        return f"{self.base_url.removesuffix('/v1')}/mcp"


class LimitReached(KestrlError):
    """A limit of the episode leaves no token to sample. Not a failure: if it is not caught, the episode ends with the
    stop reason of that limit.
    """

    boundary = Boundary.POLICY
    code = "limit_reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an episode. The conversation enforces them."""

    max_turns: int
    max_tokens: int
    """Maximum sampled tokens of the episode."""
    max_tokens_per_turn: int
    """Maximum sampled tokens of one turn; 0 means that only `max_tokens` applies."""
    context_length: int
    """Maximum tokens of one sequence, prompt included."""
    temperature: float
    top_p: float = 1.0
    """Below 1 only in evaluations, which may sample from the most probable tokens alone."""
    top_k: int = 0
    """Above 0 only in evaluations."""


class Tokenizer(Protocol):
    """The model's tokenizer, for loops that handle tokens themselves. A subset of transformers' names and meanings."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...
    def convert_tokens_to_ids(self, token: str) -> int | None: ...
    @property
    def tool_call_format(self) -> str:
        """Name of the format in which the model writes tool calls."""
        ...

    def read_turn(
        self, token_ids: Sequence[int], schemas: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str, Sequence[Call]]:
        """Answer and tool calls of a turn.

        Args:
            token_ids: The sampled tokens.
            schemas: JSON Schema of the parameters of each tool offered, by name.
        """
        ...

    def continue_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids that follow the model's finished turn when these messages come next, up to the start of its next
        turn.
        """
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        """The conversation as token ids. The content of messages and tools is encoded without control tokens."""
        ...

    def extend_chat(
        self,
        before: Sequence[Mapping[str, Any]],
        after: Sequence[Mapping[str, Any]],
        history: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids that follow `history` when `before`, which ends with the assistant's turn, becomes `after`.

        Raises:
            KestrlError: The template rewrites history, so there is no such extension.
        """
        ...


class Conversation(Protocol):
    """An episode in progress: the interface of an agent loop."""

    @property
    def scenario(self) -> Scenario: ...
    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The tools offered to the model."""
        ...

    @property
    def limits(self) -> Limits: ...
    @property
    def seed(self) -> int:
        """Seed of the episode, for any randomness of the loop."""
        ...

    @property
    def deadline(self) -> float:
        """Unix seconds at which the episode's deadline passes."""
        ...

    @property
    def limit(self) -> StopReason | None:
        """The limit of the episode that was reached first, if any: no call samples after it."""
        ...

    @property
    def messages(self) -> Sequence[Mapping[str, Json]]:
        """The conversation so far, as text."""
        ...

    @property
    def metrics(self) -> MutableMapping[str, float]:
        """Metrics of the episode; a loop may add its own."""
        ...

    @property
    def info(self) -> MutableMapping[str, Json]:
        """Facts of the episode for rules and people, recorded as `Episode.info`; a loop may add its own."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def generate(self) -> Reply | None:
        """Next turn of the model, or None when the episode is over because a limit is reached or a tool ended it.

        Raises:
            KestrlError: The engine failed or a deadline passed.
        """
        ...

    async def call_tools(self, calls: Sequence[Call]) -> Sequence[ToolCall]:
        """Runs the calls of a turn concurrently and appends their results in the order of the calls.

        Raises:
            KestrlError: A tool failed or a deadline passed. Mistakes of the model are not raised but returned to it as
                results.
        """
        ...

    async def act(self, text: str) -> bool:
        """Gives the job's environment a turn of the model as its action, and appends what it shows as a user message;
        a wrong action is answered with how to fix it.

        Returns:
            Whether the episode goes on: False at its end, and where no environment takes turns.

        Raises:
            KestrlError: The environment failed or a deadline passed.
        """
        ...

    def append_user(self, text: str) -> None:
        """Appends a user message."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt that the next turn would have."""
        ...

    def compact(self, text: str) -> None:
        """Goes on in a new row without all that was said: its prompt is that of the scenario with this text behind it,
        such as a summary. The row that was called last is the main row.
        """
        ...

    def stop(self, reason: StopReason) -> None:
        """Sets the stop reason when the loop ends the episode. Default: `answered`, or the limit that was reached."""
        ...

    async def generate_tokens(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Samples a completion of the given prompt, for loops that handle tokens themselves.

        A prompt that begins with a row extends it, the longest if there are several; any other prompt begins a new row.
        Several calls may run at once: each holds its tokens of the budget, `max_tokens` or the limit of a turn, and one
        for which too few are left waits until others have ended. The seed of a call depends on the episode's, its
        prompt, and how many calls of the same prompt came before. Must not be mixed with `generate`.

        Raises:
            LimitReached: A limit of the episode leaves no token.
            KestrlError: As `generate`.
        """
        ...

    def serve(self) -> AbstractAsyncContextManager[Endpoint]:
        """Serves the episode by URL while the context is open: calls of a client are those of `generate_tokens`."""
        ...

    def keep(self, token_ids: Sequence[int], mask: Sequence[int]) -> None:
        """Restricts training to this sequence, for loops that handle tokens themselves. Its row is the main row.

        Raises:
            UserCodeError: The mask is 1 on a token that was not sampled there.
        """
        ...

    def set_main(self, token_ids: Sequence[int]) -> None:
        """Names the main row, which rules, judges and `final_text` read: the one that begins with this sequence, or
        that it begins with. Default: of the first conversation with more than one call, or else of the last one, the
        row that was called last.

        Raises:
            UserCodeError: No row is of this sequence.
        """
        ...


class AgentLoop(Protocol):
    """A loop as a class."""

    async def run(self, conversation: Conversation) -> float | Score | None:
        """Runs one episode to its end; optionally returns its reward."""
        ...


Loop = Callable[[Conversation], Awaitable[object]]
"""An agent loop as a function: the form into which the worker converts both forms."""
