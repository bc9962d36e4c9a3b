"""Versions of vLLM beside each other, each in an interpreter of its own: `make engine-versions`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.local.engine_python import engine_build
from kestrl._shared.spec.inference import Inference
from kestrl.engines.vllm import Vllm
from kestrl.testing.engines import check_engine

from .conftest import KEYS, Server

pytestmark = [pytest.mark.versions, pytest.mark.slow, pytest.mark.timeout(900)]
VARIABLE = "KESTRL_ENGINE_ENVIRONMENTS"
"""Variable with a folder of environments, each with the version of its engine as name."""


def environments() -> list[Path]:
    folder = os.environ.get(VARIABLE)
    found = Path(folder).resolve().iterdir() if folder else ()
    return sorted(path for path in found if (path / "bin" / "python").exists())


@pytest.mark.parametrize("environment", environments(), ids=lambda path: path.name)
def test_the_dialect_conforms_to_each_version(environment: Path, model: Path, adapters: Any, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    build = engine_build(Inference(python=str(python), version=environment.name), tmp_path)
    assert build.version.partition("+")[0] == environment.name
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, content in adapters(5).files.items():
        (adapter / name).write_bytes(content)
    server = Server(model, tmp_path, python)
    server.start()
    try:
        server.wait_until_healthy()
        check_engine(
            Vllm(),
            server.url,
            base="base",
            adapter=str(adapter),
            prompt_ids=list(range(20, 50)),
            key=KEYS["KESTRL_ENGINE_CONTROL_KEY"],
        )
    finally:
        server.stop()
