"""Parts of `benchmarks.gpu` with engines: the log-prob gap, publication, adapters in a batch, the quickstart."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.learner_parts import base_moves
from benchmarks.gpu.lines import Line, NotRun, figure, not_run
from benchmarks.gpu.parts import Place
from benchmarks.random_models import make

QUICKSTART = Path(__file__).parents[2] / "examples" / "email-search" / "quickstart.yaml"
VERSIONS = 20
RANKS = (16, 64, 1)
"""Ranks of adapters, the most usual first."""
ADAPTERS = (0, 1, 4, 16)
"""Adapters in one batch."""
PROMPTS, PROMPT, COMPLETION = 64, 128, 256
SHARE = 0.4
"""Share of the device's memory for an engine beside which another program runs."""


def need_engine(place: Place) -> None:
    """Raises NotRun where there is no engine, or none should be started."""
    if find_spec("vllm") is None:
        raise NotRun("vllm is not installed")
    if place.quick:
        raise NotRun("--quick starts no engine, which takes a minute on a CPU")


def engine_of(model: Path, dtype: str, **options: Any) -> Any:
    """An engine of vLLM in this process, without a tokenizer: models of random weights have none."""
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        gpu_memory_utilization=SHARE,
        max_model_len=2048,
        seed=1,
        **options,
    )


def prompts(count: int, vocabulary: int) -> list[dict[str, list[int]]]:
    chance = random.Random(2)
    return [{"prompt_token_ids": [chance.randrange(100, vocabulary) for _ in range(PROMPT)]} for _ in range(count)]


def gap(place: Place) -> Iterator[Line]:
    """Differences of the engine's and the learner's log-probs of the same tokens, each precision in a process."""
    need_engine(place)
    model = make("0.6B", place.folder, place.device)
    for name in ("float32", "bfloat16", "bfloat16_with_a_float32_head"):
        command = [sys.executable, "-m", "benchmarks.gpu.engine_parts", name, str(model), place.device]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        if done.returncode:
            yield not_run("c", f"gap/{name}", (done.stderr.strip().splitlines() or ["no message"])[-1][:200])
            continue
        for statistic, value in json.loads(done.stdout.splitlines()[-1]).items():
            note = "weights are random, which flatters"
            yield figure("c", f"gap/{name}/{statistic}", value, "nats", note=note)


def gap_of(name: str, model: Path, device: str) -> dict[str, float]:
    """Mean, root mean square and largest difference a token."""
    import torch
    from vllm import SamplingParams

    from kestrl_learner.batch.rows import TrainGroup, TrainRow
    from kestrl_learner.model.policy_model import PolicyModel

    dtype, _, head = name.partition("_with_")
    options = {"hf_overrides": {"head_dtype": "float32"}} if head else {}
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    given = prompts(PROMPTS, vocabulary)
    sampling = SamplingParams(
        temperature=1.0, max_tokens=COMPLETION, logprobs=0, seed=1, ignore_eos=True, detokenize=False
    )
    engine = engine_of(model, dtype, **options)
    outputs = [answer.outputs[0] for answer in engine.generate(given, sampling, use_tqdm=False)]
    theirs = [
        logprobs[token].logprob
        for output in outputs
        for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)
    ]
    del engine
    policy = PolicyModel(str(model), dtype=dtype, rank=16, alpha=32.0, targets="all-linear", seed=1, device=device)
    if head:
        policy._head = Float32Head(policy._head)  # the learner has no such option
    groups = [
        TrainGroup(
            id=str(number),
            prompt=array("i", prompt["prompt_token_ids"]),
            rows=[
                TrainRow(
                    token_ids=array("i", output.token_ids),
                    mask=bytes([1] * len(output.token_ids)),
                    behaviour=array("f"),
                    advantages=array("d"),
                    sequence=0,
                    on_policy=b"",
                    policies=[],
                    engines=[],
                )
            ],
        )
        for number, (prompt, output) in enumerate(zip(given, outputs, strict=True))
    ]
    with torch.no_grad():
        ours = [policy.pass_logprobs(pieces, 1.0, None) for group in groups for pieces in policy.passes([(0, group)])]
    off = (torch.cat(ours).cpu() - torch.tensor(theirs)).abs()
    return {"mean": float(off.mean()), "rms": float((off**2).mean().sqrt()), "max": float(off.max())}


class Float32Head:
    """A head that multiplies in float32."""

    def __new__(cls, head: Any) -> Any:
        import torch

        class Head(torch.nn.Module):
            def forward(self, states: torch.Tensor) -> torch.Tensor:
                return states.float() @ head.weight.float().T

        return Head()


def publication(place: Place) -> Iterator[Line]:
    """Milliseconds from an adapter in storage to its first token after the proof, by its rank."""
    need_engine(place)
    for rank in RANKS:
        title = f"publication/rank_{rank}/p50"
        manifest = place.folder / f"rank-{rank}.yaml"
        manifest.write_text(on_this_device(place, rank=rank))
        (place.folder / f"rank-{rank}").mkdir()
        try:
            milliseconds, by_hand = asyncio.run(latencies_of(manifest, place.folder / f"rank-{rank}"))
        except (OSError, AssertionError, TimeoutError) as error:
            yield not_run("d", title, f"{type(error).__name__}: {error}"[:200])
            continue
        yield figure("d", title, milliseconds, "ms", reference=by_hand, against="loading it by hand, without a proof")


async def latencies_of(manifest: Path, folder: Path) -> tuple[float, float]:
    from benchmarks.adapter_latency import SHORT, latencies, started

    async with started(manifest, folder) as bench:
        seen = await latencies(bench, folder, SHORT, itertools.islice(itertools.count(), VERSIONS + 1))
    return seen.ours, seen.by_hand


def on_this_device(place: Place, *, rank: int = 16) -> str:
    """The quickstart with one engine and this device for both roles."""
    text = QUICKSTART.read_text()
    changes = {
        "rank: 16": f"rank: {rank}",
        "engine: vllm, replicas: 2": "engine: vllm, replicas: 1",
        "profile: cpu": "profile: nvidia" if place.device == "cuda" else "profile: cpu",
    }
    for before, after in changes.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


def adapters_in_a_batch(place: Place) -> Iterator[Line]:
    """Tokens per second of an engine by the number of adapters in its batch."""
    need_engine(place)
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    model = make("1.7B", place.folder, place.device)
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    folders = lora_folders(model, place.folder / "adapters", max(ADAPTERS))
    engine = engine_of(model, "bfloat16", enable_lora=True, max_loras=max(ADAPTERS), max_lora_rank=16)
    sampling = SamplingParams(temperature=1.0, max_tokens=COMPLETION, ignore_eos=True, detokenize=False)
    given = prompts(PROMPTS, vocabulary)
    base: float | None = None
    for count in ADAPTERS:
        requests = [LoRARequest(f"adapter-{n}", n + 1, str(folder)) for n, folder in enumerate(folders[:count])]
        chosen = [requests[place_ % count] for place_ in range(len(given))] if count else None
        engine.generate(
            given[: count or 1],
            SamplingParams(max_tokens=1, detokenize=False),
            lora_request=chosen[:count] if chosen else None,
            use_tqdm=False,
        )  # loads them
        began = time.perf_counter()
        outputs = engine.generate(given, sampling, lora_request=chosen, use_tqdm=False)
        rate = sum(len(answer.outputs[0].token_ids) for answer in outputs) / (time.perf_counter() - began)
        base = base or rate
        note = f"{PROMPTS} requests at once, eager"
        yield figure("e", f"engine/{count}_adapters", rate, "tokens/s", reference=base, against="the base", note=note)


def lora_folders(model: Path, folder: Path, count: int) -> Sequence[Path]:
    """Folders of adapters of rank 16 with random weights."""
    import torch

    from kestrl_learner.model.adapters import adapter_files
    from kestrl_learner.model.policy_model import PolicyModel

    policy = PolicyModel(str(model), dtype="bfloat16", rank=16, alpha=32.0, targets="all-linear", seed=1)
    paths = [folder / str(number) for number in range(count)]
    for path in paths:
        with torch.no_grad():
            for weight in policy.parameters():
                weight.normal_(std=0.01)
        path.mkdir(parents=True)
        for name, content in adapter_files(policy, str(model)).items():
            (path / name).write_bytes(content)
    return paths


def quickstart(place: Place) -> Iterator[Line]:
    """Moves of a base between device and host; seconds of the quickstart's steps with both roles on one device."""
    yield from base_moves(place)
    need_engine(place)
    for sharing in ("split", "turns"):
        if sharing == "turns" and place.device == "cpu":
            yield not_run("g", "quickstart/turns", "a CPU is not used in turns")
        else:
            yield from quickstart_steps(place, sharing)


def quickstart_steps(place: Place, sharing: str) -> Iterator[Line]:
    title, runs = f"quickstart/{sharing}", place.folder / f"runs-{sharing}"
    manifest = place.folder / f"quickstart-{sharing}.yaml"
    manifest.write_text(on_this_device(place).replace("maxSteps: 26", "maxSteps: 4"))
    command = [sys.executable, "-m", "kestrl._app.cli.main", "run", str(manifest), "--runs", str(runs)]
    command += ["--set", f"inference.sharing={sharing}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"} if place.device == "cuda" else dict(os.environ)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()
        yield Line(part="g", name=title, status="failed", note=last[-1][:200] if last else "no message")
        return
    steps = sorted(runs.rglob("metrics/*.json"))
    if not steps:
        yield not_run("g", title, "the run left no metrics")
        return
    yield figure("g", f"{title}/steps", float(len(steps)), "steps")
    for name in ("collect", "update"):
        values = [facts["seconds"][name] for facts in (json.loads(path.read_text()) for path in steps)]
        yield figure("g", f"{title}/{name}_seconds", min(values), "s", note="the fastest step")


if __name__ == "__main__":
    print(json.dumps(gap_of(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
