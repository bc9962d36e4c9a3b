"""Events: one for each published transition, counted when it comes again; their failures block nothing."""

from __future__ import annotations

from tests.fakes.kubernetes import Controllers

from .stage import JOB, Object, Stage, learner_token, learning, ready, report

NOBODY = "127.255.0.1"
"""An address at which nothing listens."""


async def test_a_transition_is_published_once_regarding_the_job(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    await stage.operator()
    uid = stage.job()["metadata"]["uid"]
    await stage.until(lambda: stage.events("AllReady"), "it is reported")
    await stage.settled()
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


async def test_a_healthy_start_publishes_no_warning(stage: Stage) -> None:
    """The pod of a learner is ready before its server can be reached."""

    def started(controllers: Controllers, pod: Object) -> None:
        ready(controllers, pod)
        if pod["metadata"]["labels"]["kestrl.dev/role"] == "learner":
            controllers.run(pod, address=NOBODY, fresh=True)

    controllers = Controllers(stage.cluster, started=started)
    await stage.operator()
    uid = stage.job()["metadata"]["uid"]
    not_yet = "it does not answer yet: "
    await stage.until(lambda: stage.condition("LearnerProgressing")[2].startswith(not_yet), "it is called in vain")
    assert stage.condition("LearnerProgressing")[:2] == ("False", "Starting")
    async with learning(stage, learner_token(uid), report("training", 1)) as learner:
        controllers.run(stage.pods("learner")[0], address=learner.address, fresh=True)
        await stage.until(lambda: stage.phase() == "Running", "it trains")
        await stage.settled()
    assert {item["type"] for item in stage.events()} == {"Normal"}


async def test_the_same_transition_again_is_counted_in_its_series(stage: Stage) -> None:
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
    """How often an event was published; 0 if it was not."""
    return next((item.get("series", {}).get("count", 1) for item in stage.events(reason)), 0)


async def away_and_back(stage: Stage, controllers: Controllers) -> None:
    controllers.image_missing(stage.pods("inference")[0], "no such image")
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "Unavailable", "one is away")
    controllers.run(stage.pods("inference")[0])
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "it is back")


async def test_an_expired_event_is_published_again(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.job()
    await stage.until(lambda: count(stage, "AllReady"), "it is reported")
    stage.cluster.delete("events.events.k8s.io", "team-a", stage.events("AllReady")[0]["metadata"]["name"])
    await away_and_back(stage, controllers)
    await stage.until(lambda: count(stage, "AllReady") == 1, "it is published again")
    await away_and_back(stage, controllers)
    await stage.until(lambda: count(stage, "AllReady") == 2, "and counted")


async def test_an_event_that_was_not_written_is_published_the_next_time(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    trouble = stage.cluster.fail("create", "events", status=503)
    stage.job()
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "engines are ready")
    await stage.settled()
    trouble.end()
    assert count(stage, "AllReady") == 0
    await away_and_back(stage, controllers)
    await stage.until(lambda: count(stage, "AllReady") == 1, "it is published now")


async def test_the_same_transition_with_another_message_is_published_too(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.job()
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "engines are ready")
    for words in ("no such image", "registry is down"):
        controllers.image_missing(stage.pods("inference")[0], words)
        await stage.until(lambda: stage.condition("EnginesReady")[1] == "Unavailable", "one is away")
        controllers.run(stage.pods("inference")[0])
        await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "it is back")
    await stage.settled()
    notes = [item["note"] for item in stage.events("Unavailable")]
    assert any("no such image" in note for note in notes)
    assert any("registry is down" in note for note in notes)


async def test_another_process_continues_the_series(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    first = await stage.operator("a")
    stage.job()
    await stage.until(lambda: stage.events("AllReady"), "it is reported")
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
    await stage.settled()
    assert refused.hits >= 1
    assert stage.events() == []
    assert refused.hits <= 4, "retried"
