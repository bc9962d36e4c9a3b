"""Accelerator profiles: what a pod needs to get devices of a kind, as data that Helm values can extend. Pure.

NVIDIA's names are those of k8s-device-plugin 0.20 and gpu-operator 26.7. Ascend has two sets of names, mind-cluster's
and Huawei Cloud CCE's, so the resource name is always part of the profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from kestrl._shared.plan.settings.common import SettingsModel
from kestrl.errors import UserInputError

NO_DEVICES = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Variables of containers without devices: a CUDA image could otherwise see every GPU of its node."""
BUILD = "^(cpu|cuda|npu)(-[a-z0-9.]+)*$"
Quantity = int | str
HostPathType = Literal["Directory", "File", "Socket", "CharDevice", "BlockDevice"]


class Toleration(SettingsModel):
    """A taint that pods of the profile tolerate."""

    key: str
    operator: str = "Exists"
    effect: str = "NoSchedule"
    value: str | None = None


class _Part(SettingsModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True)


class HostMount(_Part):
    """A path of the node with the libraries of the devices. Pod Security "restricted" forbids it; docs/accelerators.md
    documents the exception.
    """

    path: str
    read_only: bool = True
    type: HostPathType | None = None
    """What must be there, such as File or Directory. Without it, a container runtime makes an empty directory of a path
    that does not exist, and a driver that is elsewhere is missed in a running pod."""


class PodSecurity(_Part):
    """User and groups of the pods' processes, where they differ from those of all other pods."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    supplemental_groups: tuple[int, ...] = ()
    """Such as the group of the device files."""

    def changes(self) -> dict[str, Any]:
        """The changed fields of a pod's security context."""
        fields: dict[str, Any] = self.model_dump(by_alias=True, exclude_none=True, exclude={"supplemental_groups"})
        if self.run_as_user == 0:
            fields["runAsNonRoot"] = False
        return {**fields, "supplementalGroups": list(self.supplemental_groups)} if self.supplemental_groups else fields


class AcrossNodes(_Part):
    """What the pods of a learner of several pods have in addition: how their ranks reach each other."""

    env: Mapping[str, str] = {}
    """Such as the interface of NCCL."""
    more_resources: Mapping[str, Quantity] = {}
    """Such as one RDMA device of a device plugin."""
    capabilities: tuple[str, ...] = ()
    """Such as IPC_LOCK, for memory that RDMA pins."""
    host_mounts: tuple[HostMount, ...] = ()


class Profile(_Part):
    """One kind of device."""

    resource: str | None = None
    """The extended resource to request, such as nvidia.com/gpu or nvidia.com/mig-1g.10gb; None requests none."""
    image: Annotated[str, Field(pattern=BUILD)]
    """The build of engine and learner: cpu, cuda or npu, or one of these for a chip, such as npu-a3."""
    env: Mapping[str, str] = {}
    env_from_annotation: Mapping[str, str] = {}
    """Variables whose value a device plugin writes into an annotation of the pod."""
    more_resources: Mapping[str, Quantity] = {}
    """Further extended resources of engine and learner."""
    capabilities: tuple[str, ...] = ()
    """Capabilities of engine and learner. Pod Security "baseline" forbids most."""
    pod_security: PodSecurity = PodSecurity()
    entrypoint: tuple[str, ...] = ()
    """A program with arguments that prepares the environment, and then executes its last arguments: engine and learner
    are started by it."""
    tolerations: tuple[Toleration, ...] = ()
    node_selector: Mapping[str, str] = {}
    topology_keys: tuple[str, ...] = ()
    """Labels of nodes by which the pods of a job with devices are brought near each other where they fit, the most
    wanted first."""
    runtime_class: str | None = None
    scheduler: str | None = None
    labels: Mapping[str, str] = {}
    host_mounts: tuple[HostMount, ...] = ()
    across_nodes: AcrossNodes = AcrossNodes()

    @property
    def device(self) -> str:
        """Name of the devices in torch: cpu, cuda or npu."""
        return self.image.partition("-")[0]

    def of_several_pods(self) -> Profile:
        """The profile of a learner whose ranks are in several pods."""
        additions = self.across_nodes
        return self.model_copy(
            update={
                "env": {**self.env, **additions.env},
                "more_resources": {**self.more_resources, **additions.more_resources},
                "capabilities": (*self.capabilities, *additions.capabilities),
                "host_mounts": (*self.host_mounts, *additions.host_mounts),
            }
        )

    def requests(self, count: int) -> dict[str, str]:
        """The resources that a container requests; limits and requests are the same for extended resources."""
        further_resources = {name: str(amount) for name, amount in self.more_resources.items()}
        return {} if self.resource is None else {self.resource: str(count), **further_resources}

    def environment(self) -> list[dict[str, Any]]:
        """The environment variables of the container."""
        if self.resource is None:
            return [{"name": name, "value": value} for name, value in {**NO_DEVICES, **self.env}.items()]
        plain = [{"name": name, "value": value} for name, value in self.env.items()]
        from_annotations = [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}}
            for name, annotation in self.env_from_annotation.items()
        ]
        return [*plain, *from_annotations]


CANN = "/usr/local/Ascend"
"""Folder of driver and CANN, on nodes and in images."""
CANN_ENVIRONMENT = (
    f'load() {{ file=$1; shift; . "$file"; }}; for script in {CANN}/ascend-toolkit/set_env.sh '
    f"{CANN}/cann*/set_env.sh {CANN}/cann*/share/info/ascendnpu-ir/bin/set_env.sh {CANN}/nnal/atb/set_env.sh; "
    'do if [ -r "$script" ]; then load "$script"; fi; done; exec "$@"'
)
"""What the entry points of CANN's images do, which a pod's `command` replaces: libraries and compilers are found by
these variables."""
ASCEND_MOUNTS = (
    HostMount(path=f"{CANN}/driver", type="Directory"),
    HostMount(path="/usr/local/dcmi", type="Directory"),
    HostMount(path="/usr/local/bin/npu-smi", type="File"),
    HostMount(path="/etc/ascend_install.info", type="File"),
)
DEVICE_GROUP = 1000
"""Group of the device files: HwHiAiUser of the driver's installation."""
NODE = "kubernetes.io/hostname"
FIRST_INTERFACE = "eth0"
"""The interface of a pod's own address, as the kubelet has network plugins name it."""


def _ascend(resource: str, *, image: str = "npu", **fields: Any) -> Profile:
    """A profile for vllm-ascend 0.23 (vLLM 0.23). Its device plugin sets ASCEND_VISIBLE_DEVICES, unless Volcano
    schedules.
    """
    return Profile(
        resource=resource,
        image=image,
        tolerations=(Toleration(key=resource),),
        topology_keys=(NODE,),
        pod_security=PodSecurity(supplemental_groups=(DEVICE_GROUP,)),
        entrypoint=("/bin/bash", "-c", CANN_ENVIRONMENT, "cann"),
        host_mounts=ASCEND_MOUNTS,
        across_nodes=AcrossNodes(
            env={"HCCL_SOCKET_IFNAME": FIRST_INTERFACE}, host_mounts=(HostMount(path="/etc/hccn.conf", type="File"),)
        ),
        **fields,
    )


BUILT_IN: Mapping[str, Profile] = {
    "cpu": Profile(image="cpu"),
    "nvidia": Profile(
        resource="nvidia.com/gpu",
        image="cuda",
        tolerations=(Toleration(key="nvidia.com/gpu"),),
        topology_keys=(NODE,),
        across_nodes=AcrossNodes(env={"NCCL_SOCKET_IFNAME": FIRST_INTERFACE}),
    ),
    "ascend": _ascend("huawei.com/Ascend910"),
    "ascend-a2": _ascend("huawei.com/Ascend910"),
    "ascend-a3": _ascend("huawei.com/Ascend910", image="npu-a3"),
    "ascend-volcano": _ascend(
        "huawei.com/Ascend910",
        scheduler="volcano",
        labels={"ring-controller.atlas": "ascend-910b"},
        env_from_annotation={"ASCEND_VISIBLE_DEVICES": "huawei.com/Ascend910"},
    ),
    "ascend-cce": _ascend("huawei.com/ascend-1980"),
}
"""The built-in profiles. `ascend-a2` and `ascend-a3` use mind-cluster's names, `ascend` is the former under its name on
one machine, and so does `ascend-volcano`, for clusters where Volcano
assigns the devices and writes them into an annotation; `ascend-cce` uses those of Huawei Cloud."""


def profiles(values: Mapping[str, Any]) -> dict[str, Profile]:
    """The built-in profiles, changed and extended by the chart's `accelerators`.

    Raises:
        UserInputError: A value is invalid; the message names it.
    """
    by_name = dict(BUILT_IN)
    for name, changes in values.items():
        base = by_name[name].model_dump(by_alias=True) if name in by_name else {}
        try:
            by_name[name] = Profile.model_validate({**base, **changes})
        except (ValidationError, TypeError) as error:
            raise UserInputError(f"accelerators.{name}: {_details(error)}") from error
    return by_name


def _details(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return "must be a map"
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())


class Placement(NamedTuple):
    """The nodes that Kueue wants the pods of a role on, and what marks the pods as those that these nodes are for."""

    node_selector: Mapping[str, str]
    tolerations: Sequence[Mapping[str, Any]]
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    """Such as the ProvisioningRequest by which an autoscaler has made the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The properties of a node that affect scheduling."""

    name: str
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, str]]
    allocatable: Mapping[str, str]
    schedulable: bool = True
    lost: str = ""
    """Why it is not ready, as Kubernetes says; empty if it is."""


def unsatisfiable(profile: Profile, count: int, nodes: Sequence[Node]) -> str:
    """Why no pod of the profile can ever be scheduled on these nodes, whatever runs there now; empty when one could be.

    Args:
        profile: The profile of the pod.
        count: Devices per pod.
        nodes: All nodes of the cluster.
    """
    if profile.resource is None:
        return ""
    selected = [node for node in nodes if profile.node_selector.items() <= node.labels.items()]
    if not selected:
        labels = ", ".join(f"{name}={value}" for name, value in sorted(profile.node_selector.items()))
        return f"no node has the labels {labels}" if labels else "the cluster has no node"
    borne = [node for node in selected if all(_bears(profile, taint) for taint in node.taints)]
    if not borne:
        return f"every matching node has a taint that the profile does not tolerate ({_taints(selected)})"
    largest_count = max((quantity(node.allocatable.get(profile.resource, "0")) for node in borne), default=Fraction(0))
    if largest_count == 0:
        offered = sorted(
            {name for node in nodes for name, amount in node.allocatable.items() if "/" in name and quantity(amount)}
        )
        return f"no node offers {profile.resource} (available extended resources: {', '.join(offered) or 'none'})"
    if largest_count < count:
        return f"no node has {count} of {profile.resource}; the most on one is {int(largest_count)}"
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
        ValueError: The text is not a quantity.
    """
    number = text.rstrip("numkKMGTPEi")
    suffix = text[len(number) :]
    if suffix not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity")
    return Fraction(number) * _SUFFIXES[suffix]
