"""Draws at an engine's start, through the agent's front door, on an engine that samples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.fakes.engine import Fault

from kestrl.episode import BASE_MODEL_NAME
from kestrl.errors import EngineFailure, FailureError
from kestrl.storage import Probe
from kestrl_inference.engine import CONTROL_KEY
from kestrl_inference.sampling import AT_ONCE, EXPLORING_AT_ONCE

from .conftest import BASE_MODEL, PROBE_IDS, Sampling, digest

DRAWS = 256


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sampling]:
    monkeypatch.setenv(CONTROL_KEY, "the control key")
    async with Sampling(control_key="the control key", base_model=BASE_MODEL) as fake:
        yield fake


def published(stage: Any, step: int) -> Any:
    """A version whose probe is what this engine scores."""
    weights = digest(f"weights of step {step}".encode())
    scores = [stage.engine.scores(each, PROBE_IDS)[1:] for each in (weights, "")]
    return stage.publish(
        step, probe=Probe(token_ids=PROBE_IDS, logprobs=tuple(scores[0]), base_logprobs=tuple(scores[1]))
    )


async def test_draws_are_compared_once_per_start(make_stage: Any, engine: Sampling) -> None:
    stage = await make_stage(draws=DRAWS)
    await stage.look()
    await stage.load(published(stage, 1))
    first = len(engine.prompts)
    assert first > DRAWS
    seeds = [prompt.sampling["seed"] for prompt in engine.prompts if "prompt_logprobs" not in prompt.sampling]
    assert len(seeds) == len(set(seeds)), "every draw has its own seed"
    await stage.load(published(stage, 2))
    assert len(engine.prompts) - first == 2, "one score and one token"
    await engine.stop()
    await stage.look()
    await engine.start()
    before = len(engine.prompts)
    await stage.look()
    assert await stage.proved() == {1: True, 2: True}
    assert len(engine.prompts) - before == first + 2


async def test_draws_are_compared_again_after_a_start_while_the_engine_slept_and_not_after_a_sleep(
    make_stage: Any, engine: Sampling
) -> None:
    engine.turns, engine.base_model = 0, BASE_MODEL_NAME
    stage = await make_stage(draws=DRAWS, turns=True)
    await stage.look()
    await stage.load(published(stage, 1))
    first = len(engine.prompts)
    await stage.sleep()
    await stage.wake()
    assert len(engine.prompts) - first == 3, "one score and one token of the version, and one score of the base model"
    await stage.sleep()
    await engine.stop()
    await engine.start()
    await stage.sleep()
    await stage.wake()
    assert len(engine.prompts) - first > DRAWS
    assert await stage.proved() == {1: True}


@pytest.mark.parametrize(
    ("honest", "sharpened", "reason"),
    [
        (True, 1.5, "its log-probs of sampling and of scoring differ by"),
        (False, 1.8, "more often than it says"),
        (False, 0.4, "less often than it says"),
    ],
    ids=["a temperature of its own, reported", "lower, not reported", "higher, not reported"],
)
async def test_an_engine_that_samples_otherwise_is_refused(
    make_stage: Any, engine: Sampling, honest: bool, sharpened: float, reason: str
) -> None:
    engine.honest, engine.sharpened = honest, sharpened
    stage = await make_stage(draws=DRAWS)
    await stage.look()
    version = published(stage, 1)
    with pytest.raises(FailureError, match="does not sample from the distribution of") as caught:
        await stage.load(version)
    assert caught.value.code == "sampling_differs"
    assert reason in str(caught.value)
    assert "logits processors" in str(caught.value)
    assert version.name not in engine.adapters
    engine.honest, engine.sharpened = True, 1.0
    await stage.load(version)
    assert await stage.proved() == {1: True}


async def test_an_engine_that_fails_amid_the_draws_is_not_proved(make_stage: Any, engine: Sampling) -> None:
    stage = await make_stage(draws=DRAWS)
    await stage.look()
    version = published(stage, 1)
    engine.script = lambda prompt: engine.sample(prompt) if prompt.index < 100 else Fault(status=500)
    with pytest.raises(EngineFailure, match="500"):
        await stage.loaded.load(version.policy, version.uri)
    assert await stage.proved() == {1: False}


async def test_a_slow_engine_is_asked_for_fewer_draws(make_stage: Any, engine: Sampling) -> None:
    stage = await make_stage(draws=DRAWS, draw_seconds=0.0)
    await stage.look()
    await stage.load(published(stage, 1))
    assert await stage.proved() == {1: True}
    assert len(engine.prompts) == 2 + 2 * EXPLORING_AT_ONCE + AT_ONCE, "a round of each kind"
    parents = [prompt.headers.get("traceparent", "") for prompt in engine.prompts[2:]]
    assert all(parent.endswith("-00") for parent in parents), "draws have no spans in the engine"
