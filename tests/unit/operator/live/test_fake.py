"""The fake API server: it behaves as clients of Kubernetes expect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.fakes.kubernetes import Controllers, FakeKubernetes, Refused

Object = dict[str, Any]
APPS = "/apis/apps/v1/namespaces/a/deployments"
APPLY = {"Content-Type": "application/apply-patch+yaml"}


@pytest.fixture
async def cluster() -> AsyncGenerator[FakeKubernetes]:
    async with FakeKubernetes(bookmark_seconds=0.1) as made:
        yield made


class Client:
    """A plain HTTP client, without a Kubernetes library."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Object]:
        sent = {"Content-Type": "application/json", "Authorization": "Bearer me", **(headers or {})}
        data = None if body is None else json.dumps(body)
        async with self.session.request(method, self.url + path, data=data, headers=sent) as answer:
            return answer.status, await answer.json(content_type=None)

    async def apply(
        self, name: str, spec: Object, manager: str = "me", *, force: bool = True, **metadata: Any
    ) -> tuple[int, Object]:
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, **metadata}, "spec": spec}
        path = f"{APPS}/{name}?fieldManager={manager}{'&force=true' if force else ''}"
        return await self.ask("PATCH", path, body, APPLY)


@pytest.fixture
async def client(cluster: FakeKubernetes) -> AsyncGenerator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(session, cluster.url)


@asynccontextmanager
async def watching(client: Client, path: str) -> AsyncGenerator[asyncio.Queue[Object]]:
    """The events of a watch stream."""
    events: asyncio.Queue[Object] = asyncio.Queue()

    async def read() -> None:
        async with client.session.get(client.url + path, headers={"Authorization": "Bearer me"}) as answer:
            async for line in answer.content:
                events.put_nowait(json.loads(line))
        events.put_nowait({"type": "END"})

    task = asyncio.create_task(read())
    try:
        yield events
    finally:
        task.cancel()
        await asyncio.wait([task])


async def next_of(events: asyncio.Queue[Object]) -> tuple[str, str]:
    """Type and object name of the next event other than a bookmark."""
    while True:
        event = await asyncio.wait_for(events.get(), 5)
        if event["type"] != "BOOKMARK":
            return event["type"], event.get("object", {}).get("metadata", {}).get("name", "")


async def test_discovery_lists_the_resources(client: Client) -> None:
    assert (await client.ask("GET", "/api"))[1]["versions"] == ["v1"]
    groups = {item["name"] for item in (await client.ask("GET", "/apis"))[1]["groups"]}
    assert {"apps", "coordination.k8s.io", "networking.k8s.io"} <= groups
    listed = (await client.ask("GET", "/apis/apps/v1"))[1]["resources"]
    assert {"deployments", "deployments/status", "statefulsets"} <= {item["name"] for item in listed}
    code, body = await client.ask("GET", "/api/v1/namespaces/a/pods/none")
    assert (code, body["kind"], body["reason"]) == (404, "Status", "NotFound")


async def test_lists_come_in_pages_of_one_moment(cluster: FakeKubernetes, client: Client) -> None:
    for number in range(5):
        labels = {"kind": "odd" if number % 2 else "even"}
        cluster.create("configmaps", {"metadata": {"name": f"c{number}", "namespace": "a", "labels": labels}})
    _, page = await client.ask("GET", "/api/v1/configmaps?limit=2")
    cluster.create("configmaps", {"metadata": {"name": "late", "namespace": "a"}})
    names = [item["metadata"]["name"] for item in page["items"]]
    while token := page["metadata"].get("continue"):
        _, page = await client.ask("GET", f"/api/v1/configmaps?limit=2&continue={token}")
        names += [item["metadata"]["name"] for item in page["items"]]
    assert names == ["c0", "c1", "c2", "c3", "c4"]
    _, chosen = await client.ask("GET", "/api/v1/configmaps?labelSelector=kind%3Dodd&limit=1")
    assert [item["metadata"]["name"] for item in chosen["items"]] == ["c1"]
    cluster.compact()
    token = chosen["metadata"]["continue"]
    assert (await client.ask("GET", f"/api/v1/configmaps?continue={token}"))[0] == 410


async def test_a_watch_continues_from_a_version_by_its_selector(cluster: FakeKubernetes, client: Client) -> None:
    cluster.create("configmaps", {"metadata": {"name": "old", "namespace": "a", "labels": {"mine": "1"}}})
    since = cluster.objects.version
    path = f"/api/v1/configmaps?watch=true&resourceVersion={since}&labelSelector=mine&allowWatchBookmarks=true"
    async with watching(client, path) as events:
        cluster.create("configmaps", {"metadata": {"name": "other", "namespace": "a"}})
        cluster.create("configmaps", {"metadata": {"name": "new", "namespace": "a", "labels": {"mine": "1"}}})
        assert await next_of(events) == ("ADDED", "new")
        cluster.edit("configmaps", "a", "old", {"data": {"x": "1"}})
        assert await next_of(events) == ("MODIFIED", "old")
        cluster.edit("configmaps", "a", "old", {"metadata": {"labels": {"mine": None}}})
        assert await next_of(events) == ("DELETED", "old")
        cluster.delete("configmaps", "a", "new")
        assert await next_of(events) == ("DELETED", "new")
        mark = await asyncio.wait_for(events.get(), 5)
        assert mark["type"] == "BOOKMARK"
        assert mark["object"]["metadata"]["resourceVersion"] == str(cluster.objects.version)


async def test_a_watch_without_a_version_starts_with_all_objects_and_times_out(
    cluster: FakeKubernetes, client: Client
) -> None:
    cluster.create("configmaps", {"metadata": {"name": "old", "namespace": "a"}})
    async with watching(client, "/api/v1/configmaps?watch=true&timeoutSeconds=1") as events:
        assert await next_of(events) == ("ADDED", "old")
        assert await next_of(events) == ("END", "")


async def test_a_version_that_is_too_old_is_gone(cluster: FakeKubernetes, client: Client) -> None:
    since = cluster.objects.version
    cluster.create("configmaps", {"metadata": {"name": "c", "namespace": "a"}})
    cluster.compact()
    async with watching(client, f"/api/v1/configmaps?watch=true&resourceVersion={since}") as events:
        event = await asyncio.wait_for(events.get(), 5)
        assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
        assert await next_of(events) == ("END", "")


async def test_streams_can_freeze_lose_events_and_end(cluster: FakeKubernetes, client: Client) -> None:
    path = f"/api/v1/configmaps?watch=true&resourceVersion={cluster.objects.version}&allowWatchBookmarks=true"
    async with watching(client, path) as events:
        cluster.freeze("configmaps")
        cluster.create("configmaps", {"metadata": {"name": "one", "namespace": "a"}})
        await asyncio.sleep(0.3)
        assert events.empty(), "a frozen stream delivered an event"
        cluster.thaw("configmaps")
        assert await next_of(events) == ("ADDED", "one")
        cluster.lose("configmaps")
        cluster.create("configmaps", {"metadata": {"name": "two", "namespace": "a"}})
        cluster.create("configmaps", {"metadata": {"name": "three", "namespace": "a"}})
        assert await next_of(events) == ("ADDED", "three")
        cluster.end_streams("configmaps")
        assert await next_of(events) == ("END", "")


async def test_a_write_with_an_old_version_or_of_another_object_conflicts(
    cluster: FakeKubernetes, client: Client
) -> None:
    made = cluster.create("leases", {"metadata": {"name": "l", "namespace": "a"}, "spec": {"holderIdentity": "x"}})
    path = "/apis/coordination.k8s.io/v1/namespaces/a/leases/l"
    assert (await client.ask("PUT", path, made))[0] == 200
    cluster.edit("leases", "a", "l", {"spec": {"holderIdentity": "y"}})
    code, body = await client.ask("PUT", path, made)
    assert (code, body["reason"]) == (409, "Conflict")
    assert cluster.get("leases", "a", "l")["spec"]["holderIdentity"] == "y"
    assert (await client.apply("d", {"replicas": 1}))[0] == 201
    assert (await client.apply("d", {"replicas": 2}, uid="another"))[0] == 422
    assert (await client.apply("e", {"replicas": 2}, uid="another"))[0] == 409
    assert (await client.apply("d", {"replicas": 2}, resourceVersion="1"))[0] == 409
    assert (await client.ask("POST", "/apis/coordination.k8s.io/v1/namespaces/a/leases", made))[1][
        "reason"
    ] == "AlreadyExists"


async def test_apply_makes_merges_removes_and_counts_generations(cluster: FakeKubernetes, client: Client) -> None:
    code, made = await client.apply("d", {"replicas": 1, "paused": True}, labels={"a": "1"})
    assert (code, made["metadata"]["generation"]) == (201, 1)
    cluster.edit("deployments", "a", "d", {"spec": {"minReadySeconds": 5}})
    code, made = await client.apply("d", {"replicas": 2}, labels={"a": "1"})
    assert (code, made["metadata"]["generation"]) == (200, 3)
    assert made["spec"] == {"replicas": 2, "minReadySeconds": 5}, (
        "fields that are no longer applied are removed, those of others stay"
    )
    before = cluster.objects.version
    assert (await client.apply("d", {"replicas": 2}, labels={"a": "1"}))[1] == made
    assert cluster.objects.version == before, "nothing changed, but the version did"


async def test_apply_owns_fields(cluster: FakeKubernetes, client: Client) -> None:
    await client.apply("d", {"replicas": 1, "paused": True})
    cluster.edit("deployments", "a", "d", {"spec": {"replicas": 5}}, manager="kubectl", subresource="scale")
    owners = {
        (item["manager"], item["operation"], item.get("subresource")): item["fieldsV1"]
        for item in cluster.get("deployments", "a", "d")["metadata"]["managedFields"]
    }
    assert owners == {
        ("me", "Apply", None): {"f:spec": {"f:paused": {}}},
        ("kubectl", "Update", "scale"): {"f:spec": {"f:replicas": {}}},
    }
    code, body = await client.apply("d", {"replicas": 1, "paused": True}, force=False)
    assert (code, body["reason"]) == (409, "Conflict")
    assert "Apply failed with 1 conflict" in body["message"]
    _, made = await client.apply("d", {"replicas": 1, "paused": True})
    assert [item["manager"] for item in made["metadata"]["managedFields"]] == ["me"]
    assert made["spec"]["replicas"] == 1


async def test_status_is_a_subresource(cluster: FakeKubernetes, client: Client) -> None:
    await client.apply("d", {"replicas": 1})
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "status": {"readyReplicas": 1}}
    _, made = await client.ask("PATCH", f"{APPS}/d/status?fieldManager=me&force=true", body, APPLY)
    assert made["status"] == {"readyReplicas": 1}
    assert made["metadata"]["generation"] == 1
    _, made = await client.ask(
        "PATCH", f"{APPS}/d", {"status": {"readyReplicas": 9}}, {"Content-Type": "application/merge-patch+json"}
    )
    assert made["status"] == {"readyReplicas": 1}
    assert (await client.ask("PATCH", f"{APPS}/none/status?fieldManager=me", body, APPLY))[0] == 404


async def test_dependents_are_deleted_with_their_owner(cluster: FakeKubernetes, client: Client) -> None:
    _, owner = await client.apply("d", {"replicas": 1})
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d", "uid": owner["metadata"]["uid"]}
    for name, references in (("child", [reference]), ("shared", [reference, {**reference, "uid": "x"}]), ("free", [])):
        metadata = {"name": name, "namespace": "a", "ownerReferences": references}
        cluster.create("configmaps", {"metadata": metadata})
    assert (await client.ask("DELETE", f"{APPS}/d"))[0] == 200
    assert [item["metadata"]["name"] for item in cluster.list("configmaps")] == ["free", "shared"]
    orphan = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late", "ownerReferences": [reference]}}
    assert (await client.ask("POST", "/api/v1/namespaces/a/configmaps", orphan))[0] == 201
    await cluster.until(lambda: cluster.find("configmaps", "a", "late") is None, "created too late, and collected")


async def test_custom_resources_are_held_to_their_schema(cluster: FakeKubernetes, client: Client) -> None:
    spec = {
        "type": "object",
        "properties": {"size": {"type": "integer", "minimum": 1}, "kind": {"type": "string", "default": "x"}},
    }
    schema = {"type": "object", "properties": {"spec": spec}}
    version = {"name": "v1", "storage": True, "served": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "Box", "plural": "boxes"}
    definition = {"group": "g.dev", "scope": "Namespaced", "names": names, "versions": [version]}
    async with client.session.get(client.url + "/apis/g.dev/v1/boxes") as answer:
        assert (answer.status, await answer.text()) == (404, "404 page not found\n")
    cluster.create("customresourcedefinitions", {"metadata": {"name": "boxes.g.dev"}, "spec": definition})
    box = {"metadata": {"name": "b"}, "spec": {"size": 2, "unknown": 1}}
    _, made = await client.ask("POST", "/apis/g.dev/v1/namespaces/a/boxes", box)
    assert made["spec"] == {"size": 2, "kind": "x"}
    bad = {"metadata": {"name": "c"}, "spec": {"size": 0}}
    code, body = await client.ask("POST", "/apis/g.dev/v1/namespaces/a/boxes", bad)
    assert code == 422
    assert "spec.size" in body["message"]


async def test_an_empty_value_applied_over_a_value_becomes_null_or_is_removed(
    cluster: FakeKubernetes, client: Client
) -> None:
    """Unexpected, but found by comparison with Kubernetes 1.36."""
    items = {"type": "object", "properties": {"name": {"type": "string"}}}
    by_name = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    counts = {"type": "object", "additionalProperties": {"type": "integer"}}
    lists = {"keyed": {"type": "array", "items": items, **by_name}, "plain": {"type": "array", "items": items}}
    status = {"type": "object", "properties": {"counts": counts, **lists}}
    version = {"name": "v1", "storage": True, "served": True, "subresources": {"status": {}}}
    version["schema"] = {"openAPIV3Schema": {"type": "object", "properties": {"status": status}}}
    definition = {"group": "g.dev", "scope": "Namespaced", "names": {"kind": "Box", "plural": "boxes"}}
    metadata = {"metadata": {"name": "boxes.g.dev"}}
    cluster.create("customresourcedefinitions", {**metadata, "spec": {**definition, "versions": [version]}})
    cluster.create("boxes", {"metadata": {"name": "b", "namespace": "a"}})

    async def applied(status: Object, **metadata: Any) -> tuple[int, Object]:
        body = {"apiVersion": "g.dev/v1", "kind": "Box", "metadata": {"name": "b", **metadata}, "status": status}
        path = "/apis/g.dev/v1/namespaces/a/boxes/b/status?fieldManager=me&force=true"
        code, made = await client.ask("PATCH", path, body, APPLY)
        return code, made.get("status", {}) if code == 200 else made

    empty: Object = {"counts": {}, "keyed": [], "plain": []}
    full: Object = {"counts": {"x": 1}, "keyed": [{"name": "n"}], "plain": [{"name": "n"}]}
    assert await applied(empty) == (200, empty)
    assert await applied(full) == (200, full)
    assert await applied({**full, "keyed": [], "plain": []}) == (200, {"counts": {"x": 1}, "plain": []})
    code, refusal = await applied({**full, "counts": {}})
    assert code == 422
    assert 'status.counts: Invalid value: "null"' in refusal["message"]
    assert await applied({"keyed": full["keyed"]}) == (200, {"keyed": full["keyed"]})
    assert (await applied(full, uid="another"))[0] == 200, "a status is accepted for any uid"
    assert (await applied(empty, resourceVersion="1"))[0] == 409


async def test_requests_are_counted_refused_and_made_to_fail(cluster: FakeKubernetes, client: Client) -> None:
    cluster.denied.add(("list", "pods"))
    review = {"spec": {"resourceAttributes": {"verb": "list", "resource": "pods"}}}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    assert (await client.ask("POST", path, review))[1]["status"] == {"allowed": False}
    code, body = await client.ask("GET", "/api/v1/pods")
    assert (code, body["reason"]) == (403, "Forbidden")
    assert 'User "me" cannot list resource "pods"' in body["message"]
    fault = cluster.fail("patch", "deployments", status=503, times=1)
    assert (await client.apply("d", {}))[0] == 503
    assert (await client.apply("d", {}))[0] == 201
    assert (fault.hits, fault.left) == (1, 0)
    cluster.fail("patch", "deployments", status=500, late=True, times=1)
    assert (await client.apply("e", {}))[0] == 500
    assert cluster.find("deployments", "a", "e") is not None, "late means that it is done"
    statuses = [item.status for item in cluster.requests("patch", "deployments", user="me")]
    assert statuses == [503, 201, 500]
    cluster.fail("patch", "deployments", drop=True, times=1)
    with pytest.raises(aiohttp.ClientError):
        await client.apply("f", {})
    assert cluster.find("deployments", "a", "f") is None


async def test_pods_follow_their_workloads(cluster: FakeKubernetes, client: Client) -> None:
    controllers = Controllers(cluster)
    template = {"metadata": {"labels": {"app": "d"}}, "spec": {"containers": [{"name": "c"}]}}
    await client.apply("d", {"replicas": 2, "template": template})
    await cluster.until(lambda: len(controllers.pods("a", "d")) == 2, "two pods")
    for pod in controllers.pods("a", "d"):
        assert pod["status"] == {"phase": "Pending"}
        controllers.run(pod)
    await cluster.until(lambda: cluster.get("deployments", "a", "d")["status"]["readyReplicas"] == 2, "both are ready")
    old = {pod["metadata"]["uid"] for pod in controllers.pods("a", "d")}
    cluster.objects.keep_deleted_pods = True
    template["spec"]["containers"][0]["image"] = "new"
    await client.apply("d", {"replicas": 1, "template": template})
    await cluster.until(lambda: len(controllers.pods("a", "d")) == 3, "the old ones stay, a new one is made")
    going = [pod for pod in controllers.pods("a", "d") if "deletionTimestamp" in pod["metadata"]]
    assert {pod["metadata"]["uid"] for pod in going} == old
    for pod in going:
        controllers.gone(pod)
    assert len(controllers.pods("a", "d")) == 1
    with pytest.raises(Refused):
        cluster.get("pods", "a", going[0]["metadata"]["name"])
