"""Events: one for each turn that people should hear of, counted when it comes again, and never in the way."""

from __future__ import annotations

from kestrl.testing.kubernetes import Controllers

from .stage import JOB, Stage, ready


async def test_a_turn_is_told_once_with_the_job_as_what_it_regards(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    await stage.operator()
    uid = stage.job()["metadata"]["uid"]
    await stage.until(lambda: stage.events("AllReady"), "it is told")
    await stage.quiet()
    (event,) = stage.events("AllReady")
    assert event["regarding"] == {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "namespace": "team-a",
        "name": JOB,
        "uid": uid,
    }
    assert (event["type"], event["note"], event["reportingController"]) == ("Normal", "2/2", "kestrl.dev/operator")
    assert "series" not in event
    reasons = [item["reason"] for item in stage.events()]
    assert len(reasons) == len(set(reasons))


async def test_the_same_turn_again_is_counted_in_its_series(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.job()
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "engines are ready")
    for times in (1, 2, 3):
        controllers.image_missing(stage.pods("inference")[0], "no such image")
        await stage.until(lambda: stage.condition("EnginesReady")[1] == "Unavailable", "one is away")
        controllers.run(stage.pods("inference")[0])
        await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "it is back")
        await stage.quiet(0.1)
        (event,) = stage.events("Unavailable")
        assert event.get("series", {"count": 1})["count"] == times
    assert stage.events("AllReady")[0]["series"]["count"] == 4


async def test_the_same_turn_for_another_reason_is_told_too(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.job()
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "engines are ready")
    for words in ("no such image", "registry is down"):
        controllers.image_missing(stage.pods("inference")[0], words)
        await stage.until(lambda: stage.condition("EnginesReady")[1] == "Unavailable", "one is away")
        controllers.run(stage.pods("inference")[0])
        await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "it is back")
    await stage.quiet()
    notes = [item["note"] for item in stage.events("Unavailable")]
    assert any("no such image" in note for note in notes)
    assert any("registry is down" in note for note in notes)


async def test_another_process_goes_on_with_the_series(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    first = await stage.operator("a")
    stage.job()
    await stage.until(lambda: stage.events("AllReady"), "it is told")
    await stage.stop(first)
    await stage.operator("b")
    controllers.image_missing(stage.pods("inference")[0], "no such image")
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "Unavailable", "one is away")
    controllers.run(stage.pods("inference")[0])
    await stage.until(lambda: "series" in stage.events("AllReady")[0], "it is counted")
    assert len(stage.events("AllReady")) == 1


async def test_events_that_cannot_be_written_fail_no_pass(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    await stage.operator()
    refused = stage.cluster.fail("create", "events", status=403)
    stage.job()
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "the status is written")
    await stage.quiet()
    assert refused.hits >= 1
    assert stage.events() == []
    assert refused.hits <= 4, "tried again and again"
