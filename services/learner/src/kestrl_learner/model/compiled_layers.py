"""Layers of a model that torch compiles when the model is loaded, and not after that.

A few rows are computed by each kind of pass, so that every graph exists before the first step; lengths are symbols in
the graphs, of which one serves all layers. What a kernel adds up in which order may depend on the lengths that it was
compiled for, and those are always the same rows: a run that is resumed makes the same graphs.

A pass that fits no graph is computed operation by operation as without this, which the log says once. Attention is no
part of the graphs: `batch.packing` computes it between them, row by row or by FlexAttention.
"""
# torch.compile has partial annotations; values from it are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

from kestrl_learner.batch.rows import plain_group
from kestrl_learner.model.checkpointing import layers_of
from kestrl_learner.model.rounded_adapter import RoundedLinear

log = logging.getLogger(__name__)
COMPILER = "inductor"
"""Backend of torch.compile."""
MOST_GRAPHS = 31
"""Largest number of graphs of a model; a family that takes more is not compiled. A qwen3 with an adapter has 18."""
TRIAL = plain_group([[1 + place % 31 for place in range(row, row + 32)] for row in range(16)])
"""Rows by which graphs are made. As many tokens as a pass has on a CPU: kernels share work among threads by them."""
Trial = Callable[[], Iterator[Tensor]]


class TrialResult(NamedTuple):
    """What a few rows are computed as, by each kind of pass."""

    logprobs: Sequence[Tensor]
    """(N,) of each kind."""
    slope: Tensor
    """Gradient of a weighted sum of the first kind's, (trained weights,)."""


class Graphs:
    """The graphs of a model's layers: the backend of torch.compile.

    Graphs that are asked for after the trial are not compiled.
    """

    def __init__(self) -> None:
        self._compile: Callable[..., Any] = lookup_backend(COMPILER)
        self._count = 0
        self.open = True
        """Whether new graphs are compiled."""
        self.problem = ""
        """Why the compiler is not used."""

    def __len__(self) -> int:
        return self._count

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if not self.open:
            self._report(inputs)
            return graph.forward
        if self._count == MOST_GRAPHS:
            self.problem = f"they take more than {MOST_GRAPHS} graphs"
        if self.problem:
            return graph.forward
        try:
            compiled: Callable[..., Any] = self._compile(graph, inputs)
        except BackendCompilerFailed as error:
            self.problem = _reason(error)
            return graph.forward
        self._count += 1
        return compiled

    def _report(self, inputs: Sequence[Any]) -> None:
        if not self.problem:
            self.problem = "a pass fits no graph"
            shapes = ", ".join(str(tuple(part.shape)) for part in inputs if isinstance(part, Tensor))
            log.warning("some passes are computed without compiled layers, which is slower: none fits %s", shapes)


def compile_layers(network: nn.Module, trial: Trial, dtype: torch.dtype) -> Graphs | None:
    """Compiles the layers of a network in place. They stay as they are, and the log says why, where torch cannot
    compile them or where what they compute would differ by more than rounding.

    Args:
        network: A model of transformers, with or without an adapter of peft.
        trial: Log-probabilities of a few rows by every kind of pass, the first with a gradient.
        dtype: What passes compute in.

    Returns:
        The graphs; None if the layers are not compiled.
    """
    if next(network.parameters()).device.type == "npu":
        return not_compiled("the compiler is not used on NPUs")
    began, graphs, layers = time.monotonic(), Graphs(), layers_of(network)
    expected = _computed(network, trial)
    _replace_forward(layers, graphs)
    try:
        difference = _difference(_computed(network, trial), expected, dtype)
    except TorchDynamoException as error:
        difference = _reason(error)
    graphs.open = False
    problem = graphs.problem or difference or ("" if len(graphs) else "torch has made no graph of them")
    if problem:
        for layer in layers:
            del layer.forward
        return not_compiled(problem)
    log.info("%d layers are compiled, by %d graphs in %.0f s", len(layers), len(graphs), time.monotonic() - began)
    return graphs


def not_compiled(reason: str) -> Graphs | None:
    """None, for layers that are not compiled; the log says why."""
    log.warning("layers are not compiled, so that a step takes longer: %s", reason)
    return None


def _replace_forward(layers: Sequence[nn.Module], graphs: Graphs) -> None:
    """Replaces `forward` and not the call: hooks, which gather weights or refuse to compute, stay outside of it."""
    compiler: Any = torch.compile  # its overloads lack two of the arguments
    compiled_functions: dict[Any, Any] = {}
    for layer in layers:
        function: Any = type(layer).forward
        if function not in compiled_functions:
            compiled_functions[function] = compiler(
                function, backend=graphs, dynamic=True, recompile_limit=MOST_GRAPHS + 1, isolate_recompiles=True
            )
        layer.forward = _forward(layer, compiled_functions[function])


def _forward(layer: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    rounded = [module for module in layer.modules() if isinstance(module, RoundedLinear)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        for module in rounded:  # a graph does not look at whether weights have changed
            module.current_copies()
        return compiled(layer, *args, **kwargs)

    return forward


def _computed(network: nn.Module, trial: Trial) -> TrialResult:
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    kinds = trial()
    first = next(kinds)
    weights = torch.linspace(-1, 1, len(first), device=first.device, dtype=first.dtype)
    slopes = torch.autograd.grad((first * weights).sum(), trained, materialize_grads=True)
    slope = torch.cat([part.flatten() for part in slopes])
    return TrialResult([first.detach(), *kinds], slope)


def _difference(result: TrialResult, expected: TrialResult, dtype: torch.dtype) -> str:
    """How results differ by more than rounding; empty if they do not."""
    rounding = 8 * torch.finfo(dtype).eps
    for logprobs, right in zip(result.logprobs, expected.logprobs, strict=True):
        deviation = float((logprobs - right).abs().max())
        if not deviation <= max(1e-4, rounding) * float(right.abs().max()):
            return f"log-probs differ by {deviation:g}"
    norm = expected.slope.norm().clamp(min=torch.finfo(expected.slope.dtype).tiny)
    off = float((result.slope - expected.slope).norm() / norm)
    return "" if off <= max(1e-3, 2 * rounding) else f"gradients differ by {off:.1%}"


def _reason(error: Exception) -> str:
    """The first line of a failure, and the first that a compiler printed as an error."""
    first_line, _, more_lines = str(error).strip().partition("\n")
    output = more_lines.partition("Output:\n")[2].splitlines()
    compiler_lines = [line.strip() for line in output if "error" in line][:1]
    return ": ".join([first_line or type(error).__name__, *compiler_lines])
