"""`kestrl sft` on two ranks over gloo: the weights of one rank, also across resumes with another number and a kill."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load
from tests.unit.learner.ranks.forked_ranks import CONTEXT
from tests.unit.sft.test_sft import settings_of

from kestrl._shared.plan.sft import SFTSettings
from kestrl.storage import open_store
from kestrl.storage.adapters import WEIGHTS
from kestrl_learner.ranks import rank_processes
from kestrl_learner.sft.training import SFTRun
from kestrl_learner.store import checkpoint

pytestmark = pytest.mark.share

pytestmark = pytest.mark.timeout(180)
UPDATE = 1e-5
"""Largest accepted difference of a weight."""
RATE = 1e-4
"""Learning rate: Adam turns rounding of a gradient near 0 into a share of it."""
STEPS, KILLED_AFTER, KEPT = 6, 4, 3
"""Steps of the runs, steps before the kill, and the last of them with a checkpoint."""


def stored_in(settings: SFTSettings, folder: Path, ranks: int) -> SFTSettings:
    return settings.model_copy(update={"storage": folder.as_uri(), "ranks": ranks})


def result_of(settings: SFTSettings) -> tuple[dict[str, Any], list[float]]:
    """The published weights, and the losses of all evaluations and steps."""
    store = open_store(settings.storage)
    summary = json.loads(store.get("summary.json"))
    assert (summary["status"], summary["steps"]) == ("succeeded", STEPS)
    steps = [json.loads(store.get(f"metrics/{step:06d}.json"))["loss"] for step in range(1, STEPS + 1)]
    return load(open_store(summary["policy"]["uri"]).get(WEIGHTS)), [
        *(each["loss"] for each in summary["evaluations"]),
        *steps,
    ]


def assert_equal(found: SFTSettings, whole: SFTSettings) -> None:
    (weights, losses), (expected, expected_losses) = result_of(found), result_of(whole)
    for name, weight in expected.items():
        assert abs(weights[name] - weight).max() <= UPDATE, name
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert max(abs(weight).max() for name, weight in weights.items() if "lora_B" in name) > RATE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SFTSettings:
    """A run on one rank, whose batches are several passes."""
    folder = tmp_path_factory.mktemp("whole")
    settings = settings_of(folder, maxSteps=STEPS, learningRate=RATE).model_copy(update={"tokens_per_pass": 300})
    made = stored_in(settings, folder / "store", 1)
    assert SFTRun(made).run() is not None
    return made


def test_a_run_of_one_rank_goes_on_with_two(tmp_path: Path, whole: SFTSettings) -> None:
    asked = iter([False, False, True])
    assert SFTRun(stored_in(whole, tmp_path, 1), stopping=lambda: next(asked)).run() is None
    found = stored_in(whole, tmp_path, 2)
    assert SFTRun(found).run() is not None
    assert_equal(found, whole)


def trained_until_a_kill(settings: SFTSettings) -> None:
    """Kills rank 1 before a step."""
    torch.set_num_threads(1)
    started: list[subprocess.Popen[bytes]] = []
    done = iter(range(STEPS))

    def start(*given: Any) -> subprocess.Popen[bytes]:
        started.append(rank_processes.start_rank(*given))
        return started[-1]

    def stopping() -> bool:
        if next(done) == KILLED_AFTER:
            started[0].kill()
        return False

    pytest.MonkeyPatch().setattr("kestrl_learner.train.launcher.start_rank", start)
    SFTRun(settings, stopping).run()


def test_a_run_that_lost_a_rank_goes_on_from_its_checkpoint(tmp_path: Path, whole: SFTSettings) -> None:
    """The program ends as the rank did, so that what supervises it starts it again; here with one rank."""
    killed = CONTEXT.Process(target=trained_until_a_kill, args=(stored_in(whole, tmp_path, 2),))
    killed.start()
    killed.join()
    assert killed.exitcode == 128 + 9
    assert checkpoint.steps(open_store(tmp_path.as_uri()))[-1] == KEPT
    found = stored_in(whole, tmp_path, 1)
    assert SFTRun(found).run() is not None
    assert_equal(found, whole)
