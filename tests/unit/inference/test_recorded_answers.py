"""What real engines of each version answered, read by the dialect; `scripts/record_answers.py` recorded them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kestrl.engines.registry import DIALECTS
from kestrl.episode import BASE_MODEL_NAME

RECORDED = Path(__file__).parents[2] / "data" / "engine_answers"
FILES = sorted(RECORDED.glob("*.json"))
VERSIONS = {"vllm-0.23.0", "vllm-0.25.1", "vllm-0.27.1", "vllm-0.30.0", "vllm-0.32.0"}
PROMPT = tuple(range(20, 50))
ADAPTER = "answers.1"
FOLDER = "/work/adapter"


class Recorded(NamedTuple):
    """An answer of an engine."""

    method: str
    path: str
    status: int
    policy: str | None
    body: bytes


@pytest.fixture(params=FILES, ids=[file.stem for file in FILES])
def file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def dialect(file: Path) -> Any:
    return DIALECTS[file.stem.partition("-")[0]]


@pytest.fixture
def answers(file: Path) -> dict[str, Recorded]:
    return {
        name: Recorded(**{**answer, "body": answer["body"].encode()})
        for name, answer in json.loads(file.read_text(encoding="utf-8")).items()
    }


def test_every_version_that_was_tried_is_recorded() -> None:
    assert {file.stem for file in FILES} >= VERSIONS


def test_the_version_is_read(dialect: Any, answers: dict[str, Recorded], file: Path) -> None:
    assert f"{dialect.name}-{dialect.read_version(answers['version'].body)}".partition("+")[0] == file.stem


@pytest.mark.parametrize(
    ("name", "policy"), [("base", BASE_MODEL_NAME), ("greedy", BASE_MODEL_NAME), ("adapter", ADAPTER)]
)
def test_a_sampled_turn_is_read_with_the_policy_that_it_names(
    dialect: Any, answers: dict[str, Recorded], name: str, policy: str
) -> None:
    answer = answers[f"generate, {name}"]
    assert answer.status == 200
    turn = dialect.read_generated(answer.body, answer.policy)
    assert turn.policy == policy
    assert (len(turn.token_ids), len(turn.logprobs), turn.finish_reason) == (3, 3, "length")
    assert all(math.isfinite(value) and value < 0 for value in turn.logprobs)


def test_scores_are_those_of_base_and_adapter(dialect: Any, answers: dict[str, Recorded]) -> None:
    base, adapter = (dialect.read_scores(answers[f"score, {name}"].body, PROMPT[:5]) for name in ("base", "adapter"))
    assert base == pytest.approx([-16.32407, -18.79450, -7.52934, -17.78488], abs=1e-3), "the same in every version"
    assert adapter == pytest.approx([-16.25945, -18.66199, -7.09197, -17.24602], abs=1e-3)


def test_adapters_are_listed_while_they_are_loaded(dialect: Any, answers: dict[str, Recorded]) -> None:
    assert dialect.read_adapters(answers["no adapters"].body, BASE_MODEL_NAME) == {}
    assert dialect.read_adapters(answers["adapters"].body, BASE_MODEL_NAME) == {ADAPTER: FOLDER}
    assert (answers["load"].status, answers["unload"].status) == (200, 200)


@pytest.mark.parametrize("name", ["generate, unknown adapter", "generate, unloaded", "unload again"])
def test_an_adapter_that_is_not_loaded_is_known_by_the_refusal(
    dialect: Any, answers: dict[str, Recorded], name: str
) -> None:
    assert dialect.is_unknown_adapter(answers[name].status, answers[name].body)
    assert not dialect.is_rank_too_high(answers[name].body)


@pytest.mark.parametrize("name", ["load again", "load, no folder", "load, rank too high"])
def test_a_load_that_is_refused_is_one_of_rank_or_not(dialect: Any, answers: dict[str, Recorded], name: str) -> None:
    assert answers[name].status >= 400
    assert dialect.is_rank_too_high(answers[name].body) == (name == "load, rank too high")


def test_a_prompt_that_is_too_long_is_refused_for_another_reason(dialect: Any, answers: dict[str, Recorded]) -> None:
    answer = answers["generate, prompt too long"]
    assert answer.status == 400
    assert not dialect.is_unknown_adapter(answer.status, answer.body)
    with pytest.raises(ValueError, match=r"unknown form|missing required field"):
        dialect.read_generated(answer.body, answer.policy)


def test_the_metrics_of_an_idle_engine_are_read(dialect: Any, answers: dict[str, Recorded]) -> None:
    metrics = dialect.read_metrics(answers["metrics"].body.decode())
    assert metrics.born > 1.7e9
    assert (metrics.load.running, metrics.load.waiting, metrics.load.preemptions) == (0, 0, 0)
    assert b"vllm:kv_cache_usage_perc" in answers["metrics"].body, "the name that is read is the engine's"
