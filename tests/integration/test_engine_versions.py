"""Versions of vLLM, and SGLang, beside each other, each in an interpreter of its own: `make engine-versions`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.engines.interpreter import engine_build
from kestrl._app.engines.store import Installed, installed_engines
from kestrl._app.local.rundir import RunDir
from kestrl._shared.spec.inference import Inference
from kestrl.engines.registry import DIALECTS
from kestrl.episode import Purpose
from kestrl.runstate.work import EngineWork
from kestrl.storage import open_store
from kestrl.storage.episodes import TRAINED_OUTCOMES, EpisodeFilter, ObjectEpisodeStore
from kestrl.testing.engines import check_engine

from .conftest import KEYS, Server
from .runs import kestrl, summary_of

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


@pytest.mark.parametrize("engine", engines(), ids=str)
def test_the_base_model_on_each_engine_judges_a_step(engine: Installed, tmp_path: Path) -> None:
    name = engine.record.engine
    own = ("--engine-python", engine.python, "--set", f"inference.engine={name}", "--set", "schedule.maxSteps=1")
    room = ("--set", "algorithm.groupSize=2")  # so that the judge's prompt can be made to fit the tiny model's context
    ruler = "{ruler: {self: true, rubric: More is better., permutations: 2, temperature: 0.7, maxReplyTokens: 384}}"
    judges = ("--set", f"rewards=[{{rule: loop_reward}}, {ruler}]")
    kestrl("run", Path(__file__).parent / "shop" / "job.yaml", "--runs", tmp_path, *own, *judges, *room)
    run = RunDir(tmp_path / "shop-1")
    assert (summary_of(run)["status"], summary_of(run)["failures"]) == ("succeeded", {})
    assert [build["engine"] for build in summary_of(run)["state"]["engines"]["builds"]] == [name]
    did = EngineWork.model_validate(summary_of(run)["state"]["history"]["work"]["engine-0"])
    assert 0 < did.repeated_tokens < did.turn_tokens <= did.prompt_tokens, "the judge's prompts are counted, too"
    assert 0 < did.cached_tokens < did.prompt_tokens
    assert min(did.sampled_tokens, did.prefill_seconds, did.decode_seconds, did.busy_seconds) > 0
    trained = EpisodeFilter(purpose=Purpose.TRAIN, outcomes=TRAINED_OUTCOMES)
    groups = {each.group.id: each.group for each in ObjectEpisodeStore(open_store(run.path.as_uri())).select(trained)}
    assert len(groups) == 2
    for group in groups.values():
        calls = group.scoring["ruler"]["calls"]
        assert {call["model"] for call in calls} == {"base"}
        replies = [call for call in calls if "content" in call]
        assert len(replies) == 2, "each is held to the schema, so that none is repaired"
        for reply in replies:
            assert [item["trajectory_id"] for item in json.loads(reply["content"])["scores"]] == reply["ids"]
        # SGLang refuses a prompt that leaves no room for the whole reply, where vLLM shortens the reply.
        assert all(call["error"].startswith("too_large") for call in calls if call not in replies)
        assert all(0.0 <= episode.rewards["ruler"] <= 1.0 for episode in group.episodes)
