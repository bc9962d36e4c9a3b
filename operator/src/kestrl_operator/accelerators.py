"""Accelerators by profile: what a pod must say to get devices of a kind, as data that Helm values can add to. Pure.

NVIDIA's names are those of k8s-device-plugin 0.20 and gpu-operator 26.7; Ascend has two families of them, mind-cluster's and Huawei
Cloud CCE's, so that the resource's name is never assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from kestrl.errors import UserInputError
from kestrl.plan.settings import Model

NO_DEVICES = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""For pods that ask for none: a CUDA image without a request may otherwise see every GPU of its node."""


class Toleration(Model):
    """A taint that pods of the profile bear."""

    key: str
    operator: str = "Exists"
    effect: str = "NoSchedule"
    value: str | None = None


class HostMount(Model):
    """A path of the node that the devices' libraries are in. Pod Security "restricted" forbids it: an exception to be documented."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True)

    path: str
    read_only: bool = True


class Profile(Model):
    """One kind of device."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True)

    resource: str | None = None
    """The extended resource that is asked for, such as nvidia.com/gpu or nvidia.com/mig-1g.10gb; None asks for none."""
    image: Literal["cpu", "cuda", "npu"]
    """Which build of engine and learner."""
    env: Mapping[str, str] = {}
    env_from_annotation: Mapping[str, str] = {}
    """Variables whose value a device plugin writes into an annotation of the pod."""
    tolerations: tuple[Toleration, ...] = ()
    node_selector: Mapping[str, str] = {}
    runtime_class: str | None = None
    scheduler: str | None = None
    labels: Mapping[str, str] = {}
    host_mounts: tuple[HostMount, ...] = ()
    scale_out: bool = True
    """Whether the engine's token routes are opened by a flag, as since vLLM 0.30; before they were open and knew no such flag."""
    spare_slots: int = 0
    """Adapter slots beyond those that live versions need. vLLM before 0.27 may swap an adapter under a running request when a load
    evicts one in use (vllm#47724): with a spare slot no load ever evicts."""

    def requests(self, count: int) -> dict[str, str]:
        """What a container asks for; limits and requests are the same for extended resources."""
        return {} if self.resource is None else {self.resource: str(count)}

    def environment(self) -> list[dict[str, Any]]:
        """The container's variables."""
        if self.resource is None:
            return [{"name": name, "value": value} for name, value in {**NO_DEVICES, **self.env}.items()]
        plain = [{"name": name, "value": value} for name, value in self.env.items()]
        told = [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}}
            for name, annotation in self.env_from_annotation.items()
        ]
        return [*plain, *told]


def _ascend(resource: str, **more: Any) -> Profile:
    """Of vllm-ascend 0.23, which is vLLM 0.23: its device plugin sets ASCEND_VISIBLE_DEVICES, unless Volcano schedules."""
    return Profile(
        resource=resource,
        image="npu",
        tolerations=(Toleration(key=resource),),
        host_mounts=(HostMount(path="/usr/local/Ascend/driver"), HostMount(path="/etc/hccn.conf")),
        scale_out=False,
        spare_slots=1,
        **more,
    )


BUILT_IN: Mapping[str, Profile] = {
    "cpu": Profile(image="cpu"),
    "nvidia": Profile(resource="nvidia.com/gpu", image="cuda", tolerations=(Toleration(key="nvidia.com/gpu"),)),
    "ascend": _ascend("huawei.com/Ascend910"),
    "ascend-volcano": _ascend(
        "huawei.com/Ascend910",
        scheduler="volcano",
        labels={"ring-controller.atlas": "ascend-910b"},
        env_from_annotation={"ASCEND_VISIBLE_DEVICES": "huawei.com/Ascend910"},
    ),
    "ascend-cce": _ascend("huawei.com/ascend-1980"),
}
"""`ascend` speaks mind-cluster's names, `ascend-volcano` too where Volcano gives out the devices and writes which in an annotation;
`ascend-cce` speaks those of Huawei Cloud."""


def profiles(values: Mapping[str, Any]) -> dict[str, Profile]:
    """The built-in profiles with the chart's `accelerators` over them: a profile of the same name is changed, another is added.

    Raises:
        UserInputError: A value is not one a profile has; the message names it.
    """
    known = dict(BUILT_IN)
    for name, changes in values.items():
        base = known[name].model_dump(by_alias=True) if name in known else {}
        try:
            known[name] = Profile.model_validate({**base, **changes})
        except (ValidationError, TypeError) as error:
            raise UserInputError(f"accelerators.{name}: {_told(error)}") from error
    return known


def _told(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return "must be a map"
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What is known of a node, as its object tells."""

    name: str
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]
    allocatable: Mapping[str, str]
    schedulable: bool = True


def unsatisfiable(profile: Profile, count: int, nodes: Sequence[Node]) -> str:
    """Why no pod of the profile can ever be scheduled on these nodes, whatever runs there now; empty when one could be.

    Args:
        profile: What the pod says.
        count: Devices of one pod.
        nodes: All nodes of the cluster.
    """
    if profile.resource is None:
        return ""
    selected = [node for node in nodes if profile.node_selector.items() <= node.labels.items()]
    if not selected:
        wanted = ", ".join(f"{name}={value}" for name, value in sorted(profile.node_selector.items()))
        return f"no node has the labels {wanted}" if wanted else "the cluster has no node"
    borne = [node for node in selected if all(_bears(profile, taint) for taint in node.taints)]
    if not borne:
        return f"every node that fits has a taint that the profile does not tolerate ({_taints(selected)})"
    most = max((quantity(node.allocatable.get(profile.resource, "0")) for node in borne), default=Fraction(0))
    if most == 0:
        offered = sorted(
            {name for node in nodes for name, amount in node.allocatable.items() if "/" in name and quantity(amount)}
        )
        return f"no node offers {profile.resource} (extended resources there are: {', '.join(offered) or 'none'})"
    if most < count:
        return f"no node has {count} of {profile.resource}; the most on one is {int(most)}"
    return ""


def _bears(profile: Profile, taint: Mapping[str, str]) -> bool:
    if taint.get("effect") == "PreferNoSchedule":
        return True
    return any(
        toleration.key == taint.get("key")
        and toleration.effect in {"", taint.get("effect")}
        and (toleration.operator == "Exists" or toleration.value == taint.get("value"))
        for toleration in profile.tolerations
    )


def _taints(nodes: Sequence[Node]) -> str:
    return ", ".join(sorted({f"{taint.get('key')}:{taint.get('effect')}" for node in nodes for taint in node.taints}))


_SUFFIXES = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": 1,
             "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
             "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}  # fmt: skip


def quantity(text: str) -> Fraction:
    """A Kubernetes quantity such as `8`, `500m` or `16Gi`.

    Raises:
        ValueError: It is not one.
    """
    number = text.rstrip("numkKMGTPEi")
    suffix = text[len(number) :]
    if suffix not in _SUFFIXES:
        raise ValueError(f"{text!r} is no quantity")
    return Fraction(number) * _SUFFIXES[suffix]
