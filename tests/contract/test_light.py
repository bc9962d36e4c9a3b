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
SECONDS = 0.5
"""Of CPU time, not of a clock: a busy machine does not make an import heavier."""
PROBE = """
import importlib, json, sys, time
began = time.process_time()
importlib.import_module(sys.argv[1])
print(json.dumps({"seconds": time.process_time() - began, "modules": sorted(sys.modules)}))
"""


@pytest.mark.parametrize(
    "module",
    [
        "kestrl",
        "kestrl.spec",
        "kestrl_rollout.__main__",
        "kestrl_tools.service",
        "kestrl_judge.service",
        "kestrl_email.tools",
    ],
)
def test_a_light_import(module: str) -> None:
    answers = [
        json.loads(subprocess.run([sys.executable, "-c", PROBE, module], check=True, capture_output=True).stdout)
        for _ in range(2)
    ]
    loaded = set(answers[0]["modules"])
    assert [name for name in HEAVY if name in loaded] == []
    assert min(answer["seconds"] for answer in answers) < SECONDS


def test_nothing_shadows_the_standard_librarys_operator() -> None:
    assert operator.itemgetter(0)(["a"]) == "a"
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_no_file_is_a_whole_house() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for folder in ("src", "services", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if "api" not in path.parts and (count := len(path.read_text().splitlines())) > 400
    }
    assert long == {}
