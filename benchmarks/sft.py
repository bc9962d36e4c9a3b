"""Tokens a second and peak memory of `kestrl sft` beside TRL's SFTTrainer: SmolLM2-135M in float32, LoRA of rank 16,
the same conversations in the same batches, on the same cores.

`varied` has as many e-mail transcripts with three tool calls as word problems with one, so that rows differ in length;
`alike` has e-mail transcripts only. Each program runs its own whole step (batch, forward, backward, clipping, update,
metrics) in a process of its own, and they take turns step by step, so that other work on the machine slows both; tokens
a second of CPU are the steadier figure beside it. The loss of the first step must be the same. TRL runs in an
environment of its own with our versions of torch, transformers and peft, made by `uv` at the first run (`UV`, or
`.tools/bin/uv`).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
TRL = "1.16.0"
BATCH, MICRO_BATCH, STEPS, RATE = 8, 4, 4, 2e-4
"""Conversations a step, and of one forward pass of TRL; steps, of which the first is not counted."""
SHAPE = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
LOSS_TOLERANCE = 1e-4
"""Largest difference of the first step's loss, in nats per token."""
WORKLOADS = {"varied": (True, False), "alike": (False, False), "varied_checkpointed": (True, True)}
"""Whether rows differ in length, and whether layers keep their inputs only."""
UNITS = {"speed": "tokens/s", "cpu": "tokens/s of CPU", "memory": "MB"}
CHECKPOINTED = "gradient_checkpointing"


def paused() -> bool:
    """Waits for the measuring program before each step; whether it wants no more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"mb": used.ru_maxrss / 1024, "cpu": used.ru_utime + used.ru_stime}), flush=True)
    return sys.stdin.readline().strip() != "step"


def ours(folder: Path) -> list[float]:
    """Runs the program behind `kestrl sft`, which asks before each step whether to stop."""
    from kestrl._shared.plan.settings.common import read_settings
    from kestrl._shared.plan.sft import SFTSettings
    from kestrl.storage import open_store
    from kestrl_learner.sft.training import SFTRun

    settings = read_settings(SFTSettings, folder / "settings.json")
    SFTRun(settings, stopping=paused).run()
    store = open_store(settings.storage)
    return [json.loads(store.get(path))["loss"] for path in sorted(store.list("metrics/"))]


def trl(folder: Path) -> list[float]:
    """Runs TRL's trainer on the token ids and batches of ours."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    settings = json.loads((folder / "settings.json").read_text())

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if paused():
                raise KeyboardInterrupt

    config = SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=settings[CHECKPOINTED],
        gradient_checkpointing_kwargs={"use_reentrant": False},
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=BATCH // MICRO_BATCH,
        train_sampling_strategy="sequential",
        max_length=None,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    trainer: Any = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(json.loads((folder / "rows.json").read_text())),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        peft_config=LoraConfig(**SHAPE),
        callbacks=[Turns()],
    )
    with suppress(KeyboardInterrupt):  # enough steps
        trainer.train()
    return [float(logged["loss"]) for logged in trainer.state.log_history if "loss" in logged]


PROGRAMS: dict[str, Callable[[Path], list[float]]] = {"ours": ours, "trl": trl}


class Program:
    """A training program that waits before each step.

    Args:
        command: Starts it.
        log: File for its error output.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        from kestrl._shared.plan.components import TORCH_DEFAULTS

        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**TORCH_DEFAULTS, **os.environ},  # as `kestrl sft` starts its program
            )
        self.mb = self._used = 0.0
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def wait(self) -> float:
        """Waits until it is before a step, and takes note of its peak memory; returns its CPU seconds since the last
        time.
        """
        answer = self._answer()
        since = float(answer["cpu"]) - self._used
        self.mb, self._used = float(answer["mb"]), float(answer["cpu"])
        return since

    def step(self) -> None:
        began = time.perf_counter()
        self._say("step")
        self.cpu.append(self.wait())
        self.seconds.append(time.perf_counter() - began)

    def speeds(self, tokens: Sequence[int]) -> dict[str, float]:
        """Median tokens a second, and a second of CPU, of all steps but the first."""
        return {
            name: statistics.median(count / taken for count, taken in list(zip(tokens, spent, strict=False))[1:])
            for name, spent in (("speed", self.seconds), ("cpu", self.cpu))
        }

    def losses(self) -> list[float]:
        """Ends it; the loss of each of its steps."""
        self._say("end")
        found = self._answer()["losses"]
        self._process.wait(timeout=60)
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(('{"mb"', '{"losses"')):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}: {self._log.read_text()[-3000:]}")


def conversations(folder: Path, *, varied: bool) -> list[dict[str, Any]]:
    """Rows of `messages`, enough for every step."""
    from kestrl._app.tasks.word_problems import Form, generated
    from kestrl_email.demonstrations import GOOD, demonstrations

    count = BATCH * (STEPS + 1)
    mails: list[dict[str, Any]] = [
        {"messages": [plain(said) for said in made]} for made in demonstrations(folder, count, GOOD, 3)
    ]
    if not varied:
        return mails
    problems = generated(Form.TRANSCRIPTS, split="train", seed=3, size=count // 2)
    short = [{"messages": [plain(said) for said in row["messages"]]} for row in problems]
    return mails[: count // 2] + short


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls are text, which SmolLM2's template shows as they are."""
    calls = message.get("tool_calls") or []
    text = "\n".join(f"<tool_call>\n{json.dumps(call.get('function', call))}\n</tool_call>" for call in calls)
    return {"role": message["role"], "content": f"{message.get('content') or ''}{text}"}


def prepare(folder: Path, *, varied: bool, checkpointed: bool) -> list[int]:
    """Writes the settings of ours and the rows of TRL; returns the tokens of each step."""
    from kestrl._shared.plan.sft import sft_settings
    from kestrl._shared.spec.sft import parse_sft_job
    from kestrl_demo_models.smollm2 import smollm2
    from kestrl_learner.sft.data import load_items
    from kestrl_learner.sft.training import batches

    data = folder / "train.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in conversations(folder, varied=varied)))
    job = parse_sft_job(
        {
            "apiVersion": "kestrl.dev/v1alpha1",
            "kind": "SFTJob",
            "metadata": {"name": "speed"},
            "spec": {
                "model": {"base": "demo://smollm2", "adapter": {"rank": SHAPE["r"], "alpha": SHAPE["lora_alpha"]}},
                "data": {"train": {"uri": "train.jsonl"}},
                "training": {"batchSize": BATCH, "learningRate": RATE, "learningRateSchedule": "constant"},
                "learner": {"gradientCheckpointing": checkpointed},
            },
        }
    )
    settings = sft_settings(
        job,
        model=str(smollm2()),
        train=str(data),
        validation=None,
        template=None,
        storage=(folder / "store").as_uri(),
    )
    (folder / "settings.json").write_text(settings.model_dump_json())
    items = load_items(settings, settings.train, "data")
    plan = batches(len(items), seed=settings.seed, epochs=1, size=BATCH, max_steps=None)
    rows = [row for batch in plan for index in batch for row in items[index]]
    labels = [[token if on else -100 for token, on in zip(row.token_ids, row.mask, strict=True)] for row in rows]
    listed = [{"input_ids": list(row.token_ids), "labels": known} for row, known in zip(rows, labels, strict=True)]
    (folder / "rows.json").write_text(json.dumps(listed))
    return [sum(len(row.token_ids) for index in batch for row in items[index]) for batch in plan]


def trl_python(uv: str) -> list[str]:
    """Command of a Python that has TRL, and our versions of what both programs use."""
    same = [f"--with={name}=={version(name)}" for name in ("torch", "transformers", "peft")]
    python = ["--python", sys.executable, f"--with=trl=={TRL}", *same, "python"]
    return [uv, "run", "--quiet", "--isolated", "--no-project", *python]


def compared(uv: str, *, varied: bool, checkpointed: bool) -> dict[str, dict[str, float]]:
    """Speeds and peak memory in MiB of both programs."""
    with TemporaryDirectory() as made:
        folder = Path(made)
        tokens = prepare(folder, varied=varied, checkpointed=checkpointed)
        here = [sys.executable, "-m", "benchmarks.sft", "--only", "ours", str(folder)]
        peer = [*trl_python(uv), str(Path(__file__)), "--only", "trl", str(folder)]
        programs = {
            "ours": Program(here, folder / "ours.log"),
            "trl": Program(peer, folder / "trl.log"),
        }
        try:
            for program in programs.values():
                program.wait()
            for number in range(STEPS):
                turns = list(programs.values())
                for program in turns if number % 2 else turns[::-1]:
                    program.step()
            first = {name: program.losses()[0] for name, program in programs.items()}
        finally:
            for program in programs.values():
                program.stop()
    if abs(first["ours"] - first["trl"]) > LOSS_TOLERANCE:
        raise RuntimeError(f"the first step's losses differ: {first}")
    return {name: {**program.speeds(tokens), "memory": program.mb} for name, program in programs.items()}


def measure(uv: str) -> Iterator[Any]:
    from benchmarks.report import Row

    for workload, (varied, checkpointed) in WORKLOADS.items():
        found = compared(uv, varied=varied, checkpointed=checkpointed)
        for figure, unit in UNITS.items():
            yield Row(
                name=f"sft/{workload}/{figure}",
                value=found["ours"][figure],
                unit=unit,
                reference=found["trl"][figure],
                against=f"TRL {TRL}",
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        print(json.dumps({"losses": PROGRAMS[sys.argv[2]](Path(sys.argv[3]))}), flush=True)
    else:
        from benchmarks.report import main

        main(__doc__, lambda: measure(os.environ.get("UV", str(ROOT / ".tools" / "bin" / "uv"))))
