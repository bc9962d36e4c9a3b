"""Compiled layers: gradients, lengths, graphs, and what happens where layers cannot be compiled."""
# torch has loose types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.learner.fakes import make_policy, model_with_a_window
from tests.unit.learner.ranks.forked_ranks import on_ranks
from tests.unit.learner.train.test_training import algorithm, gradients, make_groups
from torch import Tensor, nn
from torch._inductor.exc import CppCompileError, InductorError
from transformers.modeling_layers import GradientCheckpointingLayer

from kestrl_learner.batch.filling import Piece
from kestrl_learner.batch.rows import TrainGroup, plain_group
from kestrl_learner.model import compiled_layers
from kestrl_learner.model.base_weights import BaseAway
from kestrl_learner.model.compiled_layers import compile_layers
from kestrl_learner.model.full_model import FullModel
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.model.rounded_adapter import RoundedLinear
from kestrl_learner.train.trainer import Trainer

LOG = compiled_layers.__name__
EXACT = "aot_eager"
"""A backend that computes a graph by the same operations as without it: fast to make, and exact."""


def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "COMPILER", EXACT)


def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The relative distance of two gradients."""
    one, other = (torch.cat([part.flatten().double() for part in parts]) for parts in (some, others))
    return float((one - other).norm() / other.norm())


def batches() -> Iterator[list[TrainGroup]]:
    """One to three groups of rows of many lengths, and rows without a shared prompt."""
    for seed in range(6):
        groups = make_groups(count=1 + seed % 3, size=2 + seed, seed=seed)
        yield groups
    yield [plain_group([[1, 2, 3], list(range(1, 60)), [7, 8]])]


# A policy model


@pytest.fixture(scope="module")
def pair(models: dict[str, Path]) -> Generator[tuple[PolicyModel, PolicyModel]]:
    """The same model without and with compiled layers, of which the first is checkpointed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        exactly(monkeypatch)
        options: dict[str, Any] = {"gradient_checkpointing": True, "checkpointed_layers": 1, "tokens_per_pass": 96}
        plain, compiled = (
            make_policy(models["qwen3"], disturb=0.3, compile_layers=compiled, **options) for compiled in (False, True)
        )
        compiled.load_trained_state(plain.trained_state())
        assert plain.graphs is None
        yield plain, compiled


@pytest.mark.timeout(900)
def test_the_graphs_of_the_start_serve_every_pass(pair: tuple[PolicyModel, PolicyModel]) -> None:
    plain, compiled = pair
    assert compiled.graphs is not None
    count = len(compiled.graphs)
    assert 0 < count <= 22
    for groups in batches():
        logprobs, slopes = gradients(compiled, groups)
        expected, right = gradients(plain, groups)
        assert all(
            torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in zip(logprobs, expected, strict=True)
        )
        assert distance(slopes, right) <= 1e-6
    group = make_groups()[0]
    for one, other in zip(*(policy.reference_logprobs(group, 1.0) for policy in pair), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    several = [Piece(number, group, group.rows) for number, group in enumerate(make_groups(count=2, size=2))]
    with torch.no_grad():
        one, other = (policy.pass_logprobs(several, 1.0, None) for policy in pair)
        assert torch.allclose(one, other, atol=1e-6)
    for adapter in (True, False):
        assert compiled.score([1, 5, 9, 2], adapter=adapter) == pytest.approx(
            plain.score([1, 5, 9, 2], adapter=adapter)
        )
    with ThreadPoolExecutor(1) as steps:  # as those of a learner
        steps.submit(gradients, compiled, make_groups()).result()
    assert len(compiled.graphs) == count
    assert not compiled.graphs.problem


@pytest.mark.timeout(900)
def test_a_pass_that_fits_no_graph_is_computed_and_the_log_says_so_once(
    pair: tuple[PolicyModel, PolicyModel], caplog: pytest.LogCaptureFixture
) -> None:
    """A sequence of one token: torch makes no graph for it and longer ones."""
    plain, compiled = pair
    assert compiled.graphs is not None
    count, groups = len(compiled.graphs), [plain_group([[5, 6]])]
    with caplog.at_level(logging.WARNING, LOG):
        for _ in range(2):
            found, expected = gradients(compiled, groups), gradients(plain, groups)
            assert torch.allclose(found[0][0], expected[0][0], atol=1e-6)
            assert distance(found[1], expected[1]) <= 1e-6
    (record,) = (record for record in caplog.records if record.name == LOG)
    assert "some passes are computed without compiled layers" in record.message
    assert "(1, 1, 32)" in record.message
    assert len(compiled.graphs) == count
    usual = make_groups(seed=9)
    assert distance(gradients(compiled, usual)[1], gradients(plain, usual)[1]) <= 1e-6


@pytest.mark.timeout(900)
def test_a_step_and_a_base_that_was_away(pair: tuple[PolicyModel, PolicyModel]) -> None:
    """Weights that change in place, and others at new addresses, are those that are computed with."""
    start = copy.deepcopy(pair[0].trained_state())
    states: list[dict[str, Tensor]] = []
    for policy in pair:
        trainer = Trainer(policy, algorithm(learning_rate=1e-3), 1.0)
        trainer.step(make_groups(seed=1), 0)
        policy.base_weights.leave()
        with pytest.raises(BaseAway):
            policy.score([1, 5, 9, 2], adapter=True)
        policy.base_weights.come_back()
        trainer.step(make_groups(seed=2), 1)
        states.append(copy.deepcopy(policy.trained_state()))
        policy.load_trained_state(start)
    plain, compiled = states
    moved = sum(float((plain[name] - start[name]).square().sum()) for name in start) ** 0.5
    deviation = sum(float((plain[name] - compiled[name]).square().sum()) for name in start) ** 0.5
    assert deviation < 1e-2 * moved


@pytest.mark.share(3)
@pytest.mark.timeout(900)
def test_copies_of_a_rounded_adapter_follow_its_updates(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit as without graphs, over updates and loaded weights."""
    exactly(monkeypatch)
    options: dict[str, Any] = {"dtype": "bfloat16", "rounded": True, "gradient_checkpointing": True}
    plain = make_policy(models["qwen3"], disturb=0.3, **options)
    compiled = make_policy(models["qwen3"], disturb=0.3, compile_layers=True, **options)
    assert compiled.graphs is not None
    count = len(compiled.graphs)
    start = copy.deepcopy(plain.trained_state())
    seen: list[list[float]] = []
    for policy in (plain, compiled):
        policy.load_trained_state(start)
        trainer = Trainer(policy, algorithm(learning_rate=0.05, mini_batches=2), 1.0)
        losses = [trainer.step(make_groups(seed=step), step).loss for step in range(3)]
        scores = policy.score([1, 5, 9, 2], adapter=True)
        policy.load_trained_state(start)
        seen.append([*losses, *scores, *policy.score([1, 5, 9, 2], adapter=True)])
    assert seen[0] == seen[1]
    assert seen[1][3:6] != seen[1][6:9], "the updates have changed what is computed"
    assert len(compiled.graphs) == count
    assert not compiled.graphs.problem
    for layer in (module for module in compiled.network.modules() if isinstance(module, RoundedLinear)):
        assert layer.copies is not None
        low: Any = layer.lora_A["default"].weight
        assert torch.equal(layer.copies.low, low.bfloat16())


# Layers that are not compiled


class SmallLayer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.linear(states).tanh()


class SmallNetwork:
    """Two layers, and a trial of them."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.module = nn.Sequential(SmallLayer(), SmallLayer())

    def trial(self) -> Iterator[Tensor]:
        states = torch.linspace(-1, 1, 20).view(5, 4)
        yield self.module(states).sum(-1)
        with torch.no_grad():
            without_gradient = self.module(states).sum(-1)
        yield without_gradient

    def compiled(self) -> compiled_layers.Graphs | None:
        return compile_layers(self.module, self.trial, torch.float32)


def refused(network: SmallNetwork, caplog: pytest.LogCaptureFixture) -> str:
    """The warning of a network whose layers stay as they are."""
    before = list(network.trial())
    with caplog.at_level(logging.WARNING, LOG):
        assert network.compiled() is None
    assert not any("forward" in vars(layer) for layer in network.module)
    assert all(torch.equal(one, other) for one, other in zip(before, network.trial(), strict=True))
    (record,) = (record for record in caplog.records if record.name == LOG)
    assert "layers are not compiled, so that a step takes longer" in record.message
    return record.message


WITHOUT_COMPILER = """
import logging
from tests.unit.learner.model.test_compiled_layers import SmallNetwork

logging.basicConfig()
assert SmallNetwork().compiled() is None
"""


def test_without_a_compiler_layers_stay_as_they_are() -> None:
    """In a process of its own: Inductor keeps the compiler that it has found, and starts threads."""
    environment = {**os.environ, "CXX": "/nowhere/c++", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    root = Path(__file__).parents[4]
    ended = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "layers are not compiled" in ended.stderr
    assert "No working C++ compiler found" in ended.stderr


def test_the_first_error_that_a_compiler_prints_is_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        output = "part.cpp: In function\npart.cpp:1: error: no\n"
        raise InductorError(CppCompileError(["g++"], output), None)

    monkeypatch.setattr(compiled_layers, "COMPILER", fails)
    assert refused(SmallNetwork(), caplog).endswith("CppCompileError: C++ compile error: part.cpp:1: error: no")


def test_what_a_compiler_computes_is_compared(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return lambda *inputs: tuple(part * 1.01 for part in graph.forward(*inputs))

    monkeypatch.setattr(compiled_layers, "COMPILER", wrong)
    assert "log-probs differ by 0.0" in refused(SmallNetwork(), caplog)


def test_the_number_of_graphs_has_a_bound(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    exactly(monkeypatch)
    monkeypatch.setattr(compiled_layers, "MOST_GRAPHS", 1)
    assert "they take more than 1 graphs" in refused(SmallNetwork(), caplog)


def test_layers_that_can_be_compiled_are(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    exactly(monkeypatch)
    network = SmallNetwork()
    before = list(network.trial())
    with caplog.at_level(logging.INFO, LOG):
        graphs = network.compiled()
    assert graphs is not None
    assert f"2 layers are compiled, by {len(graphs)} graphs" in caplog.text
    assert all(torch.allclose(one, other) for one, other in zip(before, network.trial(), strict=True))


def test_layers_that_torch_makes_no_graph_of_are_named(caplog: pytest.LogCaptureFixture) -> None:
    network = SmallNetwork()
    with torch.compiler.set_stance("force_eager"):
        assert "torch has made no graph of them" in refused(network, caplog)


def test_other_models_are_not_compiled_and_the_log_says_why(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, LOG):
        padded = make_policy(model_with_a_window(tmp_path), compile_layers=True)
        full_model = FullModel(str(models["qwen3"]), dtype="float32", seed=1, compile_layers=True)
    assert padded.graphs is full_model.graphs is None
    assert "rows of this family are padded" in caplog.text
    assert "all parameters are trained" in caplog.text


def test_sharded_layers_are_not_compiled_and_the_log_says_why(
    models: dict[str, Path],
) -> None:
    (found,) = on_ranks(1, graphs_of_a_rank, models["qwen3"])
    assert found == "layers are not compiled, so that a step takes longer: they are sharded over ranks"


def graphs_of_a_rank(ranks: Any, folder: Path) -> str:
    """The warning of a rank that was to compile its layers."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger(LOG).addHandler(handler)
    assert make_policy(folder, compile_layers=True, group=ranks).graphs is None
    return records[0].getMessage()
