"""One optimiser step of the learner on SmolLM2-135M, in three shapes: prompts of 160 tokens with groups of 8
completions of 40; prompts of 200 with completions of 2,000 (reasoning); and prompts of 2,000 with rows of 500 sampled
tokens in five turns with 1,200 of tool results between them (long agent).

Against, in the same run: the bare loop (transformers, peft and torch with the prompt shared the same way, and nothing
else), the bare loop on plain rows (every row with its prompt), and TRL's GRPOTrainer where it is installed, with 1 and
4 rows, or a whole group, at a time. Also KestRL's step on rows that an older policy sampled on two engines, the first
and the last of each of which are also scored by that policy; and KestRL's step beside `NEIGHBOURS` busy processes, such
as builds or other jobs: busy-waiting threads would then wait for the time slices of the neighbours. Each runs in its
own process, for separate memory figures; the fastest of some after a warm-up counts. `--quick` takes a tiny model of
random weights and a tenth of the tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from benchmarks.one_step import CANDIDATES, SHAPES, Options, Shape
from benchmarks.random_models import make
from benchmarks.report import Row, main

from kestrl._shared.plan.components import TORCH_DEFAULTS

NEIGHBOURS = 2
QUICK = 10
"""Divisor of the tokens of a quick run."""
MICRO = (1, 4)
"""Rows at a time of the bare loop and of TRL, in the shapes of long rows."""


def alone(name: str, model: str, shape: Shape, options: Options) -> dict[str, float]:
    """Runs a step in a child process."""
    command = [sys.executable, "-m", "benchmarks.learner_step", "--only", name, model]
    described = json.dumps({"shape": asdict(shape), "options": asdict(options)})
    environment = {**TORCH_DEFAULTS, **os.environ}  # as in the plan for a learner
    done = subprocess.run(command, input=described, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextmanager
def busy_neighbours() -> Generator[None]:
    """Runs busy processes within a block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NEIGHBOURS)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def short(model: str, shape: Shape) -> Iterator[Row]:
    """The rows of the short shape."""
    baseline = alone("ours", model, shape, Options())
    older = alone("ours", model, shape, Options(newest=False))
    plain = alone("bare", model, shape, Options(micro=shape.size))
    loop = alone("bare", model, shape, Options(micro=shape.size, shared=True))
    seconds = baseline["seconds"]
    yield Row(name="learner_step/seconds", value=seconds, unit="s", reference=loop["seconds"], against="bare loop")
    yield Row(
        name="learner_step/cpu_seconds",
        value=baseline["cpu_seconds"],
        unit="s",
        reference=loop["cpu_seconds"],
        against="bare loop",
    )
    yield Row(
        name="learner_step/against_plain_rows",
        value=plain["seconds"] / seconds,
        unit="x faster",
        reference=2.0,
        against="goal",
    )
    if trl_is_installed():
        peer = alone("trl", model, shape, Options(micro=shape.size))
        yield Row(
            name="learner_step/against_trl",
            value=peer["seconds"] / seconds,
            unit="x faster",
            reference=1.5,
            against="goal",
        )
    yield Row(name="learner_step/memory", value=baseline["mb"], unit="MB", reference=loop["mb"], against="bare loop")
    with busy_neighbours():
        contended = alone("ours", model, shape, Options())
    yield Row(
        name=f"learner_step/{NEIGHBOURS}_busy_neighbours/seconds",
        value=contended["seconds"],
        unit="s",
        reference=seconds,
        against="alone, goal 3",
    )
    on_policy = "rows of the newest policy"
    yield Row(
        name="learner_step/older_policy/seconds", value=older["seconds"], unit="s", reference=seconds, against=on_policy
    )
    yield Row(
        name="learner_step/older_policy/memory",
        value=older["mb"],
        unit="MB",
        reference=baseline["mb"],
        against=on_policy,
    )


def long(name: str, model: str, shape: Shape) -> Iterator[Row]:
    """The rows of a shape of long rows: KestRL's step beside the others, by the clock and of CPU time."""
    baseline = alone("ours", model, shape, Options(repeats=1))
    for peer in ("bare", "trl") if trl_is_installed() else ("bare",):
        for micro in MICRO:
            other = alone(peer, model, shape, Options(micro=micro, repeats=1))
            against = f"{'bare loop' if peer == 'bare' else 'TRL'}, {micro} at a time"
            for figure, unit in (("seconds", "s"), ("cpu_seconds", "s"), ("mb", "MB")):
                yield Row(
                    name=f"learner_step/{name}/{peer}_{micro}/{figure}",
                    value=baseline[figure],
                    unit=unit,
                    reference=other[figure],
                    against=against,
                )


def counted(name: str, model: str, shape: Shape) -> Iterator[Row]:
    """What the passes of a shape compute, on a tiny model, for CPU and GPU."""
    figures = alone("operations", model, shape, Options(repeats=0))
    step = alone("ours", model, shape, Options(repeats=0))
    yield Row(name=f"learner_step/{name}/passes", value=figures["passes"], unit="passes")
    yield Row(
        name=f"learner_step/{name}/operations_per_pass_and_layer",
        value=figures["per_pass_and_layer"],
        unit="operations",
    )
    yield Row(
        name=f"learner_step/{name}/tokens_per_sampled_token",
        value=step["tokens_per_sampled_token"],
        unit="tokens",
    )


def in_bfloat16(model: str, shape: Shape) -> Iterator[Row]:
    """What a rounded adapter saves in operations."""
    exact, rounded = (
        alone("operations", model, shape, Options(repeats=0, dtype="bfloat16", checkpointing=True, rounded=rounded))
        for rounded in (False, True)
    )
    for figure, unit in (("per_pass_and_layer", "operations"), ("casts_per_pass_and_layer", "casts")):
        yield Row(
            name=f"learner_step/bfloat16/{figure}",
            value=rounded[figure],
            unit=unit,
            reference=exact[figure],
            against="adapter in float32",
        )


def trl_is_installed() -> bool:
    if find_spec("trl") is None:
        print("learner_step: trl is not installed, and its rows are missing", file=sys.stderr)
        return False
    return True


def measure() -> Iterator[Row]:
    from kestrl_demo_models.smollm2 import smollm2

    yield from measured(str(smollm2()), SHAPES)


def quick() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        shapes = {name: shape.smaller(QUICK) for name, shape in SHAPES.items()}
        yield from measured(str(make("tiny", Path(folder), "cpu")), shapes)


def measured(model: str, shapes: dict[str, Shape]) -> Iterator[Row]:
    yield from short(model, shapes["short"])
    for name in ("reasoning", "long_agent"):
        yield from long(name, model, shapes[name])
    with tempfile.TemporaryDirectory() as folder:
        tiny = str(make("tiny", Path(folder), "cpu"))
        for name, shape in shapes.items():
            yield from counted(name, tiny, shape)
        yield from in_bfloat16(tiny, shapes["short"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        given = json.load(sys.stdin)
        print(json.dumps(CANDIDATES[sys.argv[2]](sys.argv[3], Shape(**given["shape"]), Options(**given["options"]))))
    else:
        main(__doc__, measure, quick)
