"""Starts vLLM's own server on a CPU: `python -m kestrl_inference.vllm_cpu ARGUMENTS OF vllm serve`.

Differs from `python -m vllm.entrypoints.openai.api_server` in three ways. The engine-core process is forked from the
server instead of starting Python and importing torch and vLLM a second time, which halves the time to ready. vLLM forks
by itself on a GPU; its CPU platform insists on `spawn` because a fork does not carry OpenMP's threads over, and with
the one thread per engine of KestRL's plan there are none.

The class of the model is inspected in the server. vLLM starts a process for that, which imports torch and vLLM once
more, only to keep CUDA uninitialized in the server.

It refuses to start without KestRL's plugin (`vllm_plugin`): vLLM ignores a plugin that is excluded or cannot be loaded,
and would then apply an adapter to requests for the base model.

No process outlives its parent: the kernel kills the server with its parent and the engine core with the server
(PR_SET_PDEATHSIG), also if the parent is killed.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import BaseContext
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
SERVER = "vllm.entrypoints.openai.api_server"
REGISTRY, INSPECTS = "vllm.model_executor.models.registry", "_run_in_subprocess"
PLUGIN = "kestrl_inference.vllm_plugin."
"""Module of vLLM's LoRA wrapper once the plugin is loaded."""


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent thread ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def die_with_forker() -> None:
    """Makes every process forked from now on die with its parent, also if the parent ends before the setting takes
    effect.
    """
    forker: list[int] = []

    def before() -> None:
        forker[:] = [os.getpid()]

    def in_child() -> None:
        die_with_parent()
        if os.getppid() != forker[0]:
            os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)


def fork_context() -> BaseContext:
    """Multiprocessing context for vLLM."""
    return multiprocessing.get_context("fork")


def prefer_fork(modules: dict[str, ModuleType]) -> int:
    """Replaces `get_mp_context` in every module that has imported it; returns the number of modules."""
    replaced = 0
    for name, module in list(modules.items()):
        if name.startswith("vllm.") and "get_mp_context" in vars(module):
            module.__dict__["get_mp_context"] = fork_context
            replaced += 1
    return replaced


def inspect_in_process(registry: ModuleType) -> bool:
    """Replaces the function of vLLM's model registry that starts a process; returns whether it is there."""
    found = INSPECTS in vars(registry)
    if found:
        registry.__dict__[INSPECTS] = call_here
    return found


def call_here(function: Callable[[], T]) -> T:
    return function()


def require_plugin() -> None:
    """Exits if vLLM has not loaded the plugin, since its processes would not load it either."""
    plugins, platforms = (importlib.import_module(name) for name in ("vllm.plugins", "vllm.platforms"))
    plugins.load_general_plugins()
    taken = platforms.current_platform.get_punica_wrapper()
    if not taken.startswith(PLUGIN):
        allowed = os.environ.get("VLLM_PLUGINS")
        why = f"VLLM_PLUGINS={allowed!r} leaves it out" if allowed is not None else "reinstall kestrl-inference"
        sys.exit(
            f"vLLM has not loaded the plugin `kestrl`, without which adapters are wrong on a CPU: {why}; its log "
            "says more"
        )


def main() -> None:
    die_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in (SERVER, "vllm.v1.engine.core"):  # before the fork, so that the child does not have to
        importlib.import_module(module)
    require_plugin()
    inspect_in_process(sys.modules[REGISTRY])
    if os.environ["OMP_NUM_THREADS"] == "1":
        prefer_fork(sys.modules)
        die_with_forker()
    sys.modules.pop(SERVER)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
