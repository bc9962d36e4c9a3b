"""Options of an engine's server."""

from __future__ import annotations

from kestrl.engines import Option

Options = dict[str, Option]
"""Options by name: `{"max-loras": 4, "enable-lora": True}`."""


def arguments_of(options: Options) -> tuple[str, ...]:
    """`{"a": 1, "b": True, "c": False}` as `--a 1 --b`."""
    flags: list[str] = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not False:
            flags += [f"--{name}", str(value)]
    return tuple(flags)
