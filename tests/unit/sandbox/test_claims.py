"""Code in sandboxes claimed from a warm pool: a real `kestrl sandbox serve` in each, and a fake Kubernetes API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.fakes.agent_sandbox import AgentSandbox
from tests.fakes.kubernetes import FakeKubernetes
from tests.unit.sandbox.test_runs import OUTCOMES
from tests.unit.tools.conftest import served

from kestrl._shared.plan.settings.tools import ClaimEntry, SecretText, ToolEntry, ToolsSettings
from kestrl.errors import Boundary, KestrlError, UserInputError
from kestrl.tools import WarmPool
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Echo, Isolation, Language, Limits, Outcome, Run, SandboxFailure
from kestrl_sandbox.pool.breaker import FAILURES
from kestrl_sandbox.pool.sandbox_pool import SandboxPool
from kestrl_sandbox.remote.claim_objects import claim, claim_name
from kestrl_sandbox.remote.claims import ClaimedSandboxes, ClaimUnusable
from kestrl_sandbox.remote.cluster_api import OwnPod
from kestrl_sandbox.remote.server import application
from kestrl_tools.service import run_tools

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKEN = "a-long-token"
CONFIG = PoolConfig(max_sandboxes=3, memory_mb=256)


class Site:
    """A cluster with agent-sandbox and a warm pool `code`, and the pod of a tool service."""

    def __init__(self, cluster: FakeKubernetes, controller: AgentSandbox, pod: OwnPod, tokens: list[str]) -> None:
        self.cluster, self.controller, self.pod = cluster, controller, pod
        self.tokens = tokens
        """The token with which a pod of the pool begins."""
        self.warm = WarmPool(
            name="code", token=TOKEN, port=controller.port, bind_seconds=20, use_seconds=600, keep_seconds=720
        )

    def claims(self) -> list[dict[str, Any]]:
        return self.cluster.list("sandboxclaims", "team-a")

    async def no_claims(self) -> None:
        await self.cluster.until(lambda: not self.claims(), "every claim is deleted", seconds=30)

    async def open(self, **changes: Any) -> SandboxPool:
        pool = replace(self.warm, **changes)
        return await SandboxPool.start(partial(ClaimedSandboxes.start, pool=pool), CONFIG)

    @asynccontextmanager
    async def opened(self, **changes: Any) -> AsyncGenerator[SandboxPool]:
        pool = await self.open(**changes)
        try:
            yield pool
        finally:
            await pool.close()
        await self.no_claims()
        assert not self.controller.pods


def make_pod(cluster: FakeKubernetes, name: str) -> str:
    """Creates a pod that can own claims, and returns its uid."""
    made = cluster.create("pods", {"metadata": {"name": name, "namespace": "team-a"}, "spec": {"containers": []}})
    return str(made["metadata"]["uid"])


@asynccontextmanager
async def made(pool: SandboxPool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Site]:
    token = folder / "token"
    token.write_text("account\n")
    tokens = [TOKEN]
    async with FakeKubernetes() as cluster:
        controller = AgentSandbox(cluster, lambda: application(pool, lambda: tokens[0]))
        controller.free["code"] = 100
        uid = make_pod(cluster, "job-tools-x")
        pod = OwnPod(
            namespace="team-a", name="job-tools-x", uid=uid, server=cluster.url, token_file=token, authority=None
        )
        monkeypatch.setattr(OwnPod, "here", lambda: pod)
        yield Site(cluster, controller, pod, tokens)
        await controller.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def site(pool: SandboxPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    async with made(pool, tmp_path, monkeypatch) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claimed(pool: SandboxPool, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxPool]:
    with pytest.MonkeyPatch.context() as patch:
        async with made(pool, tmp_path_factory.mktemp("account"), patch) as found, found.opened() as opened:
            yield opened


@pytest.mark.parametrize("name", OUTCOMES)
async def test_an_outcome_is_that_of_every_back_end(claimed: SandboxPool, name: str) -> None:
    run, outcome, code, stdout = OUTCOMES[name]
    result = await claimed.run(run)
    assert (result.outcome, result.exit_code, result.stdout) == (outcome, code, stdout), result
    assert bool(result.message) == (outcome is not Outcome.OK)


async def test_input_files_and_output_pass_as_bytes(claimed: SandboxPool) -> None:
    data = bytes(range(256)) * 4000
    run = Run(
        code="cat; cat >&2 in.bin; cp in.bin out.bin",
        language=Language.BASH,
        stdin=data,
        files={"in.bin": data},
        fetch=["out.bin", "none"],
        limits=Limits(output_bytes=1_000_000),
    )
    result = await claimed.run(run)
    assert result.stdout == result.stderr == data[:1_000_000]
    assert result.stdout_truncated
    assert (result.files, set(result.missing)) == ({"out.bin": data}, {"none"})


async def test_code_that_utf8_does_not_encode_runs(claimed: SandboxPool) -> None:
    result = await claimed.run(Run(code="print(len('\ud800'))"))
    assert (result.outcome, b"surrogate" in result.stderr.lower()) == (Outcome.NONZERO_EXIT, True), result


async def test_a_session_keeps_state_and_its_loss_is_seen(claimed: SandboxPool) -> None:
    first, second = await claimed.session(), await claimed.session()
    try:
        await first.run(Run(code="x = 1"))
        shown = await first.run(Run(code="x + 1", echo=Echo.DISPLAY))
        assert shown.display == "2"
        raised = await second.run(Run(code="x"))
        assert (raised.error or {})["type"] == "NameError"
        await first.run(Run(code="while True: pass", limits=Limits(seconds=0.3)))
        assert first.restarts == 1
        assert (await first.run(Run(code="print('x' in globals())"))).stdout == b"False\n"
    finally:
        await first.close()
        await second.close()


@pytest.mark.parametrize("run", [Run(code="", files={"../x": b""}), Run(code="", limits=Limits(memory_mb=10_000))])
async def test_an_unusable_request_names_its_field(claimed: SandboxPool, run: Run) -> None:
    with pytest.raises(UserInputError, match=r"^(files|memory_mb): "):
        await claimed.run(run)


async def test_the_report_names_pool_runner_and_runtime_class(site: Site) -> None:
    site.controller.runtime_class = "kata"
    async with site.opened() as opened:
        found = opened.capabilities
        assert found.backend == "claim of code: zygote under RuntimeClass kata"
        assert (found.isolation, found.mechanisms["pod"]) == (Isolation.NAMESPACES, "RuntimeClass kata")
        assert "seccomp" in found.mechanisms


async def test_a_session_has_a_claim_of_its_own_that_ends_with_it(site: Site) -> None:
    async with site.opened() as opened:
        session, other = await opened.session(), await opened.session()
        await asyncio.gather(session.run(Run(code="x = 1")), other.run(Run(code="x = 2")))
        mine, its = site.claims()
        assert {mine["spec"]["warmPoolRef"]["name"], its["spec"]["warmPoolRef"]["name"]} == {"code"}
        await session.close()
        await site.cluster.until(lambda: len(site.claims()) == 1, "its claim is deleted")
        assert (await other.run(Run(code="print(x)"))).stdout == b"2\n"
        await other.close()
        assert site.controller.started == 2


async def test_runs_without_a_session_share_claims(site: Site) -> None:
    async with site.opened() as opened:
        for _ in range(3):
            assert (await opened.run(Run(code="print('x' in globals()); x = 1"))).stdout == b"False\n"
        assert site.controller.started == 1
        done = await asyncio.gather(*(opened.run(Run(code="import time; time.sleep(.2)")) for _ in range(6)))
        assert {result.outcome for result in done} == {Outcome.OK}
        assert site.controller.started <= CONFIG.max_sandboxes


async def test_a_claim_is_replaced_after_the_time_of_an_episode(site: Site) -> None:
    async with site.opened(use_seconds=0.0) as opened:
        for _ in range(2):
            await opened.run(Run(code=""))
        await site.cluster.until(lambda: site.controller.started >= 2, "a second claim")


async def test_a_run_is_tried_again_when_its_pod_ends(site: Site) -> None:
    async with site.opened() as opened:
        running = asyncio.create_task(opened.run(Run(code="import time; time.sleep(1); print(1)")))
        (name,) = site.controller.pods
        while not opened.running:  # noqa: ASYNC110 - a plain number of the pool
            await asyncio.sleep(0)
        await site.controller.kill(name)
        assert (await running).stdout == b"1\n"
        assert site.controller.started == 2


async def test_a_session_whose_pod_ends_is_a_failure(site: Site) -> None:
    async with site.opened() as opened:
        session = await opened.session()
        (name,) = site.controller.pods
        await site.controller.kill(name)
        with pytest.raises(SandboxFailure) as lost:
            await session.run(Run(code=""))
        assert (lost.value.code, lost.value.retryable) == ("sandbox_lost", True)


async def test_an_empty_pool_is_a_failure_that_opens_the_breaker(site: Site) -> None:
    async with site.opened(bind_seconds=0.3) as opened:
        held = await opened.session()
        site.controller.free["code"] = 0
        for _ in range(FAILURES):
            with pytest.raises(SandboxFailure, match="SandboxNotReady: Sandbox is not ready") as unbound:
                await opened.run(Run(code=""))
            assert (unbound.value.code, unbound.value.retryable) == ("sandbox_unbound", True)
        asked = len(site.cluster.requests("create", "sandboxclaims"))
        with pytest.raises(SandboxFailure, match="in a row did not start"):
            await opened.run(Run(code=""))
        assert len(site.cluster.requests("create", "sandboxclaims")) == asked
        assert (await held.run(Run(code="print(1)"))).stdout == b"1\n"
        await held.close()


async def test_a_pool_that_does_not_exist_is_named(site: Site) -> None:
    with pytest.raises(ClaimUnusable, match='WarmPoolNotFound: SandboxWarmPool "other" not found'):
        await site.open(name="other")
    await site.no_claims()


async def test_a_wrong_token_is_named(site: Site) -> None:
    with pytest.raises(ClaimUnusable, match=r"401: its token is not the one of `sandbox.claim.secretRef`"):
        await site.open(token="wrong")
    await site.no_claims()


async def test_a_rotated_token_reaches_new_pods_and_the_one_before_it_those_that_are_there(site: Site) -> None:
    present = [TOKEN]
    async with site.opened(read_token=lambda: present[0]) as opened:
        first = await opened.session()
        await first.run(Run(code=""))
        for mine, its in (("rotated", "rotated"), ("rotated", TOKEN)):
            present[0], site.tokens[0] = mine, its
            session = await opened.session()
            assert (await session.run(Run(code="print(1)"))).stdout == b"1\n"
            await session.close()
        await first.close()
        assert site.controller.started == 3, "each has claimed a sandbox"


async def test_a_token_that_was_accepted_and_is_refused_is_waited_for(site: Site) -> None:
    present = [TOKEN]

    def read() -> str:
        reads.append(present[0])
        if len(reads) > 4:
            present[0] = "rotated"  # the kubelet has brought it
        return present[0]

    reads: list[str] = []
    async with site.opened(read_token=read) as opened:
        first = await opened.session()
        await first.run(Run(code=""))
        site.tokens[0] = "rotated"
        session = await opened.session()
        assert (await session.run(Run(code="print(1)"))).stdout == b"1\n"
        await session.close()
        await first.close()
        assert len(reads) > 4


async def used(pool: SandboxPool) -> None:
    """Runs code in a session of its own."""
    session = await pool.session()
    await session.run(Run(code=""))


async def test_one_that_is_not_replaced_in_time_is_named_and_ends_one_claim(site: Site) -> None:
    async with site.opened(read_token=lambda: TOKEN, bind_seconds=0.5) as opened:
        first = await opened.session()
        await first.run(Run(code=""))
        site.tokens[0] = "never brought"
        with pytest.raises(SandboxFailure, match="401: its token is not the one") as caught:
            await used(opened)
        assert (caught.value.code, caught.value.retryable) == ("sandbox_unauthorized", True)
        await first.close()


@pytest.mark.parametrize("denied", [("create", "sandboxclaims"), ("get", "sandboxes"), ("list", "sandboxclaims")])
async def test_a_missing_right_is_named(site: Site, denied: tuple[str, str]) -> None:
    site.cluster.denied.add(denied)
    with pytest.raises(ClaimUnusable, match=f"may not claim sandboxes.*cannot {denied[0]} resource"):
        await site.open()
    await site.no_claims()


async def test_a_cluster_without_agent_sandbox_is_named(site: Site) -> None:
    site.cluster.objects.resources.pop(("extensions.agents.x-k8s.io", "sandboxclaims"))
    with pytest.raises(ClaimUnusable, match="is not installed in this cluster"):
        await site.open()


async def test_memory_beyond_that_of_the_pool_is_refused(site: Site) -> None:
    start = partial(ClaimedSandboxes.start, pool=site.warm)
    with pytest.raises(UserInputError, match="memory_mb: is 512, and the sandboxes of the pool code have at most 256"):
        await SandboxPool.start(start, PoolConfig(memory_mb=512))
    await site.no_claims()


async def test_a_pool_that_isolates_otherwise_later_is_not_used(site: Site) -> None:
    site.controller.runtime_class = "kata"
    async with site.opened() as opened:
        held = await opened.session()
        site.controller.runtime_class = None
        with pytest.raises(SandboxFailure, match=r"under the default runtime .* RuntimeClass kata") as changed:
            await opened.session()
        assert changed.value.code == "sandbox_pool_changed"
        await held.close()


async def test_claims_of_a_killed_service_are_deleted(site: Site) -> None:
    left = claim(claim_name(site.pod.name), site.pod, site.warm, datetime.now(UTC))
    site.cluster.create("sandboxclaims", left)
    owner = replace(site.pod, name="other", uid=make_pod(site.cluster, "other"))
    other = claim("another-pod", owner, site.warm, datetime.now(UTC))
    site.cluster.create("sandboxclaims", other)
    pool = await site.open()
    assert left["metadata"]["name"] not in {item["metadata"]["name"] for item in site.claims()}
    await pool.close()
    assert [item["metadata"]["name"] for item in site.claims()] == ["another-pod"]


async def test_claims_go_with_the_pod_of_the_tool_service(site: Site) -> None:
    pool = await site.open()
    site.cluster.delete("pods", "team-a", site.pod.name)
    await site.no_claims()
    await pool.close()


async def test_a_claim_ends_with_its_pod_or_at_its_time() -> None:
    pod = OwnPod(namespace="n", name="p" * 80, uid="u", server="", token_file=Path(), authority=None)
    pool = WarmPool(name="code", token=TOKEN, port=1, bind_seconds=1, use_seconds=600, keep_seconds=720)
    made = claim(claim_name(pod.name), pod, pool, datetime(2026, 1, 1, tzinfo=UTC))
    assert len(made["metadata"]["name"]) <= 63
    assert made["metadata"]["ownerReferences"] == [{"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": "u"}]
    assert made["spec"] == {
        "warmPoolRef": {"name": "code"},
        "lifecycle": {"shutdownTime": "2026-01-01T00:12:00Z", "shutdownPolicy": "Delete"},
    }


async def test_requests_are_tried_again_while_the_api_server_is_away(site: Site) -> None:
    async with site.opened() as opened:
        site.cluster.fail("get", "sandboxclaims", status=503, times=2)
        site.cluster.fail("delete", "sandboxclaims", status=503, times=2)
        first, second = await opened.session(), await opened.session()
        await first.close()
        await second.close()
        await site.no_claims()


async def test_a_claim_that_cannot_be_deleted_is_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    opened = await site.open()
    site.cluster.denied.add(("delete", "sandboxclaims"))
    await opened.close()
    assert "was not deleted and stays until its shutdownTime" in caplog.text
    assert len(site.claims()) == 1


async def test_a_cancelled_claim_is_deleted(site: Site) -> None:
    async with site.opened() as opened:
        held = await opened.session()
        site.controller.free["code"] = 0
        waiting = asyncio.create_task(opened.session())
        await site.cluster.until(lambda: len(site.claims()) == 2, "a second claim")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(site.claims()) == 1
        await held.close()


def entry(site: Site, use: str = "kestrl_sandbox.tool:CodeInterpreter", **config: Any) -> ToolEntry:
    token = SecretText(variable="KESTRL_TOOL_SECRET_0")
    claimed = ClaimEntry(
        warm_pool="code", token=token, port=site.warm.port, bind_seconds=20, use_seconds=600, keep_seconds=720
    )
    return ToolEntry(name="code", use=use, config={"memory_mb": 128, **config}, claim=claimed)


def settings(tool: ToolEntry) -> ToolsSettings:
    return ToolsSettings(
        component="tools-0", job="job", run="job-1", listen="127.0.0.1:0", tools=(tool,), call_seconds=5, max_sessions=5
    )


async def test_a_tool_runs_its_code_in_claimed_sandboxes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", TOKEN)
    async with served(entry(site, session=True)) as client:
        used = (await client.listed()).sandboxes["code"]
        assert (used.backend, used.isolation) == ("claim of code: zygote under the default runtime", "namespaces")
        first, second = await client.open(), await client.open()
        assert (await client.call(first, "code", {"code": "x = 5"})).text == "[no output]"
        assert (await client.call(first, "code", {"code": "x + 1"})).text == "6"
        assert "NameError" in (await client.call(second, "code", {"code": "x"})).text
        assert len(site.claims()) == 2
        await client.close(first)
        await site.cluster.until(lambda: len(site.claims()) == 1, "the claim of the episode is deleted")
        (name,) = site.controller.pods
        await site.controller.kill(name)
        with pytest.raises(KestrlError) as lost:
            await client.call(second, "code", {"code": "1"})
        assert (lost.value.boundary, lost.value.retryable) == (Boundary.SANDBOX, True)
    await site.no_claims()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"isolation": "kernel"}, "isolation: at least kernel is asked for, and a claim of code: zygote under"),
        ({"backend": "bwrap"}, "backend: is bwrap, and code runs in claimed sandboxes"),
        ({"memory_mb": 4096}, "memory_mb: is 4096, and the sandboxes of the pool code have at most 256"),
    ],
)
async def test_a_config_that_the_pool_does_not_offer_ends_the_start(
    site: Site, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("KESTRL_TOOL_SECRET_0", TOKEN)
    with pytest.raises(UserInputError, match=message):
        await run_tools(settings(entry(site, **config)))
    await site.no_claims()


async def test_a_tool_that_runs_no_code_cannot_claim_sandboxes(site: Site) -> None:
    with pytest.raises(UserInputError, match=r"calculator.*has no `start_service` that takes `warm_pool`"):
        await run_tools(settings(entry(site, "kestrl_tools.calculator:calculator")))
