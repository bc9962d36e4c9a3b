"""The target Weights & Biases: a program with its package, online or as an offline run in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kestrl._app.interpreters.requirements import environment_python, say
from kestrl._app.push.guarded import guarded
from kestrl._app.push.numbers import numbers_of, settings_of
from kestrl._app.push.target import PushedRun, Target, TargetRefused, TargetUnavailable
from kestrl.runstate.states import RunPhase
from kestrl.storage.episodes import EpisodeBatch
from kestrl.storage.summary import RunSummary

REQUIREMENT = "wandb==0.31.0"
PROGRAM = Path(__file__).with_name("program.py")
KEY, MODE = "WANDB_API_KEY", "WANDB_MODE"
ANSWER_SECONDS = 300.0
"""Time for one message: `wandb` itself tries again for minutes where its server does not answer."""
LONGEST_TEXT = 10_000
"""Characters of a text in a table."""
LONGEST_ANSWER = 4096
COLUMNS = (
    "episode", "scenario", "outcome", "reward", "rewards", "failure", "stop", "turns", "tool_calls", "prompt", "answer",
)  # fmt: skip


class WandB(Target):
    """A project of Weights & Biases, or offline runs in a folder.

    Args:
        folder: Where `wandb` writes.
        project: The project; empty for the job's name.
        variables: Its environment variables. Without an API key the run is an offline one.
    """

    def __init__(self, folder: Path, project: str, variables: Mapping[str, str]) -> None:
        self._variables = {name: text for name, text in variables.items() if name.startswith("WANDB_")}
        if KEY not in self._variables:
            self._variables.setdefault(MODE, "offline")
        self.key = f"wandb {folder if self._variables.get(MODE) == 'offline' else 'online'} {project}"
        self._folder, self._project = folder, project
        self._run: PushedRun | None = None
        self._open_program = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._code = 0

    def open(self, run: PushedRun, *, live: bool) -> str:
        del live
        self._run = run
        if self._variables.get(MODE) != "offline":
            return self._identity(run)
        if not self._offline_runs():  # a folder that was removed gets everything again
            self._process = self._start()
        return next(iter(self._offline_runs()), "")

    def _offline_runs(self) -> Sequence[str]:
        """Names of the offline runs of the run in the folder, the oldest first."""
        assert self._run is not None, "a target is opened before it gets anything"
        return sorted(path.name for path in self._folder.glob(f"wandb/offline-run-*-{self._identity(self._run)}"))

    def _identity(self, run: PushedRun) -> str:
        return hashlib.sha256(f"{run.id}\n{run.storage}".encode()).hexdigest()[:16]

    def metrics(self, step: int, record: Mapping[str, Any], at: float) -> None:
        del at
        self._send("numbers", step=step, numbers=dict(numbers_of(record)))

    def evaluation(self, step: int, means: Mapping[str, Any], at: float) -> None:
        del at
        self._send("numbers", step=step, numbers=dict(numbers_of(means, "eval/")))

    def episodes(self, batch: EpisodeBatch) -> None:
        rows = [
            [
                episode.id, episode.scenario_id, str(stored.outcome), episode.reward, json.dumps(dict(episode.rewards)),
                "" if episode.failure is None else f"{episode.failure.boundary}/{episode.failure.code}",
                str(episode.stop_reason), episode.num_turns, len(episode.tool_calls),
                json.dumps(list(stored.group.scenario.messages), ensure_ascii=False)[:LONGEST_TEXT],
                episode.final_text[:LONGEST_TEXT],
            ]
            for stored in batch.stored for episode in stored.group.episodes
        ]  # fmt: skip
        if rows:
            self._send("table", step=batch.step, name=f"episodes/{batch.purpose}", columns=[*COLUMNS], rows=rows)

    def finish(self, summary: RunSummary, at: float) -> None:
        del at
        self._code = 0 if summary.status is RunPhase.SUCCEEDED else 1
        means = {
            **dict(numbers_of(summary.before or {}, "before/")),
            **dict(numbers_of(summary.after or {}, "after/")),
        }
        policy = "" if summary.policy is None else summary.policy.version
        facts = {"status": str(summary.status), "reason": summary.reason, "policy": policy, "steps": summary.steps}
        self._send("finish", summary={**means, **facts, "failures": summary.failures})

    def close(self) -> None:
        with self._open_program:
            if self._process is not None and self._process.poll() is None:
                self._exchange(self._process, "close", code=self._code)

    def _send(self, kind: str, **content: Any) -> None:
        if self._process is None:  # only now, since a push of nothing new makes no further run
            self._process = self._start()
        self._exchange(self._process, kind, **content)

    def _start(self) -> subprocess.Popen[bytes]:
        assert self._run is not None, "a target is opened before it gets anything"
        python = environment_python([REQUIREMENT], python=None, field="--to wandb", say=say)
        self._folder.mkdir(parents=True, exist_ok=True)
        process = self._open_program.enter_context(
            guarded(
                [str(python), "-I", str(PROGRAM)],
                variables={**os.environ, **self._variables, "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        run = self._run
        run_fields = {"name": run.id, "project": self._project or run.job, "folder": str(self._folder)}
        config = {**dict(settings_of(run.settings)), "kestrl.storage": run.storage}
        self._exchange(process, "start", id=self._identity(run), config=config, **run_fields)
        return process

    def _exchange(self, process: subprocess.Popen[bytes], kind: str, **content: Any) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"kind": kind, **content}).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise TargetUnavailable("the program that writes with wandb has ended; try again") from error
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_SECONDS):
                raise TargetUnavailable(f"wandb takes nothing within {ANSWER_SECONDS:g} s; is its server reachable?")
        answer = process.stdout.readline(LONGEST_ANSWER).decode(errors="replace").strip()
        if not answer:
            raise TargetUnavailable("the program that writes with wandb has ended; try again")
        if answer != "ok":
            raise TargetRefused(f"wandb: {answer.removeprefix('error: ')}")
