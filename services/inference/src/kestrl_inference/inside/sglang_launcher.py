"""Starts SGLang's own server in the interpreter that has it.

`python -m kestrl_inference.inside.sglang_launcher [OPTIONS] -- ARGUMENTS`: the arguments are those of the server.
SGLang has no option for a middleware, so that the launcher adds the guard and the witness to its application.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from kestrl_inference.inside import describe, drain, failure, sglang_cpu, versions

TRACES = "--enable-trace"
TRACER = "opentelemetry"


class SGLangOptions(NamedTuple):
    """Options of the launcher."""

    cpu: bool
    """Whether the engine runs without an accelerator."""
    guard: bool
    """Whether the routes are guarded; not where a person serves an adapter."""
    version: str | None
    """Version that the job names."""
    arguments: tuple[str, ...]
    """Arguments of the server."""


def read_options(arguments: Sequence[str]) -> SGLangOptions:
    """Reads the options before `--`, and the server's arguments after it."""
    parser = argparse.ArgumentParser(prog="python -m kestrl_inference.inside.sglang_launcher", allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--guard", action="store_true")
    parser.add_argument("--version")
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    return SGLangOptions(options.cpu, options.guard, options.version, tuple(arguments[split + 1 :]))


def server_arguments(options: SGLangOptions, *, traces: bool) -> list[str]:
    """Arguments of the server, without traces where the engine has no package for them. Pure."""
    return [argument for argument in options.arguments if traces or argument != TRACES]


def add_guard() -> None:
    """Adds guard and witness to SGLang's application, the guard before the witness."""
    server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    from kestrl_inference.inside.guard import ControlGuard
    from kestrl_inference.inside.witness import PolicyWitness

    def vocabulary() -> int:
        return int(server.get_global_state().tokenizer_manager.model_config.vocab_size)

    def base() -> str:
        return str(server.get_global_state().tokenizer_manager.served_model_name)

    server.app.add_middleware(PolicyWitness, base=base, vocabulary=vocabulary)
    server.app.add_middleware(ControlGuard)


def serve(arguments: Sequence[str], *, guard: bool) -> None:
    """Runs the server until it ends."""
    plugins: Any = importlib.import_module("sglang.srt.plugins")
    plugins.load_plugins()
    if not importlib.import_module("kestrl_inference.inside.sglang_plugin").loaded:
        failure.refuse(
            "SGLang has not loaded the plugin `kestrl`, whose entry point is beside its package; its log says why"
        )
    launch: Any = importlib.import_module("sglang.launch_server")
    utils: Any = importlib.import_module("sglang.srt.utils")
    try:
        server_args = launch.prepare_server_args(list(arguments))
        if guard:
            add_guard()
        launch.run_server(server_args)
    finally:
        utils.kill_process_tree(os.getpid(), include_parent=False)


def main() -> None:
    drain.end_at_sigterm()
    options = read_options(sys.argv[1:])
    version = describe.installed("sglang")
    if options.version is not None and not versions.matches(version, options.version):
        failure.refuse(
            f"spec.inference.version: {options.version} is asked for, and this engine is SGLang {version}; name an "
            "interpreter or image with it, or change the field"
        )
    if doubt := versions.doubt("sglang", version):
        sys.stderr.write(f"warning: {doubt}\n")
    traces = find_spec(TRACER) is not None and find_spec(f"{TRACER}.sdk") is not None
    if TRACES in options.arguments and not traces:
        sys.stderr.write("warning: this engine has no opentelemetry-sdk, so that it sends no traces of its own\n")
    if options.cpu:
        sglang_cpu.add_stand_ins()
    serve(server_arguments(options, traces=traces), guard=options.guard)


if __name__ == "__main__":
    main()
