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
        await away_and_back(stage, controllers)
        assert len(stage.events("Unavailable")) == 1
        assert count(stage, "Unavailable") == times
    await stage.until(lambda: count(stage, "AllReady") == 4, "each time is counted")


def count(stage: Stage, reason: str) -> int:
    """How often something was told; 0 if it was not."""
    return next((item.get("series", {}).get("count", 1) for item in stage.events(reason)), 0)


async def away_and_back(stage: Stage, controllers: Controllers) -> None:
    controllers.image_missing(stage.pods("inference")[0], "no such image")
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "Unavailable", "one is away")
    controllers.run(stage.pods("inference")[0])
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "it is back")


async def test_an_event_that_kubernetes_has_forgotten_is_told_anew(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.job()
    await stage.until(lambda: count(stage, "AllReady"), "it is told")
    stage.cluster.delete("events.events.k8s.io", "team-a", stage.events("AllReady")[0]["metadata"]["name"])
    await away_and_back(stage, controllers)
    await stage.until(lambda: count(stage, "AllReady") == 1, "it is told anew")
    await away_and_back(stage, controllers)
    await stage.until(lambda: count(stage, "AllReady") == 2, "and counted")


async def test_an_event_that_could_not_be_written_is_told_the_next_time(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    trouble = stage.cluster.fail("create", "events", status=503)
    stage.job()
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "engines are ready")
    await stage.quiet()
    trouble.end()
    assert count(stage, "AllReady") == 0
    await away_and_back(stage, controllers)
    await stage.until(lambda: count(stage, "AllReady") == 1, "it is told now")


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
