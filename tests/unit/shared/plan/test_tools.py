"""The tool service and the judge of a job: their servers, secrets, sandboxes and limits."""

from __future__ import annotations

import pytest
from tests.unit.shared.plan.test_plan import SITE, job_with

from kestrl._shared.plan.agents import outside_line
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.environments import environment_requirements, environment_servers, offers_tools
from kestrl._shared.plan.judges import (
    correctness_entry,
    correctness_of,
    judge_keys,
    judge_servers,
    ruler_entry,
    ruler_of,
    uses_own_engines,
)
from kestrl._shared.plan.servers import is_cluster_name, server_at
from kestrl._shared.plan.tools import (
    file_holders,
    runtime_class,
    sandbox_claim,
    tool_entries,
    tool_secrets,
    tool_servers,
    with_paths,
)

HTTP = (
    "tools=[{name: shop, http: {openapi: 'https://docs.example/api.json', baseUrl: 'http://shop.example:8080/v1', "
    "allowHosts: [cdn.example], secretHeaders: {Authorization: {secretRef: {name: keys}, secretKey: TOKEN, "
    "prefix: 'Bearer '}}}}, {name: files, mcp: {url: 'https://mcp.example/mcp'}}, {name: look, use: 'mine:look'}]"
)


def test_every_server_that_a_tool_may_call_is_known() -> None:
    servers = [(server.host, server.port, server.field) for server in tool_servers(job_with(HTTP).spec)]
    assert servers == [
        ("shop.example", 8080, "spec.tools[0].http.baseUrl"),
        ("docs.example", 443, "spec.tools[0].http.openapi"),
        ("cdn.example", 443, "spec.tools[0].http.allowHosts[0]"),
        ("mcp.example", 443, "spec.tools[1].mcp.url"),
    ]
    assert tool_servers(job_with("tools=[{name: local, mcp: {command: [serve]}}]").spec) == ()


def test_a_tool_has_the_secrets_that_it_names_and_a_part_of_the_deadline() -> None:
    spec = job_with(HTTP, "rollout.deadlines.tool=10s").spec
    (secret,) = tool_secrets(spec).values()
    assert (secret.secret, secret.key) == ("keys", "TOKEN")
    shop, files, look = tool_entries(spec)
    assert shop.http is not None
    assert shop.http.seconds == 8.0
    assert [(text.variable, text.prefix) for text in shop.http.secret_headers.values()] == [
        ("KESTRL_TOOL_SECRET_0", "Bearer ")
    ]
    assert shop.mcp is None
    assert files.mcp is not None
    assert files.http is None
    assert (look.use, look.methods, look.process, look.claim, look.tools) == ("mine:look", None, None, None, None)


def test_uris_of_files_in_a_config_become_paths() -> None:
    assert with_paths({"a": "s3://b/x", "b": 3, "c": "other"}, {"s3://b/x": "/files/x"}) == {
        "a": "/files/x",
        "b": 3,
        "c": "other",
    }


CLAIM = (
    "tools=[{name: plain, use: 'mine:look'}, {name: code, use: 'kestrl_sandbox.tool:CodeInterpreter', "
    "sandbox: {claim: {warmPool: pool, secretRef: {name: token}}}}]"
)


def test_code_runs_in_the_pods_that_are_claimed_for_an_episode() -> None:
    spec = job_with(CLAIM, "rollout.deadlines={tool: 10s, turn: 20s, episode: 30s}").spec
    claim, field = sandbox_claim(spec) or (None, "")
    assert claim is not None
    assert (claim.warm_pool, field) == ("pool", "spec.tools[1].sandbox.claim")
    entry = tool_entries(spec)[1].claim
    assert entry is not None
    assert (entry.bind_seconds, entry.use_seconds, entry.keep_seconds) == (8.0, 30.0, 110.0)
    assert sandbox_claim(job_with().spec) is None
    assert runtime_class(spec, Role.TOOLS) is None


def test_the_runtime_class_is_that_of_tools_environment_or_agent() -> None:
    tools = "tools=[{name: a, use: 'mine:look'}, {name: b, use: 'mine:run', sandbox: {runtimeClassName: gvisor}}]"
    assert runtime_class(job_with(tools).spec, Role.TOOLS) == ("gvisor", "spec.tools[1].sandbox.runtimeClassName")
    assert runtime_class(job_with(tools).spec, Role.AGENT) is None
    agent = "agent={command: [agent], image: 'registry.example/agent@sha256:" + "0" * 64 + "', runtimeClassName: kata}"
    spec = job_with("tools=[]", agent).spec
    assert runtime_class(spec, Role.AGENT) == ("kata", "spec.agent.runtimeClassName")
    assert runtime_class(spec, Role.TOOLS) is None


def test_only_pods_need_a_holder_of_files() -> None:
    assert file_holders(job_with().spec, SITE) == ()


JUDGES = (
    "rewards=[{rule: format}, {rule: 'mine:asks', correctness: {model: m, baseUrl: 'https://judge.example/v1', "
    "secretRef: {name: keys}, secretKey: A}}, {ruler: {model: n, baseUrl: 'http://ruler.example/v1', "
    "second: {model: o, baseUrl: 'https://second.example/v1', secretRef: {name: keys}, secretKey: B}}}]"
)


def test_judges_are_found_wherever_they_stand_with_keys_and_servers() -> None:
    spec = job_with(JUDGES).spec
    assert (ruler_of(spec) or (None,))[0] == 2
    assert (correctness_of(spec) or (None,))[0] == 1
    assert not uses_own_engines(spec)
    assert [(key.key, key.field) for key in judge_keys(spec).values()] == [
        ("B", "spec.rewards[2].ruler.second.secretRef"),
        ("A", "spec.rewards[1].correctness.secretRef"),
    ]
    assert [(server.host, server.port) for server in judge_servers(spec)] == [
        ("ruler.example", 80),
        ("second.example", 443),
        ("judge.example", 443),
    ]
    ruler, correctness = ruler_entry(spec, ()), correctness_entry(spec, ())
    assert ruler is not None
    assert correctness is not None
    assert [judge.key_variable for judge in ruler.judges] == [None, "KESTRL_JUDGE_KEY_1"]
    assert [judge.key_variable for judge in correctness.judges] == ["KESTRL_JUDGE_KEY_2"]
    plain = job_with().spec
    assert (ruler_of(plain), correctness_of(plain), judge_servers(plain)) == (None, None, ())


@pytest.mark.parametrize(
    ("host", "cluster"),
    [
        ("db", True),
        ("db.team.svc", True),
        ("db.team.svc.cluster.local", True),
        ("db.team.svc.", True),
        ("db.team", False),
        ("example.com", False),
        ("::1", False),
        ("a.b.c.svc.d", False),
    ],
)
def test_names_that_the_dns_of_a_cluster_answers(host: str, cluster: bool) -> None:
    assert is_cluster_name(host) is cluster


def test_the_namespace_is_that_of_a_service() -> None:
    assert server_at("http://db.team.svc/x", "f").namespace == "team"
    assert server_at("http://db.team.svc.cluster.local", "f").namespace == "team"
    assert server_at("http://db.team.example", "f").namespace is None
    assert server_at("http://db.svc", "f").namespace is None


def test_an_environment_brings_what_its_adapter_imports_once() -> None:
    environment = job_with(
        "tools=[]", "environment={reasoningGym: {generator: chain_sum}, python: {requirements: ['Reasoning_Gym==0.1']}}"
    ).spec.environment
    assert environment is not None
    requirements = environment_requirements(environment)
    assert requirements[0] == "Reasoning_Gym==0.1"
    assert "reasoning-gym" not in requirements
    assert len(requirements) == 5


def test_only_some_environments_offer_tools_or_have_a_server() -> None:
    gym = job_with("tools=[]", "environment={reasoningGym: {generator: chain_sum}}").spec
    assert not offers_tools(gym)
    assert environment_servers(gym) == []
    adapter = job_with("tools=[]", "environment={adapter: {use: 'mine:World'}}").spec
    assert offers_tools(adapter)
    openenv = job_with("tools=[]", "environment={openenv: {url: 'https://env.example'}}").spec
    assert [server.host for server in environment_servers(openenv)] == ["env.example"]
    assert not offers_tools(job_with().spec)


@pytest.mark.parametrize(
    ("agent", "line"),
    [
        ("{run: 'mine:agent'}", "mine:agent, in a process beside each worker"),
        (
            "{run: 'mine:agent', python: {requirements: [langgraph]}}",
            "mine:agent, in a process beside each worker with langgraph",
        ),
        ("{command: [agent, --fast]}", "agent --fast, a process for each episode"),
        ("{url: 'http://agent.example'}", "http://agent.example, a POST for each episode"),
        ("{loop: tool_agent}", ""),
    ],
)
def test_how_an_agent_runs_is_said_in_a_line(agent: str, line: str) -> None:
    assert outside_line(job_with("tools=[]", f"agent={agent}").spec.agent) == line
