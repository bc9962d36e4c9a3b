"""Prepares a process for vLLM's own server on a CPU.

The server then differs from `python -m vllm.entrypoints.openai.api_server` in three ways. The engine-core process is
forked from the server instead of starting Python and importing torch and vLLM a second time, which halves the time to
ready. vLLM forks by itself on a GPU; its CPU platform insists on `spawn` because a fork does not carry OpenMP's threads
over, and with the one thread per engine of KestRL's plan there are none.

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
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import BaseContext
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
REGISTRY, INSPECTS = "vllm.model_executor.models.registry", "_run_in_subprocess"
MEMORY, PINS, COPIES = "vllm.utils.torch_utils", "PIN_MEMORY", "async_tensor_h2d"
PLUGIN = "kestrl_inference.inside.vllm_lora."
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
    present = INSPECTS in vars(registry)
    if present:
        registry.__dict__[INSPECTS] = call_here
    return present


def call_here(function: Callable[[], T]) -> T:
    return function()


def use_pageable_memory(module: ModuleType) -> None:
    """Keeps vLLM's helpers, which are in this module, from pinning host memory.

    0.23 pins it on a CPU, too, where a torch that was built for CUDA raises without a driver.
    """
    names = vars(module)
    if names.get(PINS):
        names[PINS] = False
    copies = names.get(COPIES)
    if copies is not None and copies.__defaults__:  # the constant is a default of an argument in 0.23
        copies.__defaults__ = tuple(False if value is True else value for value in copies.__defaults__)


def require_plugin() -> None:
    """Exits if vLLM has not loaded the plugin, since its processes would not load it either."""
    plugins, platforms = (importlib.import_module(name) for name in ("vllm.plugins", "vllm.platforms"))
    plugins.load_general_plugins()
    wrapper = platforms.current_platform.get_punica_wrapper()
    if not wrapper.startswith(PLUGIN):
        allowed = os.environ.get("VLLM_PLUGINS")
        reason = (
            f"VLLM_PLUGINS={allowed!r} leaves it out" if allowed is not None else "its entry point is not on the path"
        )
        sys.exit(
            f"vLLM has not loaded the plugin `kestrl`, without which adapters are wrong on a CPU: {reason}; its log "
            "says more"
        )


def prepare(server: str) -> None:
    """Prepares this process for the server of a module, which is imported and can be run next."""
    die_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    use_pageable_memory(importlib.import_module(MEMORY))
    for module in (server, "vllm.v1.engine.core"):  # before the fork, so that the child does not have to
        importlib.import_module(module)
    require_plugin()
    inspect_in_process(sys.modules[REGISTRY])
    if os.environ["OMP_NUM_THREADS"] == "1":
        prefer_fork(sys.modules)
        die_with_forker()
    sys.modules.pop(server)
