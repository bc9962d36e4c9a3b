"""Engines and learners on accelerators are given what their vendors' own run commands give a container, argument by
argument. The commands are those of vllm-ascend 0.23's installation page and of its recipes for Atlas A2 and A3."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.operator.rendering import of_kind, rendered

from kestrl_operator.state.accelerators import BUILT_IN

A2 = """
docker run --rm --name vllm-ascend --shm-size=1g
  --device /dev/davinci0
  --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc
  -v /usr/local/dcmi:/usr/local/dcmi
  -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi
  -v /usr/local/Ascend/driver/lib64/:/usr/local/Ascend/driver/lib64/
  -v /usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info
  -v /etc/ascend_install.info:/etc/ascend_install.info
  -v /root/.cache:/root/.cache
  -it quay.io/ascend/vllm-ascend:v0.23.0 bash
"""
A3 = """
docker run --rm --name vllm-ascend --net=host --privileged=true --shm-size=100g
  --device /dev/davinci0 --device /dev/davinci1
  --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc
  -v /usr/local/dcmi:/usr/local/dcmi
  -v /usr/local/Ascend/driver/tools/hccn_tool:/usr/local/Ascend/driver/tools/hccn_tool
  -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi
  -v /usr/local/Ascend/driver/lib64/:/usr/local/Ascend/driver/lib64/
  -v /usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info
  -v /etc/ascend_install.info:/etc/ascend_install.info
  -v /root/.cache:/root/.cache
  -it quay.io/ascend/vllm-ascend:v0.23.0-a3 bash
"""
SEVERAL_NODES = """
docker run --net=host --shm-size=100g
  --device /dev/davinci0 --device /dev/davinci1
  --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc
  -v /usr/local/dcmi:/usr/local/dcmi
  -v /usr/local/Ascend/driver:/usr/local/Ascend/driver
  -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi
  -v /etc/ascend_install.info:/etc/ascend_install.info
  -v /etc/hccn.conf:/etc/hccn.conf
  -it IMAGE bash
"""
NOT_A_POD = {
    "--rm": "the kubelet removes containers",
    "--name": "the pod has one",
    "-it": "nobody types into it",
    "--net=host": "pods have an address, which HCCL is bound to by HCCL_SOCKET_IFNAME",
    "--privileged=true": "the device plugin gives the devices, whose group the pod has",
    "/root/.cache": "the container prepare puts the model into the pod",
}
"""What a pod does not take from the commands, with the reason."""
MANAGERS = frozenset({"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"})
"""Devices that the device plugin adds to those of the resource."""
SCRIPTS = ("ascend-toolkit/set_env.sh", "ascendnpu-ir/bin/set_env.sh", "nnal/atb/set_env.sh")


def arguments(command: str) -> Iterator[tuple[str, str]]:
    """The options of a command with their values; the image is the last one, named `image`."""
    words = iter(shlex.split(command)[2:])
    for word in words:
        if word in {"--device", "-v", "--name"}:
            yield word, next(words)
        elif word.startswith("--shm-size="):
            yield "--shm-size", word.partition("=")[2]
        elif word.startswith("-"):
            yield word, ""
        else:
            yield "image", word
            return


def pod_of(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    return of_kind(objects, "StatefulSet")[f"email-search-{role}"]["spec"]["template"]["spec"]


def host_paths(pod: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
    """Types of the node's paths that a container has at the same path, read-only."""
    volumes = {volume["name"]: volume["hostPath"] for volume in pod["volumes"] if "hostPath" in volume}
    return {
        mount["mountPath"]: volumes[mount["name"]]["type"]
        for mount in container["volumeMounts"]
        if mount["name"] in volumes and mount["readOnly"] and volumes[mount["name"]]["path"] == mount["mountPath"]
    }


def unmet(command: str, pod: dict[str, Any], container: dict[str, Any]) -> list[str]:
    """Arguments of a command to which nothing in a pod corresponds."""
    paths, left = host_paths(pod, container), []
    devices = [value for option, value in arguments(command) if option == "--device" and value not in MANAGERS]
    limits = container["resources"]["limits"]
    if sum(int(amount) for name, amount in limits.items() if name.startswith("huawei.com/")) != len(devices):
        left.append(f"{len(devices)} devices, not {limits}")
    memory = {volume["name"] for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"}
    for option, value in arguments(command):
        path = value.partition(":")[0].rstrip("/")
        if option == "-v":
            met = path in NOT_A_POD or any(path == known or path.startswith(f"{known}/") for known in paths)
        elif option == "--device":
            met = value in MANAGERS or re.fullmatch(r"/dev/davinci\d+", value) is not None
        elif option == "--shm-size":
            met = any(item["mountPath"] == "/dev/shm" and item["name"] in memory for item in container["volumeMounts"])
        elif option == "image":
            met = value in {"IMAGE", container["image"]}
        else:
            met = option in NOT_A_POD
        if not met:
            left.append(f"{option} {value}".strip())
    return left


@pytest.mark.parametrize(
    ("profile", "count", "command"),
    [("ascend", 1, A2), ("ascend-a2", 1, A2), ("ascend-a3", 2, A3)],
)
def test_an_engine_has_what_vllm_ascend_gives_its_container(profile: str, count: int, command: str) -> None:
    pod = pod_of(rendered(f"inference.accelerator={{profile: {profile}, count: {count}}}"), "inference")
    engine = pod["containers"][0]
    assert unmet(command, pod, engine) == []
    assert unmet(command.replace("/usr/local/dcmi", "/opt/another"), pod, engine), "the comparison finds nothing"
    assert pod["securityContext"]["supplementalGroups"] == [1000], "the group of the device files"
    assert None not in host_paths(pod, engine).values(), "an absent driver would be an empty folder"
    agent = pod["containers"][1]
    assert host_paths(pod, agent) == {}
    assert agent["command"][:3] == ["catatonit", "--", "python"]


@pytest.mark.parametrize("role", ["learner", "ranks"])
def test_ranks_of_several_nodes_have_what_the_recipes_give(role: str) -> None:
    pod = pod_of(rendered("learner.accelerator={profile: ascend-a3, count: 2}", "learner.replicas=2"), role)
    learner = pod["containers"][0]
    assert unmet(SEVERAL_NODES, pod, learner) == []
    assert {"name": "HCCL_SOCKET_IFNAME", "value": "eth0"} in learner["env"]
    assert learner["image"] == "r/learner-npu-a3:1"


def test_engine_and_learner_have_the_variables_of_canns_entry_point() -> None:
    """A pod's command replaces an image's entry point: the same scripts are read before the program starts."""
    objects = rendered("inference.accelerator={profile: ascend}", "learner.accelerator={profile: ascend}")
    for role, module in (("inference", "kestrl_inference.inside.launcher"), ("learner", "kestrl_learner")):
        *init, shell, flag, script, name, python, option, program = pod_of(objects, role)["containers"][0]["command"]
        assert init == ["catatonit", "--"]
        assert (shell, flag, name) == ("/bin/bash", "-c", "cann")
        assert all(path in script for path in SCRIPTS)
        assert [python, option, program] == ["python", "-m", module]


def test_canns_scripts_are_read_and_the_program_is_executed_with_its_arguments(tmp_path: Path) -> None:
    for script, line in (
        ("ascend-toolkit/set_env.sh", "export TOOLKIT=$#"),
        ("cann-9.1.0/share/info/ascendnpu-ir/bin/set_env.sh", "export COMPILER=found"),
    ):
        path = tmp_path / script
        path.parent.mkdir(parents=True)
        path.write_text(line)
    shell, flag, script, name = BUILT_IN["ascend"].entrypoint
    program = [
        sys.executable,
        "-c",
        "import os, sys; print(os.environ['TOOLKIT'], os.environ['COMPILER'], sys.argv[1:])",
    ]
    command = [shell, flag, script.replace("/usr/local/Ascend", str(tmp_path)), name, *program, "--cxx_abi=1", "a b"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "0 found ['--cxx_abi=1', 'a b']\n", "scripts read their own arguments"
