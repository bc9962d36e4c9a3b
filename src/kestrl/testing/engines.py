"""Conformance suite of engine dialects: `check_dialect(MyDialect())`, and `check_engine` against an engine that runs.

Both raise `AssertionError` for a violated property.
"""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from kestrl.engines import POLICY_HEADER, EngineDialect, Generate, Generated, Launch, Request, Witness

MEMBERS = (
    "name",
    "witness",
    "ranks",
    "health",
    "metrics",
    "adapters",
    "version",
    "open_routes",
    "data_routes",
    "command",
    "generate",
    "read_generated",
    "abort",
    "score",
    "read_scores",
    "load",
    "unload",
    "is_unknown_adapter",
    "is_rank_too_high",
    "read_adapters",
    "read_version",
    "read_metrics",
)
LAUNCH = Launch(
    model="/models/base",
    name="base",
    dtype="float32",
    context_length=2048,
    rank=16,
    slots=4,
    cpu=True,
    threads=1,
    devices=1,
    host="127.0.0.1",
    port=8765,
    work_dir="/work",
    otlp=None,
    options={},
)
UNREADABLE = (
    b"",
    b"<html>",
    b"null",
    b"[]",
    b"{}",
    b'{"choices": []}',
    b'{"data": null}',
    b'{"error": "no"}',
    b"\xff\xfe",
)
SECONDS = 60.0
"""Time limit of a request to the engine."""
TOLERANCE = 1e-2
"""Largest difference, in nats, between log-probs of sampling and of scoring; bfloat16 differs by some thousandths."""
ADAPTER = "conformance-adapter"


def check_dialect(dialect: EngineDialect) -> None:
    """Checks what can be known of a dialect without an engine."""
    missing_members = [member for member in MEMBERS if not hasattr(dialect, member)]
    assert not missing_members, f"{dialect!r} has no {', '.join(missing_members)}"
    _check_routes(dialect)
    _check_commands(dialect)
    readers: Mapping[str, Callable[[bytes], Any]] = {
        "read_generated": lambda answer: dialect.read_generated(answer, "base"),
        "read_scores": lambda answer: dialect.read_scores(answer, [1, 2]),
        "read_version": dialect.read_version,
        "read_adapters": lambda answer: dialect.read_adapters(answer, "base"),
    }
    for name, reader in readers.items():
        for answer in UNREADABLE:
            _check_refused(name, reader, answer)
    assert dialect.witness in get_args(Witness), f"witness {dialect.witness!r} is none of {get_args(Witness)}"
    for answer in UNREADABLE:
        assert not dialect.is_rank_too_high(answer), f"is_rank_too_high({answer!r})"
    assert dialect.read_metrics("") == dialect.read_metrics("# nothing\n"), "read_metrics: what is missing must be 0"


def _check_routes(dialect: EngineDialect) -> None:
    abort = dialect.abort("a")
    needs_data = (dialect.generate(_turn("base", [1])), dialect.score("base", [1, 2]), dialect.adapters)
    for request in needs_data if abort is None else (*needs_data, abort):
        assert request[:2] in dialect.data_routes, f"data_routes do not have {request.method} {request.path}"
    for request in (dialect.health, dialect.metrics):
        assert request[:2] in dialect.open_routes, f"open_routes do not have {request.method} {request.path}"
    for request in (dialect.load("a", "/a"), dialect.unload("a")):
        for routes in (dialect.open_routes, dialect.data_routes):
            assert request[:2] not in routes, f"{request.path} changes the policy: only the control key may open it"


def _check_commands(dialect: EngineDialect) -> None:
    command = dialect.command(LAUNCH)
    assert command.module, "command has no module"
    for value in (LAUNCH.model, LAUNCH.name, LAUNCH.host, str(LAUNCH.port)):
        assert value in command.arguments, f"command does not have {value!r}"
    served = dialect.command(replace(LAUNCH, template="/chat.jinja"))
    assert "/chat.jinja" in served.arguments, "command does not have the chat template"


def _check_refused(name: str, reader: Callable[[bytes], Any], answer: bytes) -> None:
    try:
        reading = reader(answer)
    except ValueError:
        return
    except Exception as error:
        raise AssertionError(f"{name}({answer!r}) raises {type(error).__name__}, not ValueError") from error
    raise AssertionError(f"{name}({answer!r}) reads {reading!r} instead of raising ValueError")


def check_engine(
    dialect: EngineDialect, url: str, *, base: str, adapter: str, prompt_ids: Sequence[int], key: str = ""
) -> None:
    """Checks a dialect against a running engine without adapters.

    Args:
        dialect: The dialect.
        url: Address of the engine.
        base: Name under which it serves the base model.
        adapter: Folder of an adapter that changes what the model samples; the engine must be able to read it.
        prompt_ids: Token ids of a prompt.
        key: Credential that grants all routes.
    """
    engine = _Engine(url, key)
    engine.ask(dialect.health)
    assert dialect.read_adapters(engine.ask(dialect.adapters), base) == {}, "the engine must have no adapter"
    status, page = engine.send(dialect.metrics)
    if status == 200:
        load = dialect.read_metrics(page.decode()).load
        assert (load.running, load.waiting) == (0, 0), f"an idle engine reports {load}"

    assert dialect.read_version(engine.ask(dialect.version)), "the engine does not say its version"
    first = _check_sampling(dialect, engine, base, prompt_ids)
    status, answer = engine.send(dialect.generate(_turn(ADAPTER, prompt_ids)))
    assert status != 200, "an adapter that is not loaded was sampled"
    assert dialect.is_unknown_adapter(status, answer), f"is_unknown_adapter does not know {status} {answer[:200]!r}"
    engine.ask(dialect.load(ADAPTER, adapter))
    assert dialect.read_adapters(engine.ask(dialect.adapters), base) == {ADAPTER: adapter}
    _check_sampling(dialect, engine, ADAPTER, prompt_ids)
    scored = [*prompt_ids, *first.token_ids]
    assert _scores(dialect, engine, base, scored) != _scores(dialect, engine, ADAPTER, scored), (
        "the adapter's scores are those of the base model"
    )
    engine.ask(dialect.unload(ADAPTER))
    assert dialect.read_adapters(engine.ask(dialect.adapters), base) == {}, "the adapter was not unloaded"
    status, answer = engine.send(dialect.unload(ADAPTER))
    assert status == 200 or dialect.is_unknown_adapter(status, answer), (
        f"unloading twice: is_unknown_adapter does not know {status} {answer[:200]!r}"
    )


def _check_sampling(dialect: EngineDialect, engine: _Engine, policy: str, prompt_ids: Sequence[int]) -> Generated:
    """Samples a turn twice with one seed, and scores it."""
    first, repeated = (_sampled(dialect, engine, _turn(policy, prompt_ids, attempt)) for attempt in "ab")
    assert first.policy == policy, f"{policy} was asked for, {first.policy} answered"
    assert first.finish_reason in ("stop", "length"), f"finish_reason {first.finish_reason!r}"
    assert 0 < len(first.token_ids) <= 8, f"{len(first.token_ids)} tokens of at most 8"
    assert len(first.logprobs) == len(first.token_ids), "not one log-prob for each token"
    assert all(math.isfinite(value) and value <= 1e-6 for value in first.logprobs), f"log-probs {first.logprobs}"
    assert list(first.token_ids) == list(repeated.token_ids), "one seed gave two samples"
    _check_truncation(dialect, engine, policy, prompt_ids)
    scores = _scores(dialect, engine, policy, [*prompt_ids, *first.token_ids])[-len(first.token_ids) :]
    gap = max(abs(sampled - scored) for sampled, scored in zip(first.logprobs, scores, strict=True))
    assert gap <= TOLERANCE, f"log-probs of sampling and of scoring differ by {gap:.3g}"
    return first


def _sampled(dialect: EngineDialect, engine: _Engine, turn: Generate) -> Generated:
    status, answer, stamped = engine.answer(dialect.generate(turn))
    assert status == 200, f"sampling {turn.policy}: {status}: {answer[:300]!r}"
    return dialect.read_generated(answer, stamped)


def _check_truncation(dialect: EngineDialect, engine: _Engine, policy: str, prompt_ids: Sequence[int]) -> None:
    """Samples from the most probable token alone, by top_k and by top_p, which is greedy."""

    def sampled(turn: Generate) -> list[int]:
        return list(_sampled(dialect, engine, turn).token_ids)

    greedy = sampled(replace(_turn(policy, prompt_ids, "greedy"), temperature=0.0))
    top_k = sampled(replace(_turn(policy, prompt_ids, "top_k"), top_k=1))
    top_p = sampled(replace(_turn(policy, prompt_ids, "top_p"), top_p=1e-6))
    assert top_k == greedy, "top_k 1 sampled other tokens than greedily"
    assert top_p == greedy, "a top_p of nearly 0 sampled other tokens than greedily"


def _scores(dialect: EngineDialect, engine: _Engine, policy: str, token_ids: Sequence[int]) -> list[float]:
    scores = dialect.read_scores(engine.ask(dialect.score(policy, token_ids)), token_ids)
    assert len(scores) == len(token_ids) - 1, f"{len(scores)} scores for {len(token_ids)} tokens"
    return scores


def _turn(policy: str, prompt_ids: Sequence[int], attempt: str = "") -> Generate:
    return Generate(
        id=f"conformance/{policy}/{attempt}",
        policy=policy,
        prompt_ids=prompt_ids,
        temperature=1.0,
        max_tokens=8,
        seed=7,
        stop_token_ids=(),
    )


class _Engine:
    """A running engine."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def send(self, request: Request) -> tuple[int, bytes]:
        """Status and body of the answer."""
        return self.answer(request)[:2]

    def answer(self, request: Request) -> tuple[int, bytes, str | None]:
        """Status and body of the answer, and the policy that a guard stamped on it."""
        http_request = urllib.request.Request(  # noqa: S310 - the caller's own engine
            f"{self._url}{request.path}", request.body or None, self._headers, method=request.method
        )
        try:
            with urllib.request.urlopen(http_request, timeout=SECONDS) as answer:  # noqa: S310
                return answer.status, answer.read(), answer.headers.get(POLICY_HEADER)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read(), None

    def ask(self, request: Request) -> bytes:
        """Body of an answer with status 200."""
        status, body = self.send(request)
        assert status == 200, f"{request.method} {request.path}: {status}: {body[:300]!r}"
        return body
