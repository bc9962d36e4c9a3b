"""Engine dialects: how one kind of inference engine is started, and what its requests and answers look like.

A dialect is pure: it builds command lines and requests and reads answers, and never sends anything. The plan starts
engines with it, rollout workers sample through it, engine agents load and verify adapters through it, and the guard of
an engine's routes gets its lists from it. `kestrl.testing.engines.check_engine` is its conformance suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

__all__ = [
    "POLICY_HEADER",
    "Command",
    "EngineDialect",
    "EngineName",
    "Generate",
    "Generated",
    "Launch",
    "Load",
    "Metrics",
    "Option",
    "Request",
    "Route",
    "SleepRoutes",
    "Witness",
    "Work",
]

EngineName = Literal["vllm", "sglang"]
"""Engines of `inference.engine`; `kestrl.engines.registry` has their dialects."""
Witness = Literal["engine", "guard"]
"""What names the policy of a completion: the engine in its answer, or the guard inside its server in a header."""
POLICY_HEADER = "x-kestrl-policy"
"""Header with which a guard names the policy that a request was given to."""
DRAINING = "EngineDraining"
"""Type of the error with which the guard of a draining engine refuses a request, with status 503."""
Option = str | int | float | bool
Route = tuple[str, str]
"""HTTP method and path."""


class Request(NamedTuple):
    """An HTTP request to an engine."""

    method: str
    path: str
    body: bytes = b""
    """JSON; empty for none."""


class SleepRoutes(NamedTuple):
    """Requests to an engine that can give its device up and keep its weights in host memory."""

    sleep: Request
    """Answered when the memory is free."""
    wake: Request
    """Answered when the engine has its memory again."""
    state: Request
    """Answered with `{"is_sleeping": true}` or false."""


class EngineMemory(NamedTuple):
    """Memory of an engine that shares a device with the learner."""

    utilization: float
    """Share of the device's memory."""
    cache_bytes: int
    """Bytes of the KV cache on each device, so that the engine does not measure what is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What an engine is started with."""

    model: str
    """Folder or name of the base model."""
    name: str
    """Name under which the base model is served."""
    dtype: str
    context_length: int
    rank: int
    """Largest rank of an adapter."""
    slots: int
    """Adapter versions that one batch may use."""
    cpu: bool
    """Whether it runs without an accelerator."""
    threads: int
    """Threads on a CPU."""
    devices: int
    """Accelerators of a replica."""
    host: str
    port: int
    work_dir: str
    """Folder for the engine's caches."""
    otlp: str | None
    """OTLP endpoint of traces."""
    options: Mapping[str, Option]
    """The user's options, which come before all others."""
    memory: EngineMemory | None = None
    """None: the engine takes what its own default is."""
    version: str | None = None
    """Version that the engine must have, such as 0.32; None for any."""
    targets: Sequence[str] = ()
    """Layers that adapters change; empty for all linear ones."""
    template: str | None = None
    """File of the chat template of conversations; None for the model's own."""
    tool_calls: str | None = None
    """Format of `kestrl.formats` in which conversations have their calls of tools read; None: they stay text."""
    turns: bool = False
    """Whether it gives its device to the learner for each update."""
    judges: bool = False
    """Whether the base model also answers a judge, with replies that are held to a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How an engine is started: `python -m MODULE ARGUMENTS`, with an environment."""

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """One turn to sample."""

    id: str
    policy: str
    """Name under which the policy is served."""
    prompt_ids: Sequence[int]
    temperature: float
    max_tokens: int
    seed: int
    stop_token_ids: Sequence[int]
    top_p: float = 1.0
    """Probability of the smallest set of most probable tokens that are sampled from; 1 is off, as always in
    training."""
    top_k: int = 0
    """Number of most probable tokens that are sampled from; 0 is off, as always in training."""


class Generated(NamedTuple):
    """A sampled turn."""

    policy: str
    """Policy that the witness names."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probability of each token in the distribution of the request; NaN if the engine has none."""
    finish_reason: str
    """`stop`, `length` or `abort`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of an engine."""

    kv_usage: float = 0.0
    """Share of the key-value cache in use, 0 to 1."""
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    """Preemptions since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine has done since its server's start, as its metrics count it."""

    prompt_tokens: int = 0
    """Tokens of prompts."""
    cached_tokens: int = 0
    """Tokens of these that were taken from the prefix cache."""
    sampled_tokens: int = 0
    prefill_seconds: float = 0.0
    """Time in which prompts were computed, summed over requests."""
    decode_seconds: float = 0.0
    """Time in which tokens were sampled, summed over requests."""


class Metrics(NamedTuple):
    """What is read of an engine's metrics."""

    born: float
    """Unix seconds of the server's start; 0.0 if unknown."""
    load: Load
    work: Work = Work()


class EngineDialect(Protocol):
    """Dialect of one kind of engine. Methods that read an answer raise `ValueError` if it has another form."""

    name: str
    """Name in `inference.engine`."""
    witness: Witness
    """The witness: what names the policy of an answer."""
    ranks: Sequence[int]
    """Limits of an adapter's rank that the engine can be started with, ascending; empty for any."""
    health: Request
    """Answered with status 200 by an engine that works."""
    metrics: Request
    """Answered with a page of metrics, or with an error status by an engine without metrics."""
    adapters: Request
    """Lists the loaded adapters."""
    version: Request
    """Asks for the engine's version."""
    sleep_routes: SleepRoutes | None
    """None for an engine that cannot share its device in turns."""
    open_routes: frozenset[Route]
    """Routes that need no key."""
    data_routes: frozenset[Route]
    """Routes that sample, or end such a request by its id; the key of rollout workers grants them, and no others."""

    def command(self, launch: Launch) -> Command:
        """How an engine is started whose sampled log-probs are those of the distribution that was sampled from."""
        ...

    def generate(self, request: Generate) -> Request:
        """Samples one turn."""
        ...

    def read_generated(self, answer: bytes, stamped: str | None = None) -> Generated:
        """Reads the answer to `generate`.

        Args:
            answer: Its body.
            stamped: Its header `POLICY_HEADER`, where the guard is the witness.
        """
        ...

    def abort(self, request_id: str) -> Request | None:
        """Ends a request of `generate` by its id. The request is then answered with the tokens that it has, and with
        `abort` as finish reason. None if the engine has no such request.
        """
        ...

    def score(self, policy: str, token_ids: Sequence[int]) -> Request:
        """Computes the log-probs of given tokens, without a prefix cache."""
        ...

    def read_scores(self, answer: bytes, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token after the first, at temperature 1."""
        ...

    def load(self, name: str, folder: str) -> Request:
        """Loads an adapter under a new name."""
        ...

    def unload(self, name: str) -> Request:
        """Unloads an adapter; its running requests end normally."""
        ...

    def is_unknown_adapter(self, status: int, answer: bytes) -> bool:
        """Whether a refusal says that the adapter, or policy, is not loaded."""
        ...

    def is_rank_too_high(self, answer: bytes) -> bool:
        """Whether the refusal of a load says that the adapter's rank is above the engine's limit."""
        ...

    def read_adapters(self, answer: bytes, base: str) -> dict[str, str]:
        """Folder of each loaded adapter by name, without the base model `base`."""
        ...

    def read_version(self, answer: bytes) -> str:
        """Reads the answer to `version`, such as 0.32.0."""
        ...

    def read_metrics(self, page: str) -> Metrics:
        """Reads a page of metrics; what is missing is 0."""
        ...
