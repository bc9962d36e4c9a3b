"""Cluster fixtures. A test that needs a capability that is missing is skipped, with the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.fakes.s3 import S3Server, serving_s3

from .cluster.capabilities import Capability
from .cluster.choice import Unavailable, connected
from .cluster.client import Cluster
from .cluster.commands import eventually
from .cluster.devices import ASCEND, NVIDIA
from .installation import CRDS, Installation, installed

SECONDS = 240
"""For a test with the set-up and the end of a cluster, which count as the first and the last test's."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))


def _connect(held: ExitStack, *, control_plane_only: bool = False) -> Cluster:
    try:
        cluster = held.enter_context(connected(control_plane_only=control_plane_only))
    except Unavailable as error:
        if os.environ.get("KESTRL_E2E_REQUIRED") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))
    if cluster.own is not None:
        cluster.renew_volumes()
    return cluster


def _offering(cluster: Cluster, capability: Capability) -> Cluster:
    if capability not in cluster.capabilities:
        pytest.skip(f"the cluster does not offer {capability}")
    return cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster whose pods run."""
    with ExitStack() as held:
        yield _offering(_connect(held), Capability.NODE)


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster for objects: the one with a node, if another test of this session needs that anyway."""
    if any("cluster" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield request.getfixturevalue("cluster")
        return
    with ExitStack() as held:
        yield _connect(held, control_plane_only=True)


@pytest.fixture(scope="session")
def fake_nodes(control_plane: Cluster) -> Cluster:
    """The cluster for objects, if it supports `fake_nodes`."""
    return _offering(control_plane, Capability.FAKE_NODES)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own, whose pods have the checkout mounted."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture(scope="session")
def fake_devices(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with four fake NVIDIA GPUs and eight fake Huawei NPUs."""
    _offering(cluster, Capability.FAKE_DEVICES).add_devices(NVIDIA, ASCEND)
    yield cluster
    cluster.remove_devices()


@pytest.fixture(scope="session")
def host_paths(cluster: Cluster) -> Cluster:
    """The cluster, if its pods have the checkout mounted."""
    return _offering(cluster, Capability.HOST_PATHS)


@pytest.fixture(scope="session")
def pod_routes(cluster: Cluster) -> Cluster:
    """The cluster, if this process and its pods reach each other."""
    return _offering(_offering(cluster, Capability.POD_ROUTES), Capability.HOST_ADDRESS)


@pytest.fixture
def daemons(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, if its daemons can be disturbed; they run again after the test."""
    yield _offering(cluster, Capability.DAEMONS)
    cluster.node.revive()


@pytest.fixture(scope="session")
def network_policies(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with its policies enforced for the rest of the session."""
    own = _offering(cluster, Capability.NETWORK_POLICIES).own is not None
    if own:
        cluster.enforce_network_policies()
    yield cluster
    if own:
        cluster.ignore_network_policies()


@pytest.fixture(scope="session")
def control_plane_with_crds(control_plane: Cluster) -> Cluster:
    """A cluster with the CRDs of the chart."""
    for crd in CRDS:
        control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crd))
        eventually(f"{crd.name} is established", lambda crd=crd: _is_established(control_plane, crd), 60)
    return control_plane


def _is_established(cluster: Cluster, crd: Path) -> bool:
    """Whether a CRD is served. Its conditions are null at first, which ends `kubectl wait` and JSONPath."""
    listed = json.loads(cluster.kubectl("get", "-f", str(crd), "--output=json"))["status"].get("conditions")
    return any(item["type"] == "Established" and item["status"] == "True" for item in listed or ())


@pytest.fixture(scope="session")
def store(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server beside the cluster that pods reach."""
    _offering(cluster, Capability.HOST_ADDRESS)
    with serving_s3(tmp_path_factory.mktemp("s3"), host=cluster.host_address) as server:
        yield server


@pytest.fixture(scope="session")
def installation(
    host_paths: Cluster, store: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """KestRL, installed by its chart."""
    with installed(host_paths, store, tmp_path_factory.mktemp("helm")) as made:
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds a description of the namespace to the report of a failed test."""
    report = yield
    namespace, cluster = (getattr(item, "funcargs", {}).get(name) for name in ("namespace", "cluster"))
    if report.failed and report.when == "call" and namespace and cluster:
        report.sections.append((f"namespace {namespace}", cluster.describe(namespace)))
    return report
