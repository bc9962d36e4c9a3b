"""Versions of vLLM, and SGLang, beside each other, each in an interpreter of its own: `make engine-versions`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.engines.interpreter import engine_build
from kestrl._app.engines.store import Installed, installed_engines
from kestrl._shared.spec.inference import Inference
from kestrl.engines.registry import DIALECTS
from kestrl.testing.engines import check_engine

from .conftest import KEYS, Server

pytestmark = [pytest.mark.versions, pytest.mark.slow, pytest.mark.timeout(900)]
VARIABLE = "KESTRL_ENGINE_ENVIRONMENTS"
"""Variable with a folder of installed engines."""


def engines() -> list[Installed]:
    folder = os.environ.get(VARIABLE)
    return installed_engines(Path(folder).resolve()) if folder else []


@pytest.mark.parametrize("engine", engines(), ids=str)
def test_the_dialect_conforms_to_each_engine(engine: Installed, model: Path, adapters: Any, tmp_path: Path) -> None:
    inference = Inference.model_validate(
        {"engine": engine.record.engine, "python": str(engine.python), "version": engine.record.version}
    )
    build = engine_build(inference, tmp_path)
    assert build.version.partition("+")[0] == engine.record.version
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, content in adapters(5).files.items():
        (adapter / name).write_bytes(content)
    server = Server(model, tmp_path, engine.python, engine.record.engine)
    server.start()
    try:
        server.wait_until_healthy()
        check_engine(
            DIALECTS[engine.record.engine],
            server.url,
            base="base",
            adapter=str(adapter),
            prompt_ids=list(range(20, 50)),
            key=KEYS["KESTRL_ENGINE_CONTROL_KEY"],
        )
    finally:
        server.stop()
