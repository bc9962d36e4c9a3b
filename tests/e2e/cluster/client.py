"""The operations of tests on any cluster: kubectl, helm, and waiting for objects."""

from __future__ import annotations

import codecs
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from . import devices, kwok, objects
from .capabilities import Capability
from .commands import COMMAND_SECONDS, CommandFailed, eventually, run
from .images import BUILT
from .layout import NODE_NAME
from .node import Node

Object = dict[str, Any]
Objects = list[Object]
Names = list[str]
Manifest = Object | Sequence[Object] | str
WAIT_SECONDS = 120.0
DEFAULT_NAMESPACE = objects.NAMESPACE
POLICIES, DEVICES, KWOK = "network-policies", "devices", "kwok"
"""Names of the daemons that are started on request."""
READ_BYTES = 1 << 16
LOG_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster, as used by its administrator."""

    kubeconfig: Path
    kubectl_program: str
    helm_program: str
    image: str
    """An image with this checkout's environment, in which all components but engines can run."""
    engine_image: str
    """An image with the engine's environment."""
    capabilities: frozenset[Capability]
    cache: Path
    """The cache folder of kubectl and helm, outside the user's home."""
    own: Node | None = None
    """The node, if the harness brought it up."""
    built: frozenset[str] = frozenset()
    """Names of the images of `Dockerfiles/` that its nodes have."""
    release: Path | None = None
    """Folder of the release of which these images have the wheels."""

    def image_of(self, name: str) -> str:
        """A component's own image if the nodes have it, otherwise the one in which all can run."""
        return f"{BUILT}:{name}" if name in self.built else self.image

    @property
    def node(self) -> Node:
        """The harness's own node, whose daemons can be stopped, frozen, killed and started.

        Raises:
            RuntimeError: The cluster is not the harness's own.
        """
        if self.own is None:
            raise RuntimeError("this cluster was not brought up by the harness")
        return self.own

    @property
    def host_address(self) -> str:
        """The address of this machine as seen by pods, for servers of tests."""
        return self.node.layout.host_address

    # --- kubectl and helm

    def kubectl(self, *arguments: str, given: str | None = None, seconds: float = COMMAND_SECONDS) -> str:
        """Runs kubectl; returns its output.

        Raises:
            CommandFailed: It ended with an error.
        """
        return run(*self._kubectl(arguments), given=given, env=self._environment(), seconds=seconds)

    def helm(self, *arguments: str, seconds: float = 300.0) -> str:
        return run(
            self.helm_program, f"--kubeconfig={self.kubeconfig}", *arguments, env=self._environment(), seconds=seconds
        )

    def apply(self, manifest: Manifest, namespace: str | None = None) -> None:
        """Applies one object, several, or YAML text."""
        items = [manifest] if isinstance(manifest, str | dict) else manifest
        documents = (item if isinstance(item, str) else json.dumps(item) for item in items)
        place = [] if namespace is None else [f"--namespace={namespace}"]
        self.kubectl("apply", "--server-side", "--force-conflicts", *place, "-f", "-", given="\n---\n".join(documents))

    def get(self, kind: str, name: str, namespace: str = DEFAULT_NAMESPACE) -> Object:
        found: Object = json.loads(self.kubectl("get", kind, name, f"--namespace={namespace}", "-o", "json"))
        return found

    def list(self, kind: str, namespace: str = DEFAULT_NAMESPACE, selector: str = "") -> Objects:
        """Objects of a namespace that match a label selector."""
        place = (f"--namespace={namespace}", f"--selector={selector}")
        found: Objects = json.loads(self.kubectl("get", kind, *place, "-o", "json"))["items"]
        return found

    def exists(self, kind: str, name: str, namespace: str = DEFAULT_NAMESPACE) -> bool:
        return bool(self.kubectl("get", kind, name, f"--namespace={namespace}", "--ignore-not-found", "-o", "name"))

    def patch(
        self, kind: str, name: str, change: Object, namespace: str = DEFAULT_NAMESPACE, *, subresource: str = ""
    ) -> None:
        """Applies a merge patch."""
        part = [f"--subresource={subresource}"] if subresource else []
        place = [kind, name, f"--namespace={namespace}", *part]
        self.kubectl("patch", *place, "--type=merge", "-p", json.dumps(change))

    def delete(self, kind: str, name: str, namespace: str = DEFAULT_NAMESPACE, *, wait: bool = True) -> None:
        self.kubectl(
            "delete", kind, name, f"--namespace={namespace}", "--ignore-not-found", f"--wait={json.dumps(wait)}"
        )

    def logs(self, pod: str, namespace: str = DEFAULT_NAMESPACE, *, container: str = "", previous: bool = False) -> str:
        more = [f"--container={container}"] if container else []
        return self.kubectl("logs", pod, f"--namespace={namespace}", f"--previous={json.dumps(previous)}", *more)

    @contextmanager
    def following(self, pod: str, namespace: str, container: str) -> Generator[Path]:
        """A file that follows a container's log until it ends, also after its pod is gone."""
        command = self._kubectl(["logs", "--follow", pod, f"--namespace={namespace}", f"--container={container}"])
        path = self.cache / f"{namespace}-{pod}.log"
        with (
            path.open("wb") as output,
            subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **self._environment()}
            ) as process,
        ):
            try:
                yield path
            finally:
                process.terminate()

    def exec(self, pod: str, *command: str, namespace: str = DEFAULT_NAMESPACE, container: str = "") -> str:
        """Runs a command in a container; returns its output."""
        more = [f"--container={container}"] if container else []
        return self.kubectl("exec", pod, f"--namespace={namespace}", *more, "--", *command)

    # --- waiting

    def watch(
        self, kind: str, namespace: str = DEFAULT_NAMESPACE, *, name: str = "", selector: str = "", seconds: float
    ) -> Iterator[tuple[str, Object]]:
        """Events of a collection from now on, starting with the existing objects as ADDED; ends after a time.

        After an outage of the API server it continues, starting again with the existing objects.
        """
        deadline = time.monotonic() + seconds
        narrowed = [f"--selector={selector}", *([f"--field-selector=metadata.name={name}"] if name else [])]
        arguments = [
            "get",
            kind,
            f"--namespace={namespace}",
            *narrowed,
            "--watch",
            "--output-watch-events",
            "-o",
            "json",
        ]
        while time.monotonic() < deadline:
            for event in _events(self._kubectl(arguments), self._environment(), deadline):
                if event["type"] == "ERROR":  # such as a lost connection; its object is a Status
                    break
                yield event["type"], event["object"]

    def wait_for(
        self,
        kind: str,
        name: str,
        condition: Callable[[Object], object],
        namespace: str = DEFAULT_NAMESPACE,
        *,
        seconds: float = WAIT_SECONDS,
    ) -> Object:
        """Waits until a condition holds for an object, which need not exist yet; returns the object.

        Raises:
            TimeoutError: It did not hold in time; the message has the object's last state, a note that of its
                namespace.
        """
        last: Object | None = None
        for event, found in self.watch(kind, namespace, name=name, seconds=seconds):
            last = None if event == "DELETED" else found
            if last is not None and condition(last):
                return last
        state = (
            json.dumps(last.get("status"), indent=1)
            if last
            else self._output_of("get", kind, name, f"--namespace={namespace}")
        )
        error = TimeoutError(f"{kind} {name}: the condition does not hold after {seconds:.0f} s: {state}")
        error.add_note(self.describe(namespace))
        raise error

    def wait_ready(self, pod: str, namespace: str = DEFAULT_NAMESPACE, *, seconds: float = WAIT_SECONDS) -> Object:
        """Waits until a pod is ready; returns it."""
        return self.wait_for("pod", pod, lambda found: has_condition(found, "Ready"), namespace, seconds=seconds)

    def wait_ended(self, pod: str, namespace: str = DEFAULT_NAMESPACE, *, seconds: float = WAIT_SECONDS) -> Object:
        """Waits until a pod has succeeded or failed; returns it."""
        phases = ("Succeeded", "Failed")
        return self.wait_for(
            "pod", pod, lambda found: found["status"].get("phase") in phases, namespace, seconds=seconds
        )

    def wait_gone(
        self, kind: str, name: str, namespace: str = DEFAULT_NAMESPACE, *, seconds: float = WAIT_SECONDS
    ) -> None:
        limit = f"--timeout={seconds:.0f}s"
        self.kubectl("wait", "--for=delete", f"{kind}/{name}", f"--namespace={namespace}", limit, seconds=seconds + 10)

    def describe(self, namespace: str) -> str:
        """A description of a namespace for debugging: objects, events and logs."""
        parts = [
            self._output_of("get", "all,pvc", "-o", "wide", f"--namespace={namespace}"),
            self._output_of("get", "events", "--sort-by=.lastTimestamp", f"--namespace={namespace}"),
        ]
        with suppress(CommandFailed):
            for pod in self.list("pods", namespace):
                name = pod["metadata"]["name"]
                place = (name, f"--namespace={namespace}", "--all-containers", "--prefix", f"--tail={LOG_LINES}")
                parts += [f"--- {name}", self._output_of("logs", *place)]
        return "\n".join(parts)

    # --- namespaces and volumes

    @contextmanager
    def namespace(self, prefix: str = "test") -> Generator[str]:
        """A namespace whose pods have the checkout mounted. Its deletion is not waited for."""
        name = f"{prefix}-{uuid4().hex[:6]}"
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {objects.LABEL: "true"}}}
        self.apply(made)
        try:
            self.wait_for("serviceaccount", "default", lambda _: True, name)
            yield name
        finally:
            self.delete("namespace", name, wait=False)

    def renew_volumes(self) -> None:
        """Empties released volumes and makes them available again, which no controller does for a hostPath."""
        listed = self.list("persistentvolumes")
        used = [item["metadata"]["name"] for item in listed if item["status"].get("phase") in {"Released", "Failed"}]
        for name in used:
            self.delete("persistentvolume", name)
        if used:
            self.apply([objects.volume(self.node.layout, name) for name in used])

    # --- on request

    def mount(self, folders: Sequence[Path]) -> None:
        """Has the pods that are created from now on see further folders of this machine."""
        self.apply(objects.injection(self.node.layout, *folders))
        probe = json.dumps(objects.probe(DEFAULT_NAMESPACE))

        def is_mounted() -> bool:
            pod = json.loads(self.kubectl("create", "--dry-run=server", "--output=json", "-f", "-", given=probe))
            paths = {mount["mountPath"] for mount in pod["spec"]["containers"][0].get("volumeMounts", ())}
            return paths.issuperset(map(str, folders))

        eventually("the folders are mounted", is_mounted, WAIT_SECONDS)

    def enforce_network_policies(self) -> None:
        """Enforces NetworkPolicies from now on."""
        node = self.node
        if not node.runs().get(POLICIES, False):
            layout, before = node.layout, node.log(POLICIES)
            module = "tests.e2e.cluster.policies"
            node.start(POLICIES, _python(node, module, layout.server, str(layout.certificates)))
            eventually("policies are enforced", lambda: node.log(POLICIES) != before, WAIT_SECONDS)

    def ignore_network_policies(self) -> None:
        """Stops enforcing NetworkPolicies.

        Raises:
            RuntimeError: They were no longer enforced.
        """
        runs = self.node.runs().get(POLICIES)
        if runs is not None:
            self.node.forget(POLICIES)
        if runs is False:
            raise RuntimeError(f"policies were not enforced to the end: {self.node.log(POLICIES)[-2000:]}")

    def add_devices(self, *resources: devices.Resource) -> None:
        """Replaces the node's fake devices; returns when the node reports them."""
        self.remove_devices()
        self.node.start(DEVICES, _python(self.node, "tests.e2e.cluster.devices", *map(str, resources)))
        wanted = {resource.name: str(resource.count) for resource in resources}

        def has_them(node: Object) -> bool:
            offered: dict[str, str] = node["status"].get("allocatable", {})
            return wanted.items() <= offered.items()

        self.wait_for("node", NODE_NAME, has_them)

    def remove_devices(self) -> None:
        """Removes the fake devices. The node keeps the name of such a resource, with an amount of 0."""
        if DEVICES in self.node.runs():
            self.node.forget(DEVICES)

    @contextmanager
    def fake_nodes(self, count: int) -> Generator[Names]:
        """Ready nodes that exist only in the API; their pods run at once.

        If there is a real node too, pods need a toleration of `kwok.ANNOTATION` to be scheduled there.
        """
        layout = self.node.layout
        made = [kwok.fake_node(index, tainted=not layout.control_plane_only) for index in range(count)]
        self.node.start(KWOK, kwok.command_line(layout, self.node.state.kit))
        try:
            self.apply(made)
            names = [node["metadata"]["name"] for node in made]
            self.kubectl("wait", "--for=condition=Ready", "node", "--selector=type=kwok", "--timeout=60s", seconds=70)
            yield names
        finally:
            self.kubectl("delete", "node", "--selector=type=kwok")
            self.node.forget(KWOK)

    def _kubectl(self, arguments: Sequence[str]) -> Names:
        return [self.kubectl_program, f"--kubeconfig={self.kubeconfig}", *arguments]

    def _environment(self) -> dict[str, str]:
        homes = {f"HELM_{name}_HOME": str(self.cache / "helm" / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
        return {"KUBECACHEDIR": str(self.cache / "kube"), **homes}

    def _output_of(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)
        except CommandFailed as error:
            return str(error)


def has_condition(found: Object, kind: str, status: str = "True") -> bool:
    """Whether an object's status has a condition."""
    conditions = found.get("status", {}).get("conditions", [])
    return any(item["type"] == kind and item["status"] == status for item in conditions)


def _python(node: Node, module: str, *arguments: str) -> list[str]:
    return [str(node.layout.environment / "bin" / "python"), "-m", module, *arguments]


def _events(command: list[str], env: Mapping[str, str], deadline: float) -> Iterator[Object]:
    """The JSON documents written by a program, until it ends or the time is over."""
    decoder, letters, text = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")(), ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **env},
    ) as process:
        assert process.stdout is not None
        try:
            while (left := deadline - time.monotonic()) > 0:
                if not select.select([process.stdout], [], [], left)[0]:
                    return
                read = os.read(process.stdout.fileno(), READ_BYTES)
                if not read:
                    return
                text += letters.decode(read)
                while text.strip():
                    try:
                        document, end = decoder.raw_decode(text.lstrip())
                    except json.JSONDecodeError:
                        break  # the rest of the document is not read yet
                    text = text.lstrip()[end:]
                    yield document
        finally:
            process.kill()
