"""Parts of `benchmarks.gpu` that need no engine: tests, the learner's step, its memory, two devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.lines import Line, NotRun, figure, not_run
from benchmarks.gpu.parts import Place
from benchmarks.one_step import Options, Shape, sampled
from benchmarks.random_models import make, parameters

ROOT = Path(__file__).parents[2]
STEP = Shape(prompt=512, completion=1024, groups=4, ragged=True)
"""4 groups of 8 rows: the step that was measured on an H200."""
FULL_SEQUENCE = Shape(prompt=1, completion=16_383, size=2, groups=1)
"""Two micro-batches of one sequence: the step of prime-rl's committed baselines."""
PRIME_RL = {"0.6B": 13_342.0, "4B": 6_229.0}
"""Its tokens per second, by the authors on one H100."""
SIZES = ("1.7B", "0.6B", "4B", "8B")
"""The most important first."""


def gpu_tests(place: Place) -> Iterator[Line]:
    """All tests marked `gpu`."""
    if place.device == "cpu":
        raise NotRun("the tests marked gpu need one")
    yield from pytest_lines("a", ["-m", "gpu", "tests/unit/learner"])


def pytest_lines(part: str, arguments: list[str]) -> Iterator[Line]:
    """Each test of a run of pytest."""
    if find_spec("pytest") is None:
        raise NotRun("pytest is not installed")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if not report.exists():
            last = (done.stdout + done.stderr).strip().splitlines()
            raise NotRun(f"pytest did not start: {last[-1] if last else done.returncode}")
        for case in ElementTree.parse(report).iter("testcase"):
            yield test_line(part, case)


def test_line(part: str, case: ElementTree.Element) -> Line:
    name, problem = case.get("name", ""), next(iter(case), None)
    if problem is None:
        return Line(part=part, name=name, status="passed", value=float(case.get("time", 0)), unit="s")
    message = problem.get("message", "").strip().partition("\n")[0][:200]
    return Line(part=part, name=name, status="not run" if problem.tag == "skipped" else "failed", note=message)


def alone(candidate: str, model: Path, shape: Shape, options: Options) -> dict[str, float]:
    """Runs a step in a child process.

    Raises:
        NotRun: It failed, such as for want of memory.
    """
    described = json.dumps({"shape": asdict(shape), "options": asdict(options)})
    command = [sys.executable, "-m", "benchmarks.learner_step", "--only", candidate, str(model)]
    done = subprocess.run(command, input=described, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        last = done.stderr.strip().splitlines()
        raise NotRun(last[-1][:200] if last else f"code {done.returncode}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def steps(place: Place) -> Iterator[Line]:
    """KestRL's step, in few places of memory and as fast as it can be, beside the bare loop and TRL."""
    rate = matmul_rate(place)
    yield figure("b", "matmul", rate / 1e12, "TFLOP/s", note="bfloat16" if place.device != "cpu" else "float32")
    shape = STEP.smaller(16) if place.quick else STEP
    sequence = FULL_SEQUENCE.smaller(128) if place.quick else FULL_SEQUENCE
    for size in ("tiny",) if place.quick else SIZES:
        model = make(size, place.folder, place.device)
        yield from step_lines(place, size, model, shape, rate)
        if size in PRIME_RL or place.quick:
            yield from sequence_lines(place, size, model, sequence)


def options_of(place: Place) -> Options:
    dtype = "float32" if place.device == "cpu" else "bfloat16"
    return Options(device=place.device, dtype=dtype, checkpointing=True, repeats=1 if place.quick else 2)


def step_lines(place: Place, size: str, model: Path, shape: Shape, rate: float) -> Iterator[Line]:
    base = options_of(place)
    candidates = {
        "ours": ("ours", base),
        "ours_without_checkpointing": ("ours", replace(base, checkpointing=False)),
        "bare_4": ("bare", replace(base, micro=4)),
        "trl_1": ("trl", replace(base, micro=1)),
        "trl_4": ("trl", replace(base, micro=4)),
    }
    if size == SIZES[0] or place.quick:
        candidates["ours_float32_adapter"] = ("ours", replace(base, rounded=False))
        candidates["ours_compiled"] = ("ours", replace(base, compiled=True))
    baseline: dict[str, float] | None = None
    for name, (candidate, options) in candidates.items():
        title = f"step/{size}/{name}"
        if candidate == "trl" and find_spec("trl") is None:
            yield not_run("b", title, "trl is not installed")
            continue
        if options.compiled and place.quick:
            yield not_run("b", title, "a compiler takes minutes on a CPU")
            continue
        try:
            figures = alone(candidate, model, shape, options)
        except NotRun as reason:
            yield not_run("b", title, str(reason))
            continue
        baseline = baseline or figures
        reference = {} if figures is baseline else {"reference": baseline["seconds"], "against": "ours"}
        yield figure(
            "b", f"{title}/seconds", figures["seconds"], "s", note=f"first {figures['first_seconds']:.3g}", **reference
        )
        yield figure("b", f"{title}/memory", figures["mb"] / 1024, "GiB")
        if candidate == "ours":
            tokens = sampled(shape, vocabulary_of(model))
            yield figure("b", f"{title}/passes", figures["passes"], "passes")
            yield figure("b", f"{title}/sampled_tokens_per_second", tokens / figures["seconds"], "tokens/s")
            flops = (6 if options.checkpointing else 4) * parameters(model) * figures["tokens"]
            yield figure(
                "b", f"{title}/share_of_matmul", flops / figures["seconds"] / rate, "", note="6N or 4N a token"
            )


def sequence_lines(place: Place, size: str, model: Path, shape: Shape) -> Iterator[Line]:
    title = f"sequence/{size}/tokens_per_second"
    try:
        figures = alone("ours", model, shape, options_of(place))
    except NotRun as reason:
        yield not_run("b", title, str(reason))
        return
    yield figure(
        "b",
        title,
        figures["tokens"] / figures["seconds"],
        "tokens/s",
        reference=None if place.quick else PRIME_RL[size],
        against="" if place.quick else "prime-rl on one H100, by its authors",
        note=f"{figures['mb'] / 1024:.1f} GiB",
    )


def vocabulary_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def matmul_rate(place: Place) -> float:
    """Operations per second of a large matrix product."""
    import torch

    size = 256 if place.quick else 8192
    dtype = torch.float32 if place.device == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=place.device, dtype=dtype) for _ in range(2))
    wait = torch.cuda.synchronize if place.device == "cuda" else lambda: None
    taken: list[float] = []
    for _ in range(5):
        wait()
        began = time.perf_counter()
        for _ in range(5):
            torch.mm(left, right)
        wait()
        taken.append((time.perf_counter() - began) / 5)
    return 2 * size**3 / min(taken)


def memory(place: Place) -> Iterator[Line]:
    """The learner's estimated peak beside the measured one."""
    from kestrl._shared.plan.memory import MemoryPart, MemorySettings
    from kestrl._shared.plan.settings.learner import PolicySettings
    from kestrl_learner.memory.estimate import estimate

    shape = STEP.smaller(16) if place.quick else replace(STEP, ragged=False)
    for size in ("tiny",) if place.quick else ("1.7B", "0.6B"):
        model = make(size, place.folder, place.device)
        options = options_of(place)
        policy = PolicySettings(
            model=str(model),
            dtype=options.dtype,
            rank=16,
            alpha=32.0,
            targets="all-linear",
            seed=1,
            device=place.device,
            gradient_checkpointing=True,
        )
        asked = MemorySettings(
            policy=policy,
            kind="AgentRLJob",
            prompt=shape.prompt,
            completion=shape.completion,
            group_rows=shape.size,
            groups=shape.groups,
            published=0,
            several_updates=False,
        )
        found = estimate(asked)
        tensors = (found.total - found.parts[MemoryPart.PROGRAM]) / 2**30
        if place.device == "cpu":
            yield figure("f", f"memory/{size}/estimate", tensors, "GiB")
            yield not_run("f", f"memory/{size}/measured", "on a CPU the test of the estimate measures it")
            continue
        measured = alone("ours", model, shape, options)["mb"] / 1024
        yield figure(
            "f", f"memory/{size}/measured", measured, "GiB", reference=tensors, against="the estimate, without program"
        )
    yield not_run("f", "memory/engine", "part g shows what an engine and a learner leave of a device that they share")


def base_moves(place: Place) -> Iterator[Line]:
    """Seconds in which a base leaves the device and comes back, as in each turn on one that cannot hold it beside the
    engine.
    """
    from kestrl_learner.model.policy_model import PolicyModel

    size = "tiny" if place.quick else "1.7B"
    model, dtype = make(size, place.folder, place.device), options_of(place).dtype
    policy = PolicyModel(
        str(model), dtype=dtype, rank=16, alpha=32.0, targets="all-linear", seed=1, device=place.device
    )
    base = policy.base_weights
    gib = sum(weight.nbytes for weight in policy.network.parameters() if not weight.requires_grad) / 2**30
    moves = {"first_leave": base.leave, "come_back": base.come_back, "leave": base.leave}
    for name, move in moves.items():
        began = time.perf_counter()
        move()
        yield figure("g", f"base/{size}/{name}", time.perf_counter() - began, "s", note=f"{gib:.3g} GiB")


def two_devices(place: Place) -> Iterator[Line]:
    """Ranks over NCCL, and processes on devices of their own."""
    if place.device == "cpu":
        raise NotRun("needs two GPUs")
    import torch

    if (count := torch.cuda.device_count()) < 2:
        raise NotRun(f"needs two GPUs, and {count} are here")
    yield from pytest_lines("h", ["-m", "gpu", "tests/unit/learner/ranks"])
    yield from disjoint(place)


def disjoint(place: Place) -> Iterator[Line]:
    """Whether the plan gives engine and learner different devices."""
    manifest = place.folder / "two.yaml"
    text = (ROOT / "examples" / "email-search" / "quickstart.yaml").read_text()
    manifest.write_text(
        text.replace("profile: cpu", "profile: nvidia").replace("vllm, replicas: 2", "vllm, replicas: 1")
    )
    command = [sys.executable, "-m", "kestrl._app.cli.main", "plan", str(manifest), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise NotRun(f"kestrl plan: {(done.stdout + done.stderr).strip().splitlines()[-1][:200]}")
    devices = [index for part in json.loads(done.stdout) for index in part["device"]["indices"]]
    right = len(devices) == len(set(devices)) >= 2
    yield Line(
        part="h", name="plan/disjoint", status="passed" if right else "failed", note=" and ".join(map(str, devices))
    )
