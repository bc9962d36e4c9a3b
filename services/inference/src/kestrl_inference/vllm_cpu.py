"""Starts vLLM's own server on a CPU: `python -m kestrl_inference.vllm_cpu ARGUMENTS OF vllm serve`.

Differs from `python -m vllm.entrypoints.openai.api_server` in one thing: the engine-core process is forked from the server instead of
starting Python and importing torch and vLLM a second time, which halves the time to ready. vLLM forks by itself on a GPU; its CPU
platform insists on `spawn` because a fork does not carry OpenMP's threads over, and with the one thread that our plan gives an engine
there are none.

Nothing outlives what started it: the server dies with its parent and the engine core with the server, by the kernel's hand
(PR_SET_PDEATHSIG), since a killed process can tell nobody.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing.context import BaseContext
from types import ModuleType

PR_SET_PDEATHSIG = 1
SERVER = "vllm.entrypoints.openai.api_server"


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def die_with_forker() -> None:
    """Has every process that is forked from now on die with its parent, one that dies before the kernel is asked included."""
    forker: list[int] = []

    def before() -> None:
        forker[:] = [os.getpid()]

    def in_child() -> None:
        die_with_parent()
        if os.getppid() != forker[0]:
            os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)


def fork_context() -> BaseContext:
    """What vLLM is given wherever it asks how to start a process."""
    return multiprocessing.get_context("fork")


def prefer_fork(modules: dict[str, ModuleType]) -> int:
    """Replaces `get_mp_context` in every module that has imported it; returns in how many."""
    replaced = 0
    for name, module in list(modules.items()):
        if name.startswith("vllm.") and "get_mp_context" in vars(module):
            module.__dict__["get_mp_context"] = fork_context
            replaced += 1
    return replaced


def main() -> None:
    die_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in (SERVER, "vllm.v1.engine.core"):  # before the fork, so that the child need not
        importlib.import_module(module)
    if os.environ["OMP_NUM_THREADS"] == "1":
        prefer_fork(sys.modules)
        die_with_forker()
    sys.modules.pop(SERVER)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
