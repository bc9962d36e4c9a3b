"""A fake Kubernetes: an API server on loopback that a real operator with a real client runs against, with no cluster.

It speaks the API as clients see it: discovery, lists in pages, watch streams with bookmarks, server-side apply with its managed fields,
resource versions, generations, the status subresource, custom resources by the schema of their definition, and the deletion of what an
object owns. And it fails when a test wants it to:

    async with FakeKubernetes() as cluster:
        cluster.create("customresourcedefinitions", definition)
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path)))
        ...                                                      # start what is to be tested; it finds an API server
        cluster.fail("patch", "deployments", status=503, times=3)
        cluster.freeze("pods")                                   # its watch streams stay open and say nothing
        await cluster.until(lambda: cluster.find("deployments", "team-a", "web"), "a Deployment is made")
        assert cluster.requests("patch", "deployments")[-1].status == 201

A test reads and changes objects by plain calls (`get`, `create`, `edit`, `delete`), from the loop that the server runs in. `Controllers`
plays what is behind the API: it makes pods of StatefulSets and Deployments, and a test says what becomes of each.

What it does not do, so that nobody takes a pass here for more than it is: it checks no token and no namespace, runs no admission and no
CEL rules, fills in no defaults of built-in kinds, and takes every list of an object as one value (Kubernetes merges some by their keys).
"""

from __future__ import annotations

from kestrl.testing.kubernetes.controllers import Controllers
from kestrl.testing.kubernetes.fake import FakeKubernetes
from kestrl.testing.kubernetes.requests import Fault, Request
from kestrl.testing.kubernetes.resources import BUILT_IN, Change, Refused, Resource

__all__ = ["BUILT_IN", "Change", "Controllers", "FakeKubernetes", "Fault", "Refused", "Request", "Resource"]
