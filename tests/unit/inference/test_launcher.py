"""The launcher's own doing, without vLLM: who is forked, and who dies with whom."""

from __future__ import annotations

import multiprocessing
import os
import select
import subprocess
import sys
from types import ModuleType

from kestrl_inference.inside.vllm_cpu import fork_context, prefer_fork

# Prints when its child is up, and then waits to be killed. Both hold the pipe: it ends when both are gone.
FORKING = """
import os, time
from kestrl_inference.inside.vllm_cpu import die_with_forker, fork_context
die_with_forker()
def child():
    os.write(1, b"up")
    time.sleep(600)
fork_context().Process(target=child).start()
time.sleep(600)
"""
LAUNCHED = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c",
                  "import os, time; from kestrl_inference.inside.vllm_cpu import die_with_parent; "
                  "die_with_parent(); os.write(1, b'up'); time.sleep(600)"])
time.sleep(600)
"""


def all_gone_after_a_kill(code: str) -> bool:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        assert process.stdout.read(2) == b"up"
        process.kill()
        ready, _, _ = select.select([process.stdout], [], [], 10.0)
        return bool(ready) and os.read(process.stdout.fileno(), 1) == b""


def test_what_a_killed_server_forked_is_gone() -> None:
    assert all_gone_after_a_kill(FORKING)


def test_a_server_dies_with_what_started_it() -> None:
    assert all_gone_after_a_kill(LAUNCHED)


def test_only_vllms_modules_use_fork() -> None:
    def theirs() -> None:
        """vLLM's own choice."""

    vllm, other, plain = ModuleType("vllm.v1"), ModuleType("other"), ModuleType("vllm.plain")
    vllm.get_mp_context = other.get_mp_context = theirs  # type: ignore[attr-defined]
    assert prefer_fork({"vllm.v1": vllm, "other": other, "vllm.plain": plain}) == 1
    assert vllm.get_mp_context is fork_context
    assert other.get_mp_context is theirs
    assert fork_context().get_start_method() == "fork"
    assert fork_context() is multiprocessing.get_context("fork")
