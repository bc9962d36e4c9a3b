"""What an agent loop is: code that decides when the model speaks, which tools run, and when the episode is over.

A loop is an `async` function of a `Conversation`, or a class with `async def run(self, conversation)`; one instance is made per
episode, with the manifest's `agent.config` as keyword arguments (those of a function stand beside the conversation). Nothing
needs to be subclassed. The whole of the built-in `tool_agent`:

    async def run(self, conversation: Conversation) -> None:
        while reply := await conversation.generate():
            if not reply.calls:
                return
            await conversation.call_tools(reply.calls)

A loop may return the episode's reward, a finite number or a `Score`: it is recorded as `Episode.loop_reward`, and the rule
`loop_reward` makes it a component of the reward.

The conversation owns the tokens: a loop never renders history and never sees a mask. What the platform breaks (an engine, a
tool, a deadline) is raised as a `KestrlError` and ends the episode as failed whatever the loop does about it; what a loop
itself raises is a failure with boundary `user_code`. Neither touches the other episodes of the group.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kestrl.episode import CallOutcome, Json, Scenario, StopReason, ToolCall
from kestrl.errors import Boundary, KestrlError
from kestrl.rewards import Score
from kestrl.tools import ToolSchema

__all__ = ["AgentLoop", "Call", "Completion", "Conversation", "LimitReached", "Limits", "Loop", "Reply", "Tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call as the model wrote it, malformed ones too: `call_tools` answers those with the mend."""

    name: str
    """Empty when it could not be read."""
    arguments: Mapping[str, Json] | None
    raw: str
    """What stood between the markers."""
    problem: CallOutcome | None = None
    """Why it cannot be dispatched; None when it can."""
    message: str = ""
    """What the model is told about the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn of the model."""

    index: int
    text: str
    """Everything it wrote, reasoning and calls included."""
    content: str
    """Without reasoning and calls."""
    calls: Sequence[Call]
    finish_reason: str
    """`stop`, or `length` when a limit cut it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens as the engine gave them."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    policy: str
    """The version name the engine said it used."""


class LimitReached(KestrlError):
    """A limit of the episode leaves no token to sample. Not a failure: uncaught, it ends the episode as that limit says."""

    boundary = Boundary.POLICY
    code = "limit_reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an episode may use. The conversation keeps them by itself."""

    max_turns: int
    max_tokens: int
    """Sampled tokens of the episode."""
    max_tokens_per_turn: int
    """0 leaves only `max_tokens`."""
    context_length: int
    """Tokens of one sequence, prompt included."""
    temperature: float


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
        """The ids that follow the model's finished turn when these messages come next, up to where its next turn begins."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        """The conversation as token ids. What messages and tools say is encoded without control tokens."""
        ...

    def extend_chat(
        self,
        before: Sequence[Mapping[str, Any]],
        after: Sequence[Mapping[str, Any]],
        history: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The ids that follow `history` when `before`, which ends with the assistant's turn, becomes `after`.

        Raises:
            KestrlError: The template rewrites history, so there is no such extension.
        """
        ...


class Conversation(Protocol):
    """An episode in progress, as its loop sees it."""

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
        """The episode's seed: draw whatever the loop randomises from it."""
        ...

    @property
    def messages(self) -> Sequence[Mapping[str, Json]]:
        """The conversation so far, as text."""
        ...

    @property
    def metrics(self) -> MutableMapping[str, float]:
        """Facts of the episode; a loop may add its own."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def generate(self) -> Reply | None:
        """The model's next turn, or None when the episode is over: a limit is reached or a tool has ended it.

        Raises:
            KestrlError: The engine broke or a deadline passed.
        """
        ...

    async def call_tools(self, calls: Sequence[Call]) -> Sequence[ToolCall]:
        """Runs the calls of a turn at once and appends their results, in the order of the calls.

        Raises:
            KestrlError: A tool broke or a deadline passed. The model's own mistakes are not raised: they become its results.
        """
        ...

    def append_user(self, text: str) -> None:
        """Says something to the model."""
        ...

    def stop(self, reason: StopReason) -> None:
        """Names why the episode is over when the loop decides it; otherwise it is `answered`, or the limit that was reached."""
        ...

    async def generate_tokens(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        """Samples behind a prompt of the loop's own making, for loops that handle tokens themselves.

        A prompt that begins with the row so far extends it; any other begins a new row. Not to be mixed with `generate`.

        Raises:
            LimitReached: A limit of the episode leaves no token.
            KestrlError: As `generate`.
        """
        ...

    def keep(self, token_ids: Sequence[int], mask: Sequence[int]) -> None:
        """Trains only on this sequence, for loops that handle tokens themselves.

        Raises:
            UserCodeError: The mask is 1 on a token that was not sampled there.
        """
        ...


class AgentLoop(Protocol):
    """A loop as a class."""

    async def run(self, conversation: Conversation) -> float | Score | None:
        """Runs one episode to its end; returns its reward, if the loop is what knows it."""
        ...


Loop = Callable[[Conversation], Awaitable[object]]
"""A loop as a function: what the worker makes of either form."""
