"""KestRL on a Kubernetes of this machine, for a first look: `python -m tests.e2e.trial up|down`.

A cluster, an S3 server in its node, the chart, and the quickstart's job. All of it is below the cluster's folder and
ends with the cluster's first process, so that `down` leaves nothing. What `up` finds running stays as it is.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from tests.e2e.cluster import objects
from tests.e2e.cluster.choice import Unavailable, facade, usable_kit
from tests.e2e.cluster.client import Cluster
from tests.e2e.cluster.commands import CommandFailed, eventually
from tests.e2e.cluster.layout import RUNS, default_name
from tests.e2e.cluster.node import START_SECONDS, Node
from tests.e2e.cluster.up import accepts, bring_up, find
from tests.e2e.installation import (
    BUCKET,
    JOB,
    RELEASE,
    SYSTEM,
    Object,
    credentials,
    install,
    is_true,
    quickstart,
    run_of,
)
from tests.fakes.s3 import PORTS, S3Server

TRIAL = f"{default_name()}-trial"
"""The cluster's name, which no test takes."""
NAMESPACE = "team-a"
NAME = "email-search"
STORAGE = "storage"
"""The S3 server among the node's daemons."""
TRAINING_SECONDS = 1200.0


def note(text: str) -> None:
    """Reports progress on standard error; standard output has what a shell can evaluate."""
    sys.stderr.write(f"{text}\n")


def running_node(name: str) -> Node:
    """The cluster of this name, brought up if there is none, with all of its daemons."""
    node = find(name)
    if node is not None:
        note(f"cluster {name} runs")
        node.revive()
        return node
    note(f"cluster {name} starts")
    return bring_up(usable_kit(), name=name)


def serve_storage(node: Node) -> S3Server:
    """An S3 server at the node's address, which its pods and this machine reach; it ends with the node."""
    layout = node.layout
    folder = layout.folder / "s3"
    if STORAGE not in node.runs():
        note("an S3 server starts")
        python = str(layout.environment / "bin" / "python")
        node.start(STORAGE, [python, "-m", "tests.fakes.s3", str(folder), layout.node_address])
    eventually("the S3 server answers", lambda: accepts(layout.node_address, PORTS["proxy"]), START_SECONDS)
    return S3Server(folder, PORTS, layout.node_address)


def is_installed(cluster: Cluster) -> bool:
    return RELEASE in cluster.helm("list", f"--namespace={SYSTEM}", "--deployed", "--short").split()


def submit(cluster: Cluster, store: S3Server) -> None:
    """The quickstart's job in a namespace with the credentials of its storage, unless it is there."""
    place = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {objects.LABEL: "true"}},
    }
    cluster.apply(place)
    cluster.apply(credentials(store, NAMESPACE))
    if not cluster.exists(JOB, NAME, NAMESPACE):
        note(f"job {NAME} is submitted to namespace {NAMESPACE}")
        cluster.apply(quickstart(NAME), NAMESPACE)


def training(cluster: Cluster) -> Object:
    """The job, once it trains or has succeeded; each of its phases is reported."""
    phases: list[str] = []

    def trains(job: Object) -> bool:
        phase = job.get("status", {}).get("shown", {}).get("phase", "")
        if phase and phase not in phases[-1:]:
            phases.append(phase)
            note(f"job {NAME}: {phase}")
        return is_true("Ready")(job) or phase == "Failed"

    return cluster.wait_for(JOB, NAME, trains, NAMESPACE, seconds=TRAINING_SECONDS)


def exports(node: Node, store: S3Server, job: Object) -> str:
    """Shell commands with which kubectl and `kestrl episodes` find what runs."""
    layout, run = node.layout, run_of(job)
    variables = {
        "KUBECONFIG": str(layout.kubeconfig()),
        "RUN": f"s3://{BUCKET}/e2e/{run}",
        **store.environment(),
    }
    lines = [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
    return "\n".join([*lines, f"export PATH={shlex.quote(str(node.state.kit.folder))}:$PATH"])


def up(name: str) -> None:
    node = running_node(name)
    cluster = facade(node)
    store = serve_storage(node)
    cluster.enforce_network_policies()
    if not is_installed(cluster):
        note(f"the chart is installed in namespace {SYSTEM}")
        install(cluster, store, node.layout.folder)
    submit(cluster, store)
    job = training(cluster)
    sys.stdout.write(f"{exports(node, store, job)}\n")
    note(f"job {NAME} in namespace {NAMESPACE}: {job['status']['shown']['phase']}. Evaluate the lines above, then")
    note(f"  kubectl -n {NAMESPACE} get {JOB.partition('.')[0]} -w")
    note("  make cluster-down")


def down(name: str) -> None:
    node = Node(RUNS / name)
    if not node.folder.exists():
        note(f"no cluster {name} is up")
        return
    node.down()
    note(f"cluster {name} is gone")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.e2e.trial", description=__doc__)
    parser.add_argument("command", choices=("up", "down"))
    parser.add_argument("--name", default=TRIAL, help="of the cluster; this checkout's by default")
    arguments = parser.parse_args()
    try:
        {"up": up, "down": down}[arguments.command](arguments.name)
    except (Unavailable, CommandFailed, TimeoutError) as error:
        note("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
