"""The model and the step: shared prompts are exact, an update does what it says, a checkpoint continues it, engines can
read it."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl.errors import StorageError
from kestrl.storage import fetch_adapter, layout, open_store
from kestrl_learner.batch.rows import TrainGroup, TrainRow
from kestrl_learner.batch.tokens import stale_rows
from kestrl_learner.model import adapters
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.store import checkpoint
from kestrl_learner.store.run_record import RunRecord
from kestrl_learner.train.trainer import NotFinite, Trainer

VOCABULARY = 64
Maker = Callable[..., PolicyModel]


def make_groups(
    *, count: int = 3, size: int = 4, seed: int = 0, advantage: float | None = None, on_policy: bool = True
) -> list[TrainGroup]:
    """Groups of rows of several lengths, each with an observation in its middle."""
    chance = random.Random(seed)
    groups: list[TrainGroup] = []
    for number in range(count):
        prompt = array("i", [chance.randrange(VOCABULARY) for _ in range(5 + 3 * number)])
        rows: list[TrainRow] = []
        for index in range(size):
            mask = bytes([1] * chance.randrange(1, 7) + [0] * chance.randrange(4) + [1] * chance.randrange(3))
            rows.append(
                TrainRow(
                    token_ids=array("i", [chance.randrange(VOCABULARY) for _ in mask]),
                    mask=mask,
                    behaviour=array("f", [-4.0 if on else 0.0 for on in mask]),
                    advantages=on_sampled(mask, index - 1.5 if advantage is None else advantage),
                    sequence=index,
                    on_policy=bytes([on_policy] * sum(mask)),
                    policies=["policy"] * sum(mask),
                    engines=["engine-0"] * sum(mask),
                )
            )
        groups.append(TrainGroup(id=f"group-{number}", prompt=prompt, rows=rows))
    return groups


def on_sampled(mask: bytes, value: float) -> array[float]:
    return array("d", [value if on else 0.0 for on in mask])


def unshared(group: TrainGroup) -> list[TrainGroup]:
    """Each row by itself, its prompt part of it."""
    size = len(group.prompt)
    return [
        TrainGroup(
            id=group.id,
            prompt=array("i"),
            rows=[
                TrainRow(
                    token_ids=group.prompt + row.token_ids,
                    mask=bytes(size) + row.mask,
                    behaviour=array("f", [0.0] * size) + row.behaviour,
                    advantages=array("d", [0.0] * size) + row.advantages,
                    sequence=row.sequence,
                    on_policy=row.on_policy,
                    policies=row.policies,
                    engines=row.engines,
                )
            ],
        )
        for row in group.rows
    ]


def algorithm(**changes: Any) -> AlgorithmSettings:
    given: dict[str, Any] = {
        "name": "grpo",
        "group_size": 4,
        "groups_per_step": 3,
        "learning_rate": 1e-2,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "max_staleness": 0,
        "on_failed_episode": "drop",
        "min_group_size": 2,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "advantage": "grpo",
        "loss": "ppo_clip",
    }
    return AlgorithmSettings.model_validate(given | changes)


def gradients(policy: PolicyModel, groups: list[TrainGroup]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs by group, and the gradient of a loss with a different weight for every token."""
    for weight in policy.parameters():
        weight.grad = None
    found: list[torch.Tensor] = []
    for group in groups:
        by_row: dict[int, torch.Tensor] = {}
        for rows, logprobs in policy.logprobs(group, 0.7):
            (logprobs**2).sum().backward()
            parts = logprobs.detach().split([sum(row.mask) for row in rows])
            by_row |= {id(row): part for row, part in zip(rows, parts, strict=True)}
        found.append(torch.cat([by_row[id(row)] for row in group.rows]))
    return found, [weight.grad.clone() for weight in policy.parameters() if weight.grad is not None]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_shared_prompt_gives_log_probs_and_gradients_of_plain_rows(
    kind: str, models: dict[str, Path], policy_of: Maker
) -> None:
    policy = policy_of(models[kind], disturb=0.3)
    groups = make_groups()
    shared, shared_gradient = gradients(policy, groups)
    plain, plain_gradient = gradients(policy, [row for group in groups for row in unshared(group)])
    assert torch.cat(shared) == pytest.approx(torch.cat(plain), abs=2e-6)
    assert len(shared_gradient) == len(plain_gradient) == 28
    for one, other in zip(shared_gradient, plain_gradient, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max() + 1e-6))


def test_a_group_cut_into_parts_gives_the_same(models: dict[str, Path], policy_of: Maker) -> None:
    policy = policy_of(models["qwen3"], disturb=0.3)
    groups = make_groups()
    whole, whole_gradient = gradients(policy, groups)
    policy.tokens_per_pass = 20
    parts, parts_gradient = gradients(policy, groups)
    assert torch.cat(whole) == pytest.approx(torch.cat(parts), abs=2e-6)
    for one, other in zip(whole_gradient, parts_gradient, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max() + 1e-6))


def test_the_log_probs_are_those_of_the_model_itself_at_the_temperature(
    models: dict[str, Path], policy_of: Maker
) -> None:
    policy = policy_of(models["qwen3"], disturb=0.3)
    (group,) = make_groups(count=1, size=1, seed=3)
    ids = torch.tensor([[*group.prompt, *group.rows[0].token_ids]])
    with torch.no_grad():
        logits = policy.peft(input_ids=ids).logits[0].double() / 0.7
        expected = [
            float(torch.log_softmax(logits[place - 1], -1)[ids[0, place]])
            for place in range(len(group.prompt), ids.shape[1])
            if group.rows[0].mask[place - len(group.prompt)]
        ]
        ((_, found),) = policy.logprobs(group, 0.7)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_version_zero_equals_the_base_and_the_base_is_never_written(models: dict[str, Path], policy_of: Maker) -> None:
    policy = policy_of(models["qwen3"])
    ids = list(range(1, 20))
    assert policy.score(ids, adapter=True) == policy.score(ids, adapter=False)
    before = {name: weight.clone() for name, weight in policy.peft.named_parameters() if not weight.requires_grad}
    Trainer(policy, algorithm(), 1.0).step(make_groups(), 0)
    assert policy.score(ids, adapter=True) != policy.score(ids, adapter=False)
    for name, weight in policy.peft.named_parameters():
        if not weight.requires_grad:
            assert torch.equal(weight, before[name]), name


def test_the_batch_is_averaged_over_all_of_its_tokens(models: dict[str, Path], policy_of: Maker) -> None:
    """The loss of a batch is the same however it is cut into groups: sums over one divisor."""
    groups = make_groups(count=2, size=2)
    losses = [
        Trainer(policy_of(models["qwen3"], disturb=0.3), algorithm(), 1.0).step(batch, 0).loss
        for batch in (groups, [single for group in groups for single in unshared(group)])
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_an_update_raises_the_log_probs_of_what_was_better(models: dict[str, Path], policy_of: Maker) -> None:
    policy = policy_of(models["qwen3"])
    (group,) = make_groups(count=1, size=2)
    with torch.no_grad():
        ((rows, first),) = policy.logprobs(group, 1.0)
    trainer = Trainer(policy, algorithm(clip_high=5.0, clip_low=0.9), 1.0)
    better = [TrainRow(**{**_fields(row), "advantages": on_sampled(row.mask, 1.0)}) for row in rows]
    for step in range(5):
        with torch.no_grad():
            ((_, now),) = policy.logprobs(group, 1.0)
        parts = now.split([sum(row.mask) for row in rows])
        trainer.step([TrainGroup(id="g", prompt=group.prompt, rows=_on_policy(better, parts))], step)
    with torch.no_grad():
        ((_, last),) = policy.logprobs(group, 1.0)
    assert float(last.sum()) > float(first.sum())


def _fields(row: TrainRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in TrainRow.__dataclass_fields__}


def _on_policy(rows: list[TrainRow], parts: tuple[torch.Tensor, ...]) -> list[TrainRow]:
    made: list[TrainRow] = []
    for row, part in zip(rows, parts, strict=True):
        values = iter(part.tolist())
        behaviour = array("f", [next(values) if on else 0.0 for on in row.mask])
        made.append(TrainRow(**{**_fields(row), "behaviour": behaviour}))
    return made


def test_a_batch_without_an_advantage_is_compared_but_changes_nothing(
    models: dict[str, Path], policy_of: Maker
) -> None:
    policy = policy_of(models["qwen3"], disturb=0.3)
    before = policy.adapter_state()
    before = {name: weight.clone() for name, weight in before.items()}
    result = Trainer(policy, algorithm(), 1.0).step(make_groups(advantage=0.0), 0)
    assert result.zero_advantage_groups == 3
    assert result.mismatch.all.tokens > 0
    assert result.mismatch.all.mean > 0
    assert all(torch.equal(weight, before[name]) for name, weight in policy.adapter_state().items())


def test_what_is_not_finite_stops_the_step_and_changes_nothing(models: dict[str, Path], policy_of: Maker) -> None:
    policy = policy_of(models["qwen3"], disturb=0.3)
    before = {name: weight.clone() for name, weight in policy.adapter_state().items()}
    with pytest.raises(NotFinite):
        Trainer(policy, algorithm(), 1.0).step(make_groups(advantage=float("inf")), 0)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.adapter_state().items())


def test_the_learning_rate_rises_over_the_warm_up(models: dict[str, Path], policy_of: Maker) -> None:
    trainer = Trainer(policy_of(models["qwen3"]), algorithm(warmup_steps=3), 1.0)
    rates = []
    for step in range(5):
        trainer.step(make_groups(count=1), step)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_a_restored_trainer_goes_on_exactly(models: dict[str, Path], policy_of: Maker) -> None:
    whole = Trainer(policy_of(models["qwen3"]), algorithm(), 1.0)
    for step in range(4):
        whole.step(make_groups(seed=step), step)
    first = Trainer(policy_of(models["qwen3"]), algorithm(), 1.0)
    for step in range(2):
        first.step(make_groups(seed=step), step)
    state = first.state()
    second = Trainer(policy_of(models["qwen3"], seed=99), algorithm(), 1.0)
    second.restore(state)
    for step in range(2, 4):
        second.step(make_groups(seed=step), step)
    ours, theirs = second.model.trained_state(), whole.model.trained_state()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_published_adapter_is_what_peft_and_vllm_read(
    models: dict[str, Path], policy_of: Maker, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = policy_of(models["qwen3"], disturb=0.3)
    store = open_store((tmp_path / "store").as_uri())
    manifest, uri = adapters.publish(store, policy, job="job", step=3, base=str(models["qwen3"]), parent=None)
    folder = tmp_path / "fetched"
    assert fetch_adapter(open_store(uri), folder) == manifest
    names = set(load((folder / "adapter_model.safetensors").read_bytes()))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert len(names) == 28
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (4, 8.0, "none")
    read: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models["qwen3"]), str(folder))
    ids = torch.tensor([list(manifest.probe.token_ids)])
    with torch.no_grad():
        scores = torch.log_softmax(read(input_ids=ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
    assert scores.tolist() == pytest.approx(manifest.probe.logprobs, abs=1e-5)
    assert manifest.probe.logprobs != manifest.probe.base_logprobs


def test_only_whole_checkpoints_count_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    for step in range(1, 5):
        checkpoint.write(
            store, checkpoint.Checkpoint(step=step, state=b"x" * step, record=RunRecord(seconds=step)), keep=2
        )
    assert checkpoint.steps(store) == [3, 4]
    assert len(store.list("checkpoints")) == 4
    store.put("checkpoints/000009/0123.pt", b"half")
    newest = checkpoint.newest(store)
    assert newest is not None
    assert (newest.step, newest.state, newest.record) == (4, b"xxxx", RunRecord(seconds=4))


def test_a_step_that_is_checkpointed_again_is_whole_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path.as_uri())
    checkpoint.write(store, checkpoint.Checkpoint(step=1, state=b"first", record=RunRecord()), keep=2)

    def cut_off(path: str, content: bytes, **_: Any) -> None:
        if path.endswith(layout.MANIFEST):
            raise KeyboardInterrupt
        type(store).put(store, path, content)

    with monkeypatch.context() as patched:
        patched.setattr(store, "put", cut_off)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.write(store, checkpoint.Checkpoint(step=1, state=b"second", record=RunRecord()), keep=2)
    newest = checkpoint.newest(store)
    assert newest is not None
    assert newest.state == b"first"
    checkpoint.write(store, checkpoint.Checkpoint(step=1, state=b"second", record=RunRecord()), keep=2)
    assert len(store.list("checkpoints")) == 2


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        (lambda get, path: get(path).replace(b"newer", b"other"), "is corrupt"),
        (lambda get, path: get(path.replace("000002", "lost")), "does not exist"),
        (lambda get, path: get(path).replace(b'"owner": 0', b'"owner": 1'), "holds other bytes"),
    ],
)
def test_a_checkpoint_is_read_back_before_older_ones_are_removed(
    reads: Callable[..., bytes], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path.as_uri())
    checkpoint.write(store, checkpoint.Checkpoint(step=1, state=b"older", record=RunRecord()), keep=1)
    get = store.get
    with monkeypatch.context() as patched:
        patched.setattr(store, "get", lambda path: reads(get, path))
        with pytest.raises(checkpoint.Unconfirmed, match=expected):
            checkpoint.write(store, checkpoint.Checkpoint(step=2, state=b"newer", record=RunRecord()), keep=1)
    assert checkpoint.steps(store) == [1, 2]
    checkpoint.write(store, checkpoint.Checkpoint(step=2, state=b"newer", record=RunRecord()), keep=1)
    assert checkpoint.steps(store) == [2]


def test_of_a_large_checkpoint_it_is_confirmed_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path.as_uri())
    monkeypatch.setattr(checkpoint, "WHOLE_BYTES", 4)
    read: list[str] = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda path: read.append(path) or get(path))
    checkpoint.write(store, checkpoint.Checkpoint(step=1, state=b"state", record=RunRecord()), keep=1)
    assert read == [f"checkpoints/000001/{layout.MANIFEST}"]
    monkeypatch.setattr(store, "exists", lambda _: False)
    with pytest.raises(checkpoint.Unconfirmed, match="does not exist"):
        checkpoint.write(store, checkpoint.Checkpoint(step=2, state=b"state", record=RunRecord()), keep=1)
    assert checkpoint.steps(store) == [1, 2]


def test_a_checkpoint_of_before_sizes_were_written_down_is_read(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    checkpoint.write(store, checkpoint.Checkpoint(step=1, state=b"state", record=RunRecord(seconds=1)), keep=1)
    path = f"checkpoints/000001/{layout.MANIFEST}"
    manifest = json.loads(store.get(path))
    del manifest["size"]
    store.put(path, json.dumps(manifest).encode())
    found = checkpoint.newest_manifest(store)
    assert found is not None
    checkpoint.confirm(store, found)
    assert checkpoint.newest(store) == checkpoint.Checkpoint(step=1, state=b"state", record=RunRecord(seconds=1))
    store.put(path, b"{}")
    with pytest.raises(StorageError, match="is not a manifest"):
        checkpoint.newest(store)


def test_a_corrupt_checkpoint_is_named_and_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    checkpoint.write(store, checkpoint.Checkpoint(step=1, state=b"whole", record=RunRecord()), keep=2)
    (state,) = [path for path in store.list("checkpoints") if path.endswith(".pt")]
    store.put(state, b"other")
    with pytest.raises(StorageError, match="corrupt") as caught:
        checkpoint.newest(store)
    assert caught.value.code == "digest_mismatch"


def test_scoring_by_an_older_policy_does_not_change_training(models: dict[str, Path], policy_of: Maker) -> None:
    policies = [policy_of(models["qwen3"], disturb=0.3) for _ in range(2)]
    trainers = [Trainer(policy, algorithm(max_staleness=1), 1.0) for policy in policies]
    stale = make_groups(on_policy=False)
    nobodys = [
        replace(group, rows=[TrainRow(**{**_fields(row), "policies": [""] * len(row.engines)}) for row in group.rows])
        for group in stale
    ]
    for trainer in trainers:
        trainer.published("policy")
        trainer.step(make_groups(seed=1), 0)
    scored, unscored = (trainer.step(batch, 1) for trainer, batch in zip(trainers, (stale, nobodys), strict=True))
    assert unscored.mismatch.own.tokens == 0
    assert set(scored.mismatch.engines) == {"engine-0 on policy"}
    ends = [replace(stale[0], rows=stale[0].rows[:1]), replace(stale[-1], rows=stale[-1].rows[-1:])]
    with torch.no_grad(), policies[0].with_trained_state(trainers[0]._published["policy"]):  # pyright: ignore[reportPrivateUsage]
        logprobs = torch.cat([found for end in ends for _, found in policies[0].logprobs(end, 1.0)])
    assert scored.mismatch.own.tokens == len(logprobs) == sum(sum(end.rows[0].mask) for end in ends)
    assert scored.mismatch.own.mean == pytest.approx(float((logprobs + 4.0).abs().mean()), rel=1e-6)
    states = [policy.adapter_state() for policy in policies]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_token_is_compared_with_the_version_that_sampled_it(models: dict[str, Path], policy_of: Maker) -> None:
    """Episodes that go on over an update have tokens of several versions, each of which scores its own."""
    policy = policy_of(models["qwen3"], disturb=0.3)
    trainer = Trainer(policy, algorithm(max_staleness=2), 1.0)
    for version in ("v0", "v1"):
        trainer.published(version)
        trainer.step(make_groups(seed=1), 0)
    trainer.published("v2")
    versions = ("v0", "v1", "v2")
    groups = [
        replace(group, rows=[_of_versions(row, versions[place % 2 :]) for place, row in enumerate(group.rows)])
        for group in make_groups()
    ]
    with torch.no_grad():
        scores = {}
        for version in versions:
            with policy.with_trained_state(trainer._published[version]):  # pyright: ignore[reportPrivateUsage]
                scores[version] = [policy.logprobs(group, 1.0) for group in groups]
    rows = [row for group in groups for row in group.rows]
    by_version = {
        version: [logprob for group in scores[version] for _, logprobs in group for logprob in logprobs.tolist()]
        for version in versions
    }
    origins = [name for row in rows for name in row.policies]
    assert set(origins) == set(versions)
    expected = {
        f"engine-0 on {version}": [
            abs(score + 4.0) for score, name in zip(by_version[version], origins, strict=True) if name == version
        ]
        for version in versions
    }
    result = trainer.step(groups, 2)
    newest = result.mismatch.engines["engine-0 on v2"]
    assert newest.tokens == len(expected["engine-0 on v2"])
    for name, differences in expected.items():
        mismatch = result.mismatch.engines[name]
        assert 0 < mismatch.tokens <= len(differences)
        assert mismatch.max <= max(differences) + 1e-4
    assert newest.mean == pytest.approx(sum(expected["engine-0 on v2"]) / newest.tokens, rel=1e-4)


def _of_versions(row: TrainRow, versions: Sequence[str]) -> TrainRow:
    """The row with equal shares of its tokens from each version, the last of which is the newest."""
    count = sum(row.mask)
    policies = [versions[place * len(versions) // count] for place in range(count)]
    return TrainRow(
        **{**_fields(row), "policies": policies, "on_policy": bytes(name == versions[-1] for name in policies)}
    )


@given(
    st.lists(
        st.lists(
            st.lists(
                st.tuples(
                    st.sampled_from(["", "old", "older", "newest"]),
                    st.sampled_from(["engine-0", "engine-1", "engine-2"]),
                ),
                max_size=4,
            ),
            min_size=1,
            max_size=4,
        ),
        max_size=4,
    )
)
def test_the_first_and_last_rows_cover_each_engine_of_an_older_policy(
    batch: list[list[list[tuple[str, str]]]],
) -> None:
    groups = [
        TrainGroup(
            id=str(number),
            prompt=array("i", [1, 2]),
            rows=[
                TrainRow(
                    token_ids=array("i", [3] * len(tokens)),
                    mask=bytes([1] * len(tokens)),
                    behaviour=array("f", [-1.0] * len(tokens)),
                    advantages=array("d", [1.0] * len(tokens)),
                    sequence=place,
                    on_policy=bytes(policy == "newest" for policy, _ in tokens),
                    policies=[policy for policy, _ in tokens],
                    engines=[engine for _, engine in tokens],
                )
                for place, tokens in enumerate(rows)
            ],
        )
        for number, rows in enumerate(batch)
    ]
    chosen = stale_rows(groups)
    older_origins = {origin for rows in batch for tokens in rows for origin in tokens if origin[0] in {"old", "older"}}
    kept = {
        (policy, engine)
        for policy, some in chosen.items()
        for group in some
        for row in group.rows
        for name, engine in zip(row.policies, row.engines, strict=True)
        if name == policy
    }
    assert kept == older_origins
    for policy, some in chosen.items():
        rows = [row for group in some for row in group.rows]
        of_policy = [row for group in groups for row in group.rows if policy in row.policies]
        assert len(rows) <= 2 * len({engine for name, engine in older_origins if name == policy})
        assert rows[0] is of_policy[0]
        assert rows[-1] is of_policy[-1]
        assert len({group.id for group in some}) == len(some), "the rows of a group share one pass"


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_neither_parts_nor_rows_change_what_an_episode_weighs(
    models: dict[str, Path], policy_of: Maker, loss: str
) -> None:
    """An episode split into rows keeps its statistics and its weight, however the batch is cut."""
    groups = make_groups()
    joined = [replace(group, rows=[replace(row, sequence=row.sequence // 2) for row in group.rows]) for group in groups]
    settings = algorithm(loss=loss, aggregation="seq_mean_token_mean", kl_coefficient=0.1, kl_estimator="k3")
    results: list[tuple[float, float]] = []
    for limit in (16_384, 20):
        policy = policy_of(models["qwen3"], disturb=0.3, tokens_per_pass=limit)
        result = Trainer(policy, settings, 1.0).step(joined, 0)
        results.append((result.loss, result.grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    apart = Trainer(policy_of(models["qwen3"], disturb=0.3), settings, 1.0).step(groups, 0)
    assert apart.loss != pytest.approx(results[0][0], rel=1e-3)


def test_a_kl_term_trains_groups_without_an_advantage(models: dict[str, Path], policy_of: Maker) -> None:
    policy = policy_of(models["qwen3"], disturb=0.3)
    before = {name: weight.clone() for name, weight in policy.adapter_state().items()}
    result = Trainer(policy, algorithm(kl_coefficient=0.1, kl_estimator="k2"), 1.0).step(make_groups(advantage=0.0), 0)
    assert result.loss > 0
    assert any(not torch.equal(weight, before[name]) for name, weight in policy.adapter_state().items())


def test_the_reference_is_the_base_model(models: dict[str, Path], policy_of: Maker) -> None:
    changed, base = policy_of(models["qwen3"], disturb=0.3), policy_of(models["qwen3"])
    (group,) = make_groups(count=1)
    with torch.no_grad():
        expected = [logprobs for _, logprobs in base.logprobs(group, 0.7)]
    for found, wanted in zip(changed.reference_logprobs(group, 0.7), expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
