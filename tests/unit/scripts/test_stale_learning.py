"""`python -m benchmarks.stale_learning` in little time: each mode runs to its end, and what is trained on is what was
sampled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.random_models import make
from benchmarks.stale_learning.learning import train_group
from benchmarks.stale_learning.lookups import END, Play, handles
from benchmarks.stale_learning.sampler import Sampler

from kestrl_learner.model.policy_model import PolicyModel

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("tiny", tmp_path_factory.mktemp("base"), "cpu")


@pytest.mark.share(4)
@pytest.mark.timeout(600)
def test_the_benchmark_runs_to_its_end_and_repeats_no_run(tmp_path: Path) -> None:
    """In one of four commits: four processes that import torch."""
    command = [sys.executable, "-m", "benchmarks.stale_learning", "--quick", "--out", str(tmp_path / "lines")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in (tmp_path / "lines").read_text().splitlines()]
    assert {line["mode"] for line in lines} == {"release", "wait", "continue"}
    assert all(line["steps"] and line["trained_tokens"] and len(line["points"]) == 3 for line in lines)
    assert [line["given_up"] for line in lines if line["mode"] == "wait"] == [0.0]
    repetition = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert repetition.returncode == 0, repetition.stderr
    assert repetition.stdout == ""
    assert "agent, 1, continue" in repetition.stderr, "the table of the lines that are there"


def test_a_reward_is_the_share_of_keys_that_the_first_handle_finds() -> None:
    keys = (8, 9)
    right = [(handles(key)[0], END) for key in keys]
    assert Play(keys, right).reward == 1.0
    wrong_first = Play(keys, [(handles(8)[1], END), *right])
    assert (wrong_first.reward, wrong_first.has_ended) == (0.5, True)
    assert not Play(keys, right[:1]).has_ended
    assert Play(keys, [(0, 0)] * 4).has_ended, "no more turns than two for each key"


def test_sampled_log_probs_are_those_of_the_learner(base: Path) -> None:
    """For rows that are padded, shortened and gone on with, as after an update."""
    policy = PolicyModel(str(base), dtype="float32", rank=4, alpha=8.0, targets="all-linear", seed=1, device="cpu")
    sampler = Sampler(policy, 1)
    plays = [Play(tuple(range(8, 9 + length))) for length in range(5)]
    sampler.play(plays)
    for place, play in enumerate(plays):
        play.rewind(place % len(play.turns))
    sampler.play(plays)
    for play in plays:
        assert play.has_ended
        play.versions = [0] * len(play.turns)
        group = train_group("g", [play], newest=0, oldest=0)
        ((_, logprobs),) = policy.logprobs(group, 1.0)
        expected = [logprob for turn in play.behaviour for logprob in turn]
        assert logprobs.detach().tolist() == pytest.approx(expected, abs=1e-4)


def test_tokens_before_the_oldest_version_are_context() -> None:
    play = Play((8, 9), [(5, END)] * 4, [(-1.0, -2.0)] * 4, versions=[0, 0, 1, 2])
    group = train_group("g", [play, play], newest=2, oldest=1)
    (row, _), (scored, _) = group.rows, group.episodes
    assert [place for place, on in enumerate(row.mask) if on] == [8, 9, 12, 13]
    assert (scored.tokens, row.policies, row.on_policy) == (4, ["1", "1", "2", "2"], b"\0\0\1\1")
    assert len(row.engines) == 4
