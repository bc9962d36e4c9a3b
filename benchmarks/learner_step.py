"""One optimiser step of the learner on SmolLM2-135M: prompts of 160 tokens, groups of 8 completions of 40.

Against, in the same run: the bare loop (transformers, peft and torch with the prompt shared the same way, and nothing
else), the bare loop on plain rows (every row with its prompt), and TRL's GRPOTrainer where it is installed. Also
KestRL's step on rows that an older policy sampled on two engines, the first and the last of each of which are also
scored by that policy; and KestRL's step beside `NEIGHBOURS` busy processes, such as builds or other jobs: busy-waiting
threads would then wait for the time slices of the neighbours. Each runs in its own process, for separate memory
figures; the fastest of `REPEATS` after a warm-up counts.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import Row, main

from kestrl._shared.plan.components import TORCH_DEFAULTS

PROMPT, COMPLETION, SIZE, GROUPS = 160, 40, 8, 2
RATE, REPEATS = 3e-4, 3
NEIGHBOURS = 2
JOB = Path(__file__).parents[1] / "examples" / "email-search" / "smollm2.yaml"
"""Manifest with the learning rate and clip range of all candidates."""
SHAPE = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def tokens() -> tuple[list[list[int]], list[list[list[int]]], list[list[float]]]:
    """Prompts, completions and advantages of every group."""
    import random

    chance = random.Random(1)
    draw = lambda count: [chance.randrange(100, 40_000) for _ in range(count)]  # noqa: E731
    prompts = [draw(PROMPT) for _ in range(GROUPS)]
    completions = [[draw(COMPLETION) for _ in range(SIZE)] for _ in range(GROUPS)]
    advantages = [[(index - 3.5) / 2.29 for index in range(SIZE)] for _ in range(GROUPS)]
    return prompts, completions, advantages


def best(step: Callable[[], object]) -> dict[str, float]:
    """Seconds of the fastest step, and the maximum memory of the process."""
    step()
    taken: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return {"seconds": min(taken), "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def ours(model: str, *, newest: bool) -> dict[str, float]:
    from kestrl._shared.plan.planning import algorithm_settings
    from kestrl._shared.spec import read_job
    from kestrl_learner.batch.rows import TrainGroup, TrainRow
    from kestrl_learner.model.policy_model import PolicyModel
    from kestrl_learner.train.trainer import Trainer

    policy = PolicyModel(model, dtype="float32", rank=16, alpha=32.0, targets="all-linear", seed=1)
    algorithm = algorithm_settings(read_job(JOB).spec).model_copy(update={"max_staleness": 0 if newest else 1})
    groups = [
        TrainGroup(
            id=str(number),
            prompt=array("i", prompt),
            rows=[
                TrainRow(
                    token_ids=array("i", row),
                    mask=bytes([1] * COMPLETION),
                    behaviour=array("f", [-10.0] * COMPLETION),
                    advantages=array("d", [advantage] * COMPLETION),
                    sequence=place,
                    on_policy=newest,
                    policy="policy",
                    engines=[f"engine-{place % 2}"] * COMPLETION,
                )
                for place, (row, advantage) in enumerate(zip(rows, advantages, strict=True))
            ],
        )
        for number, (prompt, rows, advantages) in enumerate(zip(*tokens(), strict=True))
    ]
    trainer = Trainer(policy, algorithm, 1.0)
    trainer.published("policy")
    return best(lambda: trainer.step(groups, 0))


def bare(model: str, *, shared: bool) -> dict[str, float]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, DynamicCache

    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft: Any = get_peft_model(base, LoraConfig(**SHAPE))
    optimizer = torch.optim.AdamW([weight for weight in peft.parameters() if weight.requires_grad], lr=RATE)
    batch = [(torch.tensor(p), torch.tensor(c), torch.tensor(a)) for p, c, a in zip(*tokens(), strict=True)]

    def with_prompts(prompt: Any, rows: Any) -> Any:
        whole = torch.cat([prompt.expand(SIZE, -1), rows], 1)
        return base.model(input_ids=whole, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]

    def with_one_prompt(prompt: Any, rows: Any) -> Any:
        cache = DynamicCache()
        first = base.model(input_ids=prompt[None], past_key_values=cache, use_cache=True).last_hidden_state
        cache.batch_repeat_interleave(SIZE)
        rest = base.model(input_ids=rows[:, :-1], past_key_values=cache, use_cache=True).last_hidden_state
        return torch.cat([first[:, -1:].expand(SIZE, 1, -1), rest], 1)

    def step() -> None:
        optimizer.zero_grad()
        for prompt, rows, advantages in batch:
            hidden = (with_one_prompt if shared else with_prompts)(prompt, rows)
            logprobs = torch.log_softmax(base.lm_head(hidden), -1).gather(-1, rows[..., None])[..., 0]
            ratio = (logprobs - -10.0).exp()
            gains = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None])
            (-gains.sum() / (GROUPS * SIZE * COMPLETION)).backward()
        torch.nn.utils.clip_grad_norm_(peft.parameters(), 1.0)
        optimizer.step()

    return best(step)


def trl(model: str) -> dict[str, float]:
    """TRL's loss on the same rows, one group per micro-batch, as in its trainer."""
    import tempfile

    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=SIZE,
        gradient_accumulation_steps=GROUPS,
        num_generations=SIZE,
        max_completion_length=COMPLETION,
        learning_rate=RATE,
        report_to=[],
    )
    trainer: Any = GRPOTrainer(
        model=model,
        args=settings,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 16),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(**SHAPE),
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = GROUPS
    batch = [
        {
            "prompt_ids": torch.tensor(prompt).expand(SIZE, -1),
            "prompt_mask": torch.ones(SIZE, PROMPT, dtype=torch.long),
            "completion_ids": torch.tensor(rows),
            "completion_mask": torch.ones(SIZE, COMPLETION, dtype=torch.long),
            "advantages": torch.tensor(advantages),
            "old_per_token_logps": torch.full((SIZE, COMPLETION), -10.0),
            "num_items_in_batch": torch.tensor(GROUPS * SIZE * COMPLETION),
        }
        for prompt, rows, advantages in zip(*tokens(), strict=True)
    ]

    def step() -> None:
        trainer.optimizer.zero_grad()
        for inputs in batch:
            trainer._compute_loss(trainer.model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()

    return best(step)


STEPS: dict[str, Callable[[str], dict[str, float]]] = {
    "ours": lambda model: ours(model, newest=True),
    "older": lambda model: ours(model, newest=False),
    "bare": lambda model: bare(model, shared=True),
    "plain": lambda model: bare(model, shared=False),
    "trl": trl,
}


def alone(name: str) -> dict[str, float]:
    """Runs a step in a child process."""
    from kestrl_email.smollm2 import smollm2

    command = [sys.executable, "-m", "benchmarks.learner_step", "--only", name, str(smollm2())]
    environment = {**TORCH_DEFAULTS, **os.environ}  # as in the plan for a learner
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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


def measure() -> Iterator[Row]:
    own, older, plain, loop = alone("ours"), alone("older"), alone("plain"), alone("bare")
    seconds = own["seconds"]
    yield Row(name="learner_step/seconds", value=seconds, unit="s", reference=loop["seconds"], against="bare loop")
    yield Row(
        name="learner_step/against_plain_rows",
        value=plain["seconds"] / seconds,
        unit="x faster",
        reference=2.0,
        against="goal",
    )
    if find_spec("trl") is None:
        print("learner_step/against_trl: trl is not installed", file=sys.stderr)
    else:
        peer = alone("trl")
        yield Row(
            name="learner_step/against_trl",
            value=peer["seconds"] / seconds,
            unit="x faster",
            reference=1.5,
            against="goal",
        )
    yield Row(name="learner_step/memory", value=own["mb"], unit="MB", reference=loop["mb"], against="bare loop")
    with busy_neighbours():
        contended = alone("ours")
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
        name="learner_step/older_policy/memory", value=older["mb"], unit="MB", reference=own["mb"], against=on_policy
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        print(json.dumps(STEPS[sys.argv[2]](sys.argv[3])))
    else:
        main(__doc__, measure)
