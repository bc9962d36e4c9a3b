"""A fake Kubernetes: an API server on loopback that a real operator with a real client runs against, with no cluster.

It implements the API as clients see it: discovery, lists in pages, watch streams with bookmarks, server-side apply with
its managed fields, resource versions, generations, the status subresource, custom resources by the schema of their
definition, and the deletion of dependents. Tests can inject failures:

    async with FakeKubernetes() as cluster:
        cluster.create("customresourcedefinitions", definition)
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path)))
        ...                                                      # start the program under test
        cluster.fail("patch", "deployments", status=503, times=3)
        cluster.freeze("pods")                                   # its watch streams stay open and send nothing
        await cluster.until(lambda: cluster.find("deployments", "team-a", "web"), "a Deployment is created")
        assert cluster.requests("patch", "deployments")[-1].status == 201

Tests read and change objects by plain calls (`get`, `create`, `edit`, `delete`), from the event loop that the server
runs in. `Controllers` simulates the controllers: it creates the pods of StatefulSets and Deployments, and the test sets
their further states.

Limits: tokens and namespaces are not checked, there is no admission and there are no CEL rules, built-in kinds get no
defaults, and every list of an object is one value (Kubernetes merges some by their keys).
"""

from __future__ import annotations

from tests.fakes.kubernetes.controllers import Controllers
from tests.fakes.kubernetes.fake import FakeKubernetes
from tests.fakes.kubernetes.requests import Fault, Request
from tests.fakes.kubernetes.resources import BUILT_IN, Change, Refused, Resource

__all__ = ["BUILT_IN", "Change", "Controllers", "FakeKubernetes", "Fault", "Refused", "Request", "Resource"]
