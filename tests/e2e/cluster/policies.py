"""Enforces NetworkPolicy in the node with nftables: `python -m tests.e2e.cluster.policies SERVER CERTIFICATES`.

The pods' bridge does not enforce policies. This program runs in the node's network namespace, watches pods, namespaces
and policies, and swaps one table at every change. Traffic from a pod to its own node (DNS and the API at the node's
address) is filtered as well; traffic from the node to a pod (probes) is not, and established connections are not cut. A
new pod is covered once its address is in the API.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .api import Api, Object, Refused, Unreachable

PODS = "/api/v1/pods"
NAMESPACES = "/api/v1/namespaces"
POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
TABLE = "kestrl_e2e"
NOTHING = f"table inet {TABLE}\ndelete table inet {TABLE}\n"
"""Removes the table, whether there was one or not."""
WATCH_SECONDS = 300
RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Direction:
    """The fields of policies and packets for one direction."""

    chain: str
    field: str
    """The policy's field with the rules."""
    peers: str
    """The rule's field with the peers."""
    own: str
    """The packet's address that is the pod's."""
    other: str


DIRECTIONS = {
    "Ingress": Direction("to_pods", "ingress", "from", "daddr", "saddr"),
    "Egress": Direction("from_pods", "egress", "to", "saddr", "daddr"),
}


@dataclass(frozen=True, slots=True)
class Pod:
    """The properties of a pod that rules use."""

    address: str
    namespace: str
    labels: Mapping[str, str]
    ports: Mapping[tuple[str, str], int]
    """Port numbers by name and protocol."""


@dataclass(frozen=True, slots=True, order=True)
class Peers:
    """Addresses, with exceptions."""

    block: str
    excepted: tuple[str, ...] = ()


@dataclass
class Rules:
    """Rules of one direction."""

    isolated: set[str] = field(default_factory=set[str])
    """Addresses of pods that a policy selects: only what is allowed reaches or leaves them."""
    allowed: set[str] = field(default_factory=set[str])


def pods_of(objects: Iterable[Object]) -> list[Pod]:
    """Running pods with an address of their own."""
    found: list[Pod] = []
    for item in objects:
        spec, status = item["spec"], item.get("status", {})
        if status.get("podIP") and not spec.get("hostNetwork") and status.get("phase") in {"Running", "Pending"}:
            ports = {
                (port["name"], port.get("protocol", "TCP")): port["containerPort"]
                for container in (*spec["containers"], *spec.get("initContainers", ()))
                for port in container.get("ports", ())
                if "name" in port
            }
            meta = item["metadata"]
            found.append(Pod(status["podIP"], meta["namespace"], meta.get("labels") or {}, ports))
    return found


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches these labels; an empty one matches all."""
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    expressions: Sequence[Mapping[str, Any]] = selector.get("matchExpressions") or ()
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(expression, labels) for expression in expressions
    )


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None


def ruleset(pods: Sequence[Pod], namespaces: Mapping[str, Mapping[str, str]], policies: Iterable[Object]) -> str:
    """The whole table, for `nft -f`."""
    rules = {direction: Rules() for direction in DIRECTIONS}
    for policy in policies:
        namespace, spec = policy["metadata"]["namespace"], policy["spec"]
        for pod in pods:
            if pod.namespace == namespace and selects(spec.get("podSelector") or {}, pod.labels):
                for name in spec["policyTypes"]:  # the API sets defaults
                    rules[name].isolated.add(pod.address)
                    for rule in spec.get(DIRECTIONS[name].field) or ():
                        rules[name].allowed |= set(_lines(DIRECTIONS[name], rule, pod, namespace, pods, namespaces))
    chains = [
        f"chain {DIRECTIONS[name].chain} {{ {'; '.join((*sorted(of.allowed), 'drop'))}; }}"
        for name, of in rules.items()
    ]
    # A pod's egress is filtered first: its policy's `return` leads on to the other pod's ingress.
    jumps = [
        f"ip {DIRECTIONS[name].own} {{ {', '.join(sorted(of.isolated))} }} jump {DIRECTIONS[name].chain}"
        for name, of in reversed(rules.items())
        if of.isolated
    ]
    standing = "ct state established,related accept"
    forward = ["type filter hook forward priority -5", standing, *jumps]
    sent = [jump for jump in jumps if DIRECTIONS["Egress"].chain in jump]
    to_the_node = ["type filter hook input priority -5", standing, *sent]
    hooks = (f"chain forwarded {{ {'; '.join(forward)}; }}", f"chain taken_in {{ {'; '.join(to_the_node)}; }}")
    body = "\n".join((*chains, *hooks))
    return f"{NOTHING}table inet {TABLE} {{\n{body}\n}}\n"


def _lines(
    direction: Direction,
    rule: Mapping[str, Any],
    pod: Pod,
    namespace: str,
    pods: Sequence[Pod],
    namespaces: Mapping[str, Mapping[str, str]],
) -> Iterator[str]:
    """The nftables rules of one rule of a policy for a pod."""
    listed: Sequence[Mapping[str, Any]] = rule.get(direction.peers) or ()
    other = direction.other
    if listed:
        peers = sorted({found for peer in listed for found in _peers(peer, namespace, pods, namespaces)})
        sources = [
            f"ip {other} {found.block} "
            + (f"ip {other} != {{ {', '.join(found.excepted)} }} " if found.excepted else "")
            for found in peers
        ]
    else:
        sources = [""]
    for source in sources:
        for port in _ports(rule, [pod] if direction.own == "daddr" else pods):
            yield f"ip {direction.own} {pod.address} {source}{port}return"


def _peers(
    peer: Mapping[str, Any], namespace: str, pods: Sequence[Pod], namespaces: Mapping[str, Mapping[str, str]]
) -> Iterator[Peers]:
    if "ipBlock" in peer:
        block: Mapping[str, Any] = peer["ipBlock"]
        if ":" not in block["cidr"]:  # the cluster has no addresses of version 6
            yield Peers(block["cidr"], tuple(block.get("except") or ()))
        return
    for pod in pods:
        if "namespaceSelector" in peer:
            inside = selects(peer["namespaceSelector"], namespaces.get(pod.namespace, {}))
        else:
            inside = pod.namespace == namespace
        if inside and selects(peer.get("podSelector") or {}, pod.labels):
            yield Peers(pod.address)


def _ports(rule: Mapping[str, Any], servers: Sequence[Pod]) -> Iterator[str]:
    """The ports of a rule; named ones are resolved by the pods that serve them."""
    listed: Sequence[Mapping[str, Any]] = rule.get("ports") or ()
    if not listed:
        yield ""
    for port in listed:
        protocol, number = port.get("protocol", "TCP"), port.get("port")
        if number is None:
            yield f"meta l4proto {protocol.lower()} "
        elif isinstance(number, str):
            named = {pod.ports[number, protocol] for pod in servers if (number, protocol) in pod.ports}
            yield from (f"{protocol.lower()} dport {found} " for found in sorted(named))
        else:
            upto = f"-{port['endPort']}" if "endPort" in port else ""
            yield f"{protocol.lower()} dport {number}{upto} "


class Mirror(threading.Thread):
    """Mirrors the objects of a collection, and signals changes."""

    def __init__(self, api: Api, path: str, changed: queue.SimpleQueue[str]) -> None:
        super().__init__(name=path, daemon=True)
        self._api, self._path, self._changed = api, path, changed
        self.objects: dict[str, Object] | None = None
        """Objects by uid; None until they were listed."""

    def run(self) -> None:
        while True:
            try:
                self._follow()
            except (*Unreachable, Refused) as error:
                say(f"{self._path}: {error}")
                time.sleep(RETRY_SECONDS)  # there is no event for the server's return

    def _follow(self) -> None:
        listed = self._api.get(self._path)
        self.objects = {item["metadata"]["uid"]: item for item in listed["items"]}
        self._changed.put(self._path)
        for kind, item in self._api.watch(self._path, listed["metadata"]["resourceVersion"], WATCH_SECONDS):
            if kind == "ERROR":
                return  # the version is too old: list again
            objects = dict(self.objects)
            if kind == "DELETED":
                objects.pop(item["metadata"]["uid"], None)
            else:
                objects[item["metadata"]["uid"]] = item
            self.objects = objects
            self._changed.put(self._path)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def install(table: str) -> None:
    """Swaps the table atomically."""
    subprocess.run(["nft", "-f", "-"], input=table, text=True, check=True)


def enforce(api: Api) -> None:
    """Installs the current table at every change; never returns."""
    changed: queue.SimpleQueue[str] = queue.SimpleQueue()
    mirrors = {path: Mirror(api, path, changed) for path in (PODS, NAMESPACES, POLICIES)}
    for mirror in mirrors.values():
        mirror.start()
    last = ""
    while True:
        changed.get()
        while not changed.empty():
            changed.get()
        pods, namespaces, policies = (mirror.objects for mirror in mirrors.values())
        if pods is None or namespaces is None or policies is None:
            continue
        labels: dict[str, dict[str, str]] = {
            item["metadata"]["name"]: item["metadata"].get("labels") or {} for item in namespaces.values()
        }
        table = ruleset(pods_of(pods.values()), labels, policies.values())
        if table != last:
            install(table)
            say(f"{len(policies)} policies, {table.count('return')} rules")
            last = table


def leave(_number: int, _frame: object) -> None:
    sys.exit()


def main() -> None:
    server, certificates = sys.argv[1:]
    signal.signal(signal.SIGTERM, leave)
    try:
        enforce(Api(server, Path(certificates)))
    finally:
        install(NOTHING)


if __name__ == "__main__":
    main()
