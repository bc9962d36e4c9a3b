"""Starts vLLM's own server in the interpreter that has it.

`python -m kestrl_inference.inside.launcher [OPTIONS] -- ARGUMENTS`: the arguments are those of the server that do not
depend on its version; the launcher reads the version and adds the others (`versions`). An answer that names no policy
gets the field that the server fills in and its model drops.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from kestrl_inference.inside import describe, drain, failure, versions, vllm_cpu

SERVER = "vllm.entrypoints.openai.api_server"
ANSWERS = ("vllm.entrypoints.serve.disagg.protocol", "vllm.entrypoints.scale_out.token_in_token_out.protocol")
"""Modules that have had the class of answers."""
ANSWER, POLICY = "GenerateResponse", "model"
SCALE_OUT = "--enable-scale-out"


class LauncherOptions(NamedTuple):
    """Options of the launcher."""

    cpu: bool
    """Whether the engine runs without an accelerator."""
    slots: int | None
    """Adapters that one batch may use; None to leave the server's arguments alone."""
    version: str | None
    """Version that the job names."""
    arguments: tuple[str, ...]
    """Arguments of the server."""


def read_options(arguments: Sequence[str]) -> LauncherOptions:
    """Reads the options before `--`, and the server's arguments after it."""
    parser = argparse.ArgumentParser(prog="python -m kestrl_inference.inside.launcher", allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--version")
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    return LauncherOptions(options.cpu, options.slots, options.version, tuple(arguments[split + 1 :]))


def server_arguments(options: LauncherOptions, version: str) -> list[str]:
    """Arguments of the server of a version. Pure."""
    arguments = list(options.arguments)
    if options.slots is None:
        return arguments
    facts = versions.facts_of(version)
    slots = options.slots + facts.spare_slots
    # One more on the host than in a batch: the engine would read an adapter that it evicted from its folder again, and
    # exit if the folder has been deleted.
    arguments += ["--max-loras", str(slots), "--max-cpu-loras", str(slots + 1)]
    return [*arguments, SCALE_OUT] if facts.scale_out else arguments


def restore_policy(module: Any) -> bool:
    """Lets an answer keep the name of the policy, which its server gives it and its model drops; returns whether the
    answer now has it.
    """
    answer = getattr(module, ANSWER, None)
    if answer is None:
        return False
    if POLICY not in answer.model_fields:
        answer.model_config["extra"] = "allow"
        answer.model_rebuild(force=True)
    return True


def restore_policies() -> None:
    """Restores the name of the policy in the answers of this server, or ends this process where it cannot."""
    restored = [restore_policy(importlib.import_module(name)) for name in ANSWERS if _exists(name)]
    if not any(restored):
        failure.refuse("this build of vLLM has no answers that name the policy; use 0.25 or later")


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that contains it
        return False


def main() -> None:
    drain.end_at_sigterm()
    options = read_options(sys.argv[1:])
    version = describe.installed("vllm")
    if options.version is not None and not versions.matches(version, options.version):
        failure.refuse(
            f"spec.inference.version: {options.version} is asked for, and this engine is vLLM {version}; name an "
            "interpreter or image with it, or change the field"
        )
    if doubt := versions.doubt("vllm", version):
        sys.stderr.write(f"warning: {doubt}\n")
    sys.argv[1:] = server_arguments(options, version)
    if options.cpu:
        vllm_cpu.prepare(SERVER)
    if not versions.facts_of(version).names_policy:
        restore_policies()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
