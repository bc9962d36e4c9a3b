"""Light things stay light, and the standard library's `operator` is not shadowed."""

from __future__ import annotations

import json
import operator
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "vllm", "transformers", "kopf", "kubernetes", "sqlalchemy", "numpy", "pyarrow"]
MODULES = 720
"""Maximum modules loaded by an import. Counted rather than timed, since timing depends on the load of the machine: a
rollout worker loads 700, torch alone more than 2,000."""
PROBE = "import importlib, json, sys; importlib.import_module(sys.argv[1]); print(json.dumps(sorted(sys.modules)))"


@pytest.mark.parametrize(
    "module",
    [
        "kestrl",
        "kestrl._shared.spec",
        "kestrl_rollout.__main__",
        "kestrl_tools.service",
        "kestrl_judge.service",
        "kestrl_email.tools",
        "kestrl_operator.render",
    ],
)
def test_a_light_import(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, module], check=True, capture_output=True)
    loaded: list[str] = json.loads(done.stdout)
    assert [name for name in HEAVY if name in loaded] == []
    assert len(loaded) < MODULES


def test_nothing_shadows_the_standard_librarys_operator() -> None:
    assert operator.itemgetter(0)(["a"]) == "a"
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_no_file_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for folder in ("src", "services", "operator", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if "api" not in path.parts and (count := len(path.read_text().splitlines())) > 400
    }
    assert long == {}
