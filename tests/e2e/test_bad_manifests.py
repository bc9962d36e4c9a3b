"""Bad manifests: each is refused at admission with a message, or gets a condition that names the field and the fix."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from .cluster.client import Cluster
from .cluster.commands import CommandFailed
from .installation import Installation, condition, quickstart

pytestmark = [pytest.mark.e2e]


class Bad(NamedTuple):
    """One mistake."""

    field: str
    """Its path below `spec`, with `__` between the parts."""
    value: Any
    text: str
    """A part of the expected answer."""


AT_ADMISSION = [
    Bad("model", None, "spec.model: Required value"),
    Bad("model__base", None, "spec.model.base: Required value"),
    Bad("model__base", "", "spec.model.base"),
    Bad("model__base", 7, "spec.model.base"),
    Bad("model__dtype", "float8", 'supported values: "float32", "bfloat16"'),
    Bad("model__adapter__rank", 0, "spec.model.adapter.rank"),
    Bad("model__adapter__alpha", -1, "spec.model.adapter.alpha"),
    Bad("data", None, "spec.data: Required value"),
    Bad("data__train", None, "spec.data.train: Required value"),
    Bad("data__train__size", 0, "spec.data.train.size"),
    Bad("data__seed", -1, "spec.data.seed"),
    Bad("rewards", None, "spec.rewards: Required value"),
    Bad("rewards", [], "spec.rewards"),
    Bad("rewards", [{"weight": 1.0}], "give either rule or ruler"),
    Bad("rewards", [{"rule": "exact_answer", "ruler": {"baseUrl": "http://x", "model": "m"}}], "one of them only"),
    Bad("rewards", [{"ruler": {}}], "give baseUrl and model of an OpenAI-compatible server, or self: true"),
    Bad("rewards", [{"ruler": {"baseUrl": "http://x", "model": "m", "self": True}}], "one of them only"),
    Bad("rewards", [{"ruler": {"baseUrl": "http://x"}}], "give the name of the judge model"),
    Bad("rewards", [{"ruler": {"baseUrl": "ftp://x", "model": "m"}}], "spec.rewards[0].ruler.baseUrl"),
    Bad("tools", [{"name": "two words", "use": "a:b"}], "spec.tools[0].name"),
    Bad("tools", [{"name": "search", "use": "no colon"}], "spec.tools[0].use"),
    Bad("tools", [{"name": "search"}], "give use, mcp or http"),
    Bad("agent__maxTurns", 0, "spec.agent.maxTurns"),
    Bad("agent__maxTokens", 4096, "leaves no room for a prompt"),
    Bad("sampling__temperature", 0, "nothing to learn from"),
    Bad("sampling__temperature", 6, "spec.sampling.temperature"),
    Bad("algorithm__name", "ppo", "spec.algorithm.name"),
    Bad("algorithm__groupSize", 1, "needs at least 2"),
    Bad("algorithm__groupSize", 128, "cannot hold one group"),
    Bad("algorithm__groupsPerStep", 0, "spec.algorithm.groupsPerStep"),
    Bad("algorithm__learningRate", 0, "spec.algorithm.learningRate"),
    Bad("algorithm__learningRate", "fast", "spec.algorithm.learningRate"),
    Bad("algorithm__clip__low", 1.5, "spec.algorithm.clip.low"),
    Bad("algorithm__maxStaleness", 3, "cannot hold every version"),
    Bad("algorithm__maxStaleness", -1, "spec.algorithm.maxStaleness"),
    Bad("algorithm__onFailedEpisode", "retry", 'supported values: "drop", "shrink"'),
    Bad("algorithm__maxFailedShare", 2, "spec.algorithm.maxFailedShare"),
    Bad("schedule__maxSteps", 0, "spec.schedule.maxSteps"),
    Bad("schedule__checkpointEvery", 0, "spec.schedule.checkpointEvery"),
    Bad("inference__engine", "tgi", "spec.inference.engine"),
    Bad("inference__replicas", 0, "spec.inference.replicas"),
    Bad("inference__replicas", 200_000, "should be less than or equal to 256"),
    Bad("inference__contextLength", 10**9, "spec.inference.contextLength"),
    Bad("rollout__replicas", 100_000, "should be less than or equal to 1024"),
    Bad("inference__accelerator__count", 0, "spec.inference.accelerator.count"),
    Bad("rollout__replicas", -1, "spec.rollout.replicas"),
    Bad("rollout__concurrency", 0, "spec.rollout.concurrency"),
    Bad("rollout__deadlines__tool", "2h", "deadlines nest"),
    Bad("rollout__deadlines__tool", "soon", "spec.rollout.deadlines.tool"),
    Bad("rollout__deadlines__tool", 30, "spec.rollout.deadlines.tool"),
    Bad("activeDeadline", "tomorrow", "spec.activeDeadline"),
    Bad("ttlAfterFinished", "-1h", "spec.ttlAfterFinished"),
    Bad("suspend", "yes", "spec.suspend"),
    Bad("failurePolicy__backoffLimit", -1, "spec.failurePolicy.backoffLimit"),
    Bad("failurePolicy__rules", [{"action": "Panic"}], "spec.failurePolicy.rules[0].action"),
    Bad("patches", [{"role": "engine", "template": {}}], "spec.patches[0].role"),
    Bad("algorithm__lerningRate", 1e-4, "spec.algorithm.lerningRate: field not declared"),
]
BY_CONDITION = [
    Bad("inference__accelerator__profile", "tpu", "accelerator.profile: 'tpu' is not one of"),
    Bad("storage", {"uri": "file:///tmp/runs"}, "spec.storage.uri: 'file:///tmp/runs' is a place on one machine"),
    Bad("model__adapter__rank", 1024, "spec.model.adapter.rank: 1024 is above the engine's limit"),
    Bad("agent__loop", "tool_agnet", "spec.agent.loop: 'tool_agnet' is not one of"),
    Bad("rewards", [{"rule": "exact"}], "spec.rewards[0].rule: 'exact' is not one of"),
    Bad("tools", [{"name": "a", "use": "m:f"}, {"name": "a", "use": "m:g"}], "2 tools are called 'a'"),
    Bad("data__train__size", 4, "do not fill one step"),
    Bad(
        "patches",
        [{"role": "tools", "template": {"spec": {"serviceAccountName": "admin"}}}],
        "spec.patches[0].template.spec.serviceAccountName",
    ),
    Bad(
        "patches",
        [{"role": "tools", "template": {"spec": {"containers": [{"name": "tools", "ports": "many"}]}}}],
        "Kubernetes refuses an object of this job",
    ),
    Bad(
        "patches",
        [{"role": "tools", "template": {"spec": {"contaners": [{"name": "tools"}]}}}],
        ".spec.template.spec.contaners: field not declared in schema",
    ),
]


def named(bad: Bad) -> str:
    return f"{bad.field}={bad.value}"[:60]


@pytest.mark.parametrize("bad", AT_ADMISSION, ids=named)
def test_it_is_refused_at_admission_with_the_field(bad: Bad, control_plane_with_crds: Cluster) -> None:
    with pytest.raises(CommandFailed) as refused:
        control_plane_with_crds.apply(quickstart("bad", **{bad.field: bad.value}))
    assert bad.text in str(refused.value)


def test_a_name_too_long_for_pod_names_is_refused(control_plane_with_crds: Cluster) -> None:
    with pytest.raises(CommandFailed) as refused:
        control_plane_with_crds.apply(quickstart("n" * 41))
    assert "metadata.name can have at most 40 characters" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("1st-run", "metadata.name must begin with a letter"),
        ("a.b", "metadata.name must begin with a letter and have only lower-case letters, digits and -"),
        ("Run", "RFC 1123"),
        ("a_b", "RFC 1123"),
        ("run-", "RFC 1123"),
    ],
)
def test_a_name_that_no_service_can_have_is_refused(name: str, text: str, control_plane_with_crds: Cluster) -> None:
    with pytest.raises(CommandFailed) as refused:
        control_plane_with_crds.apply(quickstart(name))
    assert text in str(refused.value)


@pytest.mark.timeout(300)
def test_errors_found_by_the_operator_become_conditions(installation: Installation) -> None:
    """All at once: a bad job never blocks another."""
    cluster = installation.cluster
    with installation.place("bad") as namespace:
        cluster.apply(
            [quickstart(f"bad-{number}", **{bad.field: bad.value}) for number, bad in enumerate(BY_CONDITION)],
            namespace,
        )
        for number, bad in enumerate(BY_CONDITION):
            job = cluster.wait_for(
                "agentrljob",
                f"bad-{number}",
                lambda found: condition(found, "Accepted")[0] == "False",
                namespace,
                seconds=120,
            )
            _, reason, message = condition(job, "Accepted")
            assert reason == "Invalid"
            assert bad.text in message
            assert job["status"]["shown"]["phase"] == "Rejected"
        for kind in ("statefulsets", "deployments", "services", "pods"):
            assert cluster.list(kind, namespace) == [], "a job that is refused is half applied"


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("field", "value", "kind", "text"),
    [
        ("model__base", "demo://huge", "Accepted", "demo://huge"),
        ("model__base", "s3://runs/no-such-model", "Accepted", "no-such-model"),
        ("data__train__uri", "demo://email/no-such-set", "Accepted", "no-such-set"),
        ("data__train__uri", "data.jsonl", "Accepted", "is a local path"),
        ("storage", {"uri": "s3://runs/e2e", "secretRef": {"name": "no-such-secret"}}, "Accepted", "no-such-secret"),
        (
            "patches",
            [{"role": "judge", "template": {"spec": {"containers": [{"name": "judge", "image": "localhost/none:1"}]}}}],
            "RolloutsFlowing",
            "ErrImageNeverPull",
        ),
        ("tools", [{"name": "search", "use": "no_such_module:Search"}], "RolloutsFlowing", "no_such_module"),
        ("rewards", [{"rule": "no_such_module:reward"}], "RolloutsFlowing", "no_such_module"),
    ],
)
def test_errors_found_by_pods_become_conditions_within_half_a_minute(
    installation: Installation, field: str, value: Any, kind: str, text: str
) -> None:
    cluster = installation.cluster
    with installation.place("bad") as namespace:
        cluster.apply(quickstart("wrong", **{field: value}), namespace)

        def says(job: dict[str, Any]) -> bool:
            status, _, message = condition(job, kind)
            return status == "False" and text in message

        cluster.wait_for("agentrljob", "wrong", says, namespace, seconds=60)
