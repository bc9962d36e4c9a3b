"""The servers of a judge model: in turn, those that can be reached first, and all behind a name as of now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fakes.judge_model import Refusal, ScriptedJudge, graded
from tests.unit.judge.rulers import group, honest, ruler_entry, score, value_of

from kestrl._app.local.files import write_atomic
from kestrl._shared.plan.settings.learner import EngineEntry, EngineList
from kestrl.engines import DRAINING
from kestrl_judge.ruler import servers
from kestrl_judge.ruler.scorer import RulerScorer
from kestrl_judge.ruler.servers import Servers


async def turns(asked: Servers, count: int) -> set[str | None]:
    return {await asked.next() for _ in range(count)}


async def test_servers_of_the_settings_take_turns() -> None:
    asked = Servers(("https://a/v1", "https://b/v1"))
    assert [await asked.next() for _ in range(3)] in (
        ["https://a/v1", "https://b/v1", "https://a/v1"],
        ["https://b/v1", "https://a/v1", "https://b/v1"],
    )


async def test_a_server_that_cannot_be_reached_is_passed_over_while_there_is_another() -> None:
    asked = Servers(("https://a/v1", "https://b/v1"))
    asked.unreachable("https://a/v1")
    assert await turns(asked, 4) == {"https://b/v1"}
    asked.unreachable("https://b/v1")
    assert await turns(asked, 4) == {"https://a/v1", "https://b/v1"}


async def test_an_engine_that_drains_is_passed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "AWAY_SECONDS", 600.0)
    async with (
        ScriptedJudge(lambda asked: Refusal(status=503, body=json.dumps({"error": {"type": DRAINING}}))) as leaving,
        ScriptedJudge(lambda asked: graded(asked, honest)) as staying,
    ):
        entry = ruler_entry(leaving.url)
        both = entry.judges[0].model_copy(update={"base_urls": (leaving.url, staying.url)})
        scorer = RulerScorer(entry.model_copy(update={"judges": (both,)}), salt="run")
        await scorer.open()
        for wrong in ("5", "6", "7", "8"):
            verdicts = (await score(scorer, group("4", wrong))).verdicts
            assert value_of(verdicts["g/0"]) > value_of(verdicts["g/1"])
        await scorer.close()
        assert (len(leaving.asked), len(staying.asked)) == (1, 4)


async def test_a_name_stands_for_its_addresses() -> None:
    assert "http://127.0.0.1:8000/v1" in await turns(Servers(("dns://localhost:8000/v1",)), 4)


async def test_engines_of_a_run_on_this_machine_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "LOOK_SECONDS", 0.0)
    path = tmp_path / "a run #1?%20" / "engines.json"
    path.parent.mkdir()

    def consists_of(*ports: int) -> None:
        entries = [
            EngineEntry(name=f"engine-{port}", url=f"http://127.0.0.1:{port}", agent_address="x:1") for port in ports
        ]
        write_atomic(path, EngineList(engines=tuple(entries)).model_dump_json())

    asked = Servers((f"{path.as_uri()}#/v1",))
    assert await asked.next() is None
    consists_of(1, 2)
    assert await turns(asked, 4) == {"http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"}
    path.write_text("{")  # what cannot be read takes none away
    assert await turns(asked, 4) == {"http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"}
    consists_of(2)
    assert await turns(asked, 4) == {"http://127.0.0.1:2/v1"}


async def test_a_judge_of_a_run_on_this_machine_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    async with ScriptedJudge(lambda asked: graded(asked, honest)) as server:
        url = server.url.removesuffix("/v1")
        assert url != server.url
        entry = EngineEntry(name="engine-0", url=url, agent_address="x:1")
        write_atomic(path, EngineList(engines=(entry,)).model_dump_json())
        scorer = RulerScorer(ruler_entry(f"{path.as_uri()}#/v1"), salt="run")
        await scorer.open()
        verdicts = (await score(scorer, group("4", "5"))).verdicts
        await scorer.close()
    assert value_of(verdicts["g/0"]) > value_of(verdicts["g/1"])


async def test_a_judge_behind_a_name_is_asked() -> None:
    async with ScriptedJudge(lambda asked: graded(asked, honest)) as server:
        behind_a_name = server.url.replace("http://127.0.0.1", "dns://localhost")
        assert behind_a_name != server.url
        scorer = RulerScorer(ruler_entry(behind_a_name), salt="run")
        await scorer.open()
        verdicts = (await score(scorer, group("4", "5"))).verdicts
        await scorer.close()
    assert value_of(verdicts["g/0"]) > value_of(verdicts["g/1"])


async def test_servers_behind_a_name_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "LOOK_SECONDS", 0.0)
    present: set[str] | None = set()

    async def resolve(name: str) -> set[str] | None:
        assert name == "job-inference:8000"
        return present

    monkeypatch.setattr(servers, "resolved", resolve)
    asked = Servers(("dns://job-inference:8000/v1",))
    assert await asked.next() is None
    present = {"10.0.0.1:8000", "[fd00::2]:8000"}
    both = {"http://10.0.0.1:8000/v1", "http://[fd00::2]:8000/v1"}
    assert await turns(asked, 4) == both
    present = None  # a name server that fails takes none away
    assert await turns(asked, 4) == both
    present = {"10.0.0.3:8000"}
    assert await turns(asked, 4) == {"http://10.0.0.3:8000/v1"}
