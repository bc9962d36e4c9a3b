"""One optimiser step of a model on a device: KestRL's, a bare loop of transformers, peft and torch, and TRL's, on the
same tokens. Each runs in a process of its own, for separate figures of memory.
"""

from __future__ import annotations

import random
import resource
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

JOB = Path(__file__).parents[1] / "examples" / "email-search" / "smollm2.yaml"
"""Manifest with the learning rate and clip range of all candidates."""
RATE = 3e-4
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
VIEWS = frozenset(
    {"alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze"}
    | {"t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view"}
)
"""Operations that launch no kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tokens of a step."""

    prompt: int
    completion: int
    """Sampled tokens of a row."""
    results: int = 0
    """Tokens of tool results in a row, between its turns."""
    turns: int = 1
    size: int = 8
    """Rows of a group."""
    groups: int = 2
    ragged: bool = False
    """Whether rows have from half to all of the completion, as real ones do."""

    def smaller(self, factor: int) -> Shape:
        """The same proportions with fewer tokens."""
        return replace(
            self,
            prompt=max(2, self.prompt // factor),
            completion=max(2 * self.turns, self.completion // factor),
            results=self.results // factor,
            size=min(self.size, 2),
        )


SHAPES = {
    "short": Shape(prompt=160, completion=40),
    "reasoning": Shape(prompt=200, completion=2000, size=4, groups=1),
    "long_agent": Shape(prompt=2000, completion=500, results=1200, turns=5, size=4, groups=1),
}
"""Shapes by name: a short answer, a long chain of thought, and five calls of tools behind a long prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a step is computed."""

    device: str = "cpu"
    dtype: str = "float32"
    rounded: bool | None = None
    """Whether passes of ours compute with the adapter in bfloat16; None is the learner's choice for the device."""
    checkpointing: bool = False
    compiled: bool = False
    """Whether layers of ours are compiled."""
    tokens_per_pass: int = 16_384
    micro: int = 8
    """Rows at a time of the bare loop and of TRL."""
    newest: bool = True
    """Whether the newest policy sampled the rows."""
    shared: bool = False
    """Whether the bare loop computes a prompt once."""
    repeats: int = 3


class Row:
    """Tokens of a row after its prompt, and which of them were sampled."""

    def __init__(self, shape: Shape, length: int, draw: Callable[[int], list[int]]) -> None:
        turns, results = shape.turns, shape.results // max(1, shape.turns - 1)
        self.mask: list[int] = []
        for turn in range(turns):
            sampled = length // turns + (turn < length % turns)
            self.mask += [1] * sampled + [0] * (results if turn < turns - 1 else 0)
        self.ids = draw(len(self.mask))


def rows_of(shape: Shape, vocabulary: int) -> list[tuple[list[int], list[Row], list[float]]]:
    """Prompt, rows and advantages of every group."""
    chance = random.Random(1)
    low = min(100, vocabulary // 2)

    def draw(count: int) -> list[int]:
        return [chance.randrange(low, vocabulary) for _ in range(count)]

    half = shape.completion // 2
    lengths = [half + half * (row + 1) // shape.size if shape.ragged else shape.completion for row in range(shape.size)]
    spread = max(1.0, shape.size / 3.5)
    advantages = [(row - (shape.size - 1) / 2) / spread for row in range(shape.size)]
    return [
        (draw(shape.prompt), [Row(shape, length, draw) for length in lengths], advantages) for _ in range(shape.groups)
    ]


def sampled(shape: Shape, vocabulary: int) -> int:
    return sum(sum(row.mask) for _, rows, _ in rows_of(shape, vocabulary) for row in rows)


def timed(step: Callable[[], object], options: Options) -> dict[str, float]:
    """Seconds of the first step and of the fastest after it, by the clock and of CPU time, and the largest memory."""
    import torch

    on_gpu = options.device.startswith("cuda")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    taken: list[tuple[float, float]] = []
    for number in range(1 + options.repeats):
        if on_gpu and number == 1:
            torch.cuda.reset_peak_memory_stats()
        began, cpu = time.perf_counter(), time.process_time()
        step()
        wait()
        taken.append((time.perf_counter() - began, time.process_time() - cpu))
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    later = taken[1:] or taken
    return {
        "first_seconds": taken[0][0],
        "seconds": min(seconds for seconds, _ in later),
        "cpu_seconds": min(cpu for _, cpu in later),
        "mb": peak / 2**20,
    }


def ours(
    model: str, shape: Shape, options: Options, counting: AbstractContextManager[object] | None = None
) -> dict[str, float]:
    """KestRL's step, with what its passes compute.

    Args:
        model: Folder of the base.
        shape: Tokens of the step.
        options: How it is computed.
        counting: Entered around each step.
    """
    from kestrl._shared.plan.updates import algorithm_settings
    from kestrl._shared.spec.load import read_job
    from kestrl_learner.batch.rows import TrainGroup, TrainRow
    from kestrl_learner.model.policy_model import PolicyModel
    from kestrl_learner.train.trainer import Trainer

    policy = PolicyModel(
        model,
        dtype=options.dtype,
        rank=16,
        alpha=32.0,
        targets="all-linear",
        seed=1,
        rounded=options.rounded,
        device=options.device,
        gradient_checkpointing=options.checkpointing,
        compile_layers=options.compiled,
        tokens_per_pass=options.tokens_per_pass,
    )
    algorithm = algorithm_settings(read_job(JOB).spec).model_copy(update={"max_staleness": 0 if options.newest else 1})
    groups = [
        TrainGroup(
            id=str(number),
            prompt=array("i", prompt),
            rows=[
                TrainRow(
                    token_ids=array("i", row.ids),
                    mask=bytes(row.mask),
                    behaviour=array("f", [-10.0] * len(row.mask)),
                    advantages=array("d", [advantage if on else 0.0 for on in row.mask]),
                    sequence=place,
                    on_policy=bytes([options.newest] * sum(row.mask)),
                    policies=["policy"] * sum(row.mask),
                    engines=[f"engine-{place % 2}"] * sum(row.mask),
                )
                for place, (row, advantage) in enumerate(zip(rows, advantages, strict=True))
            ],
        )
        for number, (prompt, rows, advantages) in enumerate(rows_of(shape, policy.vocabulary))
    ]
    trainer = Trainer(policy, algorithm, 1.0)
    trainer.published("policy")

    def step() -> None:
        with counting or nullcontext():
            trainer.step(groups, 0)

    figures = timed(step, options)
    passes = policy.passes([*enumerate(groups)])
    tokens = sum(policy.tokens_of(pieces) for pieces in passes)
    return figures | {
        "passes": len(passes),
        "tokens": tokens,
        "tokens_per_sampled_token": tokens / sum(group.sampled for group in groups),
    }


def operations(model: str, shape: Shape, options: Options) -> dict[str, float]:
    """Operations of a step that launch a kernel on a GPU, counted on a CPU, where `ours` computes the same ones but for
    attention, which is one operation of a packed sequence on CUDA, and two casts of gradients for each layer whose
    adapter is rounded, which are none on CUDA.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name not in VIEWS:
                counts[name] += 1
            return func(*args, **(kwargs or {}))

    from transformers import AutoConfig

    with torch.autograd.set_multithreading_enabled(False):
        figures = ours(model, shape, replace(options, repeats=0), counting=Counted())
    layers = int(AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers)
    return {
        "operations": counts.total(),
        "passes": figures["passes"],
        "per_pass_and_layer": counts.total() / figures["passes"] / layers,
        "casts_per_pass_and_layer": counts["_to_copy"] / figures["passes"] / layers,
    }


def _micro_batches(rows: Sequence[Row], micro: int) -> list[list[int]]:
    """Places of rows, of which some of similar length are computed at a time."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place].ids))
    return [order[start : start + micro] for start in range(0, len(order), micro)]


def bare(model: str, shape: Shape, options: Options) -> dict[str, float]:
    """transformers, peft and torch, and nothing else; with `shared` a prompt is computed once by a cache."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, DynamicCache

    device, half = torch.device(options.device), options.dtype == "bfloat16"
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options.dtype)).to(device)
    peft: Any = get_peft_model(base, LoraConfig(**LORA))
    weights = [weight for weight in peft.parameters() if weight.requires_grad]
    for weight in weights:
        weight.data = weight.data.float()
    if options.checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
        base.train()
    optimizer = torch.optim.AdamW(weights, lr=RATE)
    batch = rows_of(shape, int(base.config.vocab_size))
    total = sum(sum(row.mask) for _, rows, _ in batch for row in rows)

    def states(prompt: Any, ids: Any) -> Any:
        if not options.shared:
            sequences = torch.cat([prompt.expand(len(ids), -1), ids], 1)
            return base.model(input_ids=sequences, use_cache=False).last_hidden_state[:, len(prompt) - 1 : -1]
        cache = DynamicCache()
        first = base.model(input_ids=prompt[None], past_key_values=cache, use_cache=True).last_hidden_state
        cache.batch_repeat_interleave(len(ids))
        rest = base.model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True).last_hidden_state
        return torch.cat([first[:, -1:].expand(len(ids), 1, -1), rest], 1)

    def part(prompt: list[int], rows: Sequence[Row], advantages: Sequence[float], places: Sequence[int]) -> None:
        longest = max(len(rows[place].ids) for place in places)
        padded = [rows[place].ids + [0] * (longest - len(rows[place].ids)) for place in places]
        masks = [rows[place].mask + [0] * (longest - len(rows[place].mask)) for place in places]
        ids, mask = torch.tensor(padded, device=device), torch.tensor(masks, device=device)
        gain = torch.tensor([advantages[place] for place in places], device=device)[:, None]
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = base.lm_head(states(torch.tensor(prompt, device=device), ids))
        flat = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten(), reduction="none")
        ratio = (-flat.view_as(ids) - -10.0).exp()
        gains = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain) * mask
        (-gains.sum() / total).backward()

    def step() -> None:
        optimizer.zero_grad()
        for prompt, rows, advantages in batch:
            for places in _micro_batches(rows, options.micro):
                part(prompt, rows, advantages, places)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return timed(step, options)


def trl(model: str, shape: Shape, options: Options) -> dict[str, float]:
    """TRL's loss on the same rows. Tool results count as sampled, which does not change what is computed."""
    import tempfile

    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    longest = shape.completion + shape.results
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=options.device == "cpu",
        bf16=options.dtype == "bfloat16",
        gradient_checkpointing=options.checkpointing,
        per_device_train_batch_size=shape.size,
        num_generations=shape.size,
        max_completion_length=longest,
        learning_rate=RATE,
        report_to=[],
        model_init_kwargs={"dtype": options.dtype},
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer: Any = GRPOTrainer(
        model=model,
        args=settings,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 16),
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA),
    )
    trainer.create_optimizer()
    device = options.device

    def inputs(prompt: list[int], rows: Sequence[Row], advantages: Sequence[float], places: Sequence[int]) -> Any:
        width, count = max(len(rows[place].ids) for place in places), len(places)
        pad = [width - len(rows[place].ids) for place in places]
        return {
            "prompt_ids": torch.tensor([prompt] * count, device=device),
            "prompt_mask": torch.ones(count, len(prompt), dtype=torch.long, device=device),
            "completion_ids": torch.tensor(
                [rows[place].ids + [0] * more for place, more in zip(places, pad, strict=True)], device=device
            ),
            "completion_mask": torch.tensor([[1] * (width - more) + [0] * more for more in pad], device=device),
            "advantages": torch.tensor([advantages[place] for place in places], device=device),
            "old_per_token_logps": torch.full((count, width), -10.0, device=device),
            "num_items_in_batch": torch.tensor(sum(len(row.ids) for row in rows) * shape.groups, device=device),
        }

    batch = [
        inputs(prompt, rows, advantages, places)
        for prompt, rows, advantages in rows_of(shape, int(trainer.model.config.vocab_size))
        for places in _micro_batches(rows, options.micro)
    ]
    trainer.current_gradient_accumulation_steps = len(batch)
    trainer.model.train()

    def step() -> None:
        trainer.optimizer.zero_grad()
        for each in batch:
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(trainer.model, each)
            trainer.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()

    return timed(step, options)


CANDIDATES: dict[str, Callable[[str, Shape, Options], dict[str, float]]] = {
    "ours": ours,
    "bare": bare,
    "trl": trl,
    "operations": operations,
}
