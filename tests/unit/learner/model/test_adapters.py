"""A published version differs from the one before: its probe changes with an update."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.learner.train.test_training import algorithm, make_groups

from kestrl._shared.plan.planning import PROBE_BOUND
from kestrl.storage import Probe, open_store
from kestrl_demo_models.tiny import tiny
from kestrl_inference.proof import compare
from kestrl_learner.model import adapters
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.train.trainer import Trainer

Maker = Callable[..., PolicyModel]
STEPS = 6


@pytest.mark.parametrize("vocabulary", [2, 64, 232, 233, 1088, 151_936])
def test_the_probe_is_one_sequence_of_many_tokens(vocabulary: int) -> None:
    ids = adapters.probe_ids(vocabulary)
    assert ids == adapters.probe_ids(vocabulary)
    assert len(ids) == adapters.PROBE_TOKENS
    assert all(0 < token < vocabulary for token in ids)
    assert len(set(ids)) >= min(vocabulary - 1, 12)


def test_no_version_passes_for_another(policy_of: Maker, tmp_path: Path) -> None:
    """An engine that still answers as the version before, or as the base, is refused; by steps as small as the
    demo's."""
    policy, store = policy_of(tiny()), open_store(tmp_path.as_uri())
    trainer = Trainer(policy, algorithm(learning_rate=2e-3), 1.0)
    published = []
    for step in range(STEPS):
        if step:
            trainer.step(make_groups(seed=step), step)
        published.append(adapters.publish(store, policy, job="job", step=step, base="tiny", parent=None)[0])
    for before, now in itertools.pairwise(published):
        apart = now.probe.apart(before.probe)
        assert apart is not None
        assert apart > PROBE_BOUND["float32"]
        for scores, code in (
            (now.probe.logprobs, ""),
            (before.probe.logprobs, "adapter_not_applied" if before.step == 0 else "probe_failed"),
            (now.probe.base_logprobs, "adapter_not_applied"),
        ):
            failure = compare("now", "engine-0", now.probe, scores, PROBE_BOUND["float32"]).failure
            assert ("" if failure is None else failure.code) == code, (before.step, scores, now.probe)


def test_probes_of_different_sequences_are_not_compared() -> None:
    one, other = (Probe(token_ids=ids, logprobs=(-1.0,), base_logprobs=(-1.0,)) for ids in ((1, 2), (1, 3)))
    assert one.apart(one) == 0
    assert one.apart(other) is None
