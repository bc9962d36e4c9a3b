"""Preflight checks: each thing missing in the cluster is named on a line of its own, and the exit code separates user
errors from others."""

from __future__ import annotations

import asyncio
import copy
import sys
from typing import Any

import pytest
import yaml
from tests.fakes.ports import free_port

from kestrl.errors import UserInputError
from kestrl_operator.apiserver.client import Api
from kestrl_operator.config import OperatorConfig
from kestrl_operator.preflight import needed, preflight

from .stage import DEFINITION, KEY, VALUES, Stage


async def ended(stage: Stage, *, url: str | None = None, **changes: Any) -> tuple[int, str]:
    """Runs the operator as a process of its own; returns exit code and output."""
    config = {
        "jobs": VALUES,
        "keyFile": str(stage.folder / "key"),
        "lease": {"namespace": "kestrl-system"},
        "healthListen": f"127.0.0.1:{free_port()}",
        "metricsListen": f"127.0.0.1:{free_port()}",
        **changes,
    }
    place = stage.folder / "config.yaml"
    place.write_text(yaml.safe_dump(config))
    kubeconfig = stage.cluster.write_kubeconfig(stage.folder)
    if url is not None:
        kubeconfig.write_text(kubeconfig.read_text().replace(stage.cluster.url, url))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kestrl_operator",
        "--config",
        str(place),
        env={"PATH": "/usr/bin", "KUBECONFIG": str(kubeconfig), "HOME": str(stage.folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


def named(config: OperatorConfig) -> list[tuple[str, str]]:
    """All required rights, as verbs and resources of the fake."""
    return [
        (right.verb, f"{right.kind.plural}/{right.subresource}" if right.subresource else right.kind.plural)
        for right in needed(config)
    ]


async def test_a_missing_right_ends_the_process_with_its_name_and_exit_code_2(stage: Stage) -> None:
    stage.cluster.denied |= {("watch", "pods"), ("patch", "agentrljobs/status")}
    code, output = await ended(stage)
    assert code == 2
    lines = output.splitlines()
    assert "error: not allowed: patch agentrljobs/status.kestrl.dev" in lines
    assert "not allowed: watch pods" in lines
    assert "ClusterRole" in lines[-1]
    assert len(lines) == 3
    assert "Traceback" not in output
    assert stage.cluster.writes() == []


async def test_an_unreachable_api_server_ends_the_start_with_one_line(stage: Stage) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, output = await ended(stage, url=url)
    assert code == 1, "not a user error: the kubelet restarts it"
    (line,) = output.splitlines()
    assert line.startswith("error: ")
    assert url in line
    assert "connect" in line.lower()


@pytest.mark.parametrize("namespaces", [(), ("team-a", "team-b")], ids=["everywhere", "some namespaces"])
async def test_each_right_that_is_missing_is_named(stage: Stage, namespaces: tuple[str, ...]) -> None:
    stage.patch.setenv("KUBECONFIG", str(stage.cluster.write_kubeconfig(stage.folder)))
    config, api = stage.config(namespaces=namespaces), Api()
    rights = named(config)
    try:
        assert await preflight(api, config) is True
        stage.cluster.denied = set(rights)
        with pytest.raises(UserInputError) as refused:
            await preflight(api, config)
    finally:
        await api.close()
    *lines, hint = str(refused.value).splitlines()
    assert len(lines) == len(rights)
    for (verb, resource), line in zip(rights, lines, strict=True):
        plural, _, subresource = resource.partition("/")
        group = stage.cluster.objects.resource(plural).group if plural != "events" else None
        what = f"{plural}{f'/{subresource}' if subresource else ''}{f'.{group}' if group else ''}"
        assert line.startswith(f"not allowed: {verb} {what}")
        assert (" in namespace " in line) == (bool(namespaces) or plural == "leases")
    assert "ClusterRole" in hint


async def test_every_call_of_the_operator_is_covered_by_a_checked_right(stage: Stage) -> None:
    config = stage.config()
    await stage.operator(audit_seconds=0.2)
    stage.job()
    await stage.applied()
    stage.cluster.edit("agentrljobs", "team-a", "email-search", {"spec": {"suspend": True}})
    await stage.until(lambda: stage.phase() == "Suspended", "it is suspended")
    asked = {(item.verb, item.resource) for item in stage.cluster.log}
    aside = {("create", "selfsubjectaccessreviews"), ("get", "customresourcedefinitions"), ("list", "nodes")}
    assert asked - aside <= set(named(config)), "used and never checked"


async def test_nodes_are_not_needed(stage: Stage) -> None:
    stage.cluster.denied.add(("list", "nodes"))
    await stage.operator()
    stage.job()
    await stage.applied()
    assert stage.cluster.requests("list", "nodes") == []


async def test_a_missing_crd_is_reported_with_how_to_install_it(stage: Stage) -> None:
    stage.cluster.delete("customresourcedefinitions", "", "agentrljobs.kestrl.dev")
    code, output = await ended(stage)
    assert code == 2
    (line,) = output.splitlines()
    assert "agentrljobs.kestrl.dev is not installed" in line
    assert "kubectl apply" in line


async def test_a_crd_without_a_field_is_reported_as_outdated(stage: Stage) -> None:
    old: Any = copy.deepcopy(DEFINITION)
    schema = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["status"]["properties"]["shown"]["properties"]["lag"]
    stage.cluster.objects.replace(stage.cluster.objects.resource("customresourcedefinitions"), "", old, "kubectl")
    code, output = await ended(stage)
    assert code == 2
    assert "has no status.shown.lag" in output
    assert "upgrade" in output


async def test_a_right_to_read_the_crd_is_not_needed(stage: Stage) -> None:
    stage.cluster.denied.add(("get", "customresourcedefinitions"))
    await stage.operator()


async def test_no_cluster_at_all_is_reported_with_the_fix(stage: Stage) -> None:
    stage.patch.delenv("KUBECONFIG", raising=False)
    stage.patch.setenv("HOME", str(stage.folder))
    with pytest.raises(UserInputError, match="KUBECONFIG"):
        await preflight(Api(), stage.config())


async def test_a_port_that_is_taken_is_named(stage: Stage) -> None:
    running = await stage.operator()
    code, output = await ended(stage, healthListen=f"127.0.0.1:{running.port}")
    assert code == 2
    assert f"healthListen: cannot listen on 127.0.0.1:{running.port}: Address already in use" in output


async def test_sigterm_ends_the_process_and_releases_the_lease(stage: Stage) -> None:
    place = stage.folder / "config.yaml"
    kubeconfig = stage.cluster.write_kubeconfig(stage.folder)
    config = {
        "jobs": VALUES,
        "keyFile": str(stage.folder / "key"),
        "lease": {"namespace": "kestrl-system", "seconds": 15},
        "healthListen": f"127.0.0.1:{free_port()}",
        "metricsListen": f"127.0.0.1:{free_port()}",
    }
    place.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kestrl_operator",
        "--config",
        str(place),
        env={"PATH": "/usr/bin", "KUBECONFIG": str(kubeconfig), "POD_NAME": "op", "HOME": str(stage.folder)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    stage.job()
    await stage.applied()
    assert stage.holder() == "op"
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert stage.holder() == ""
    assert (stage.folder / "key").read_bytes() == KEY
