"""Arguments and variables of engines that a job must not set: access control, adapter verification and exact log-probs
depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.problems import Problem
from kestrl._shared.spec.rules.reserved_arguments import CODE, RESERVED, RESERVED_VARIABLES
from kestrl.tools.shapes import is_list, is_mapping

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(\.[^\s=]*)?")
"""An argument's name without its dashes, and perhaps fields of its JSON."""
NUMBER = re.compile(r"-[0-9.].*")
OWN_VARIABLES = "KESTRL_"


def engine_problems(spec: JobSpec) -> Iterator[Problem]:
    """Arguments and variables of engines that are reserved."""
    for name, value in spec.inference.args.items():
        problem = _argument_problem(name, value, spec.inference.engine)
        if problem:
            yield Problem(f"spec.inference.args.{name}", problem)
    for number, patch in enumerate(spec.patches):
        if patch.role == "inference":
            yield from _variable_problems(f"spec.patches[{number}].template.spec", patch.template.get("spec"))


def _argument_problem(name: str, value: object, engine: str) -> str:
    reserved = reserved_argument(name, engine)
    if reserved is not None:
        return f"--{reserved[0]} is reserved; {reserved[1]}"
    if not NAME.fullmatch(name):
        return (
            "is no name of an argument; write it as `max-num-seqs`, without dashes before it and with its value behind"
        )
    if isinstance(value, str):
        if value.startswith("-") and not NUMBER.fullmatch(value):
            return f"the value {value[:40]!r} begins with a dash, so that the engine would read it as another argument"
        if _flag(name) in RESERVED[engine].classes and not re.fullmatch("[A-Za-z0-9_]*", value):
            return f"the value {value[:40]!r} names a class; {CODE}"
    return ""


def reserved_argument(name: str, engine: str = "vllm") -> tuple[str, str] | None:
    """A reserved argument that the engine reads in a name, with the fix. Underscores are dashes to it, a beginning that
    is unique stands for an argument, `no-` for its opposite, and a dot is before a field of its JSON.
    """
    flag, reserved = _flag(name), RESERVED[engine]
    for family, fix in reserved.families.items():
        if flag.startswith(family) or family.startswith(flag):
            return (flag if flag.startswith(family) else f"{family}...", fix)
    exact = reserved.arguments.get(flag)
    if exact is not None:
        return flag, exact
    return next(((argument, fix) for argument, fix in reserved.arguments.items() if argument.startswith(flag)), None)


def _flag(name: str) -> str:
    text = name.strip().lstrip("-").replace("_", "-").lower()
    return re.split("[=.+]", text, maxsplit=1)[0].strip().removeprefix("no-")


def _variable_problems(place: str, spec: Any) -> Iterator[Problem]:
    """Reserved variables of the containers of a patch."""
    for field in ("containers", "initContainers"):
        containers: Any = spec.get(field) if is_mapping(spec) else None
        for number, container in enumerate(containers if is_list(containers) else ()):
            variables: Any = container.get("env") if is_mapping(container) else None
            for index, variable in enumerate(variables if is_list(variables) else ()):
                name: Any = variable.get("name") if is_mapping(variable) else None
                if isinstance(name, str) and (name.startswith(OWN_VARIABLES) or RESERVED_VARIABLES.fullmatch(name)):
                    yield Problem(
                        f"{place}.{field}[{number}].env[{index}]",
                        f"{name} is reserved; remove it, as access to the engine and verified adapters depend on it",
                    )
