"""The manifest: what is accepted, what is refused and with which words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kestrl._shared.plan.updates import algorithm_settings
from kestrl._shared.spec import ProblemsError, job_schema, parse_job, read_job, with_overrides
from kestrl._shared.spec.scalars import format_duration, parse_duration
from kestrl._shared.spec.sft import read_sft_job
from kestrl._shared.spec.threshold import read_threshold
from kestrl.errors import UserInputError

MANIFEST: dict[str, Any] = {
    "apiVersion": "kestrl.dev/v1alpha1",
    "kind": "AgentRLJob",
    "metadata": {"name": "email-search"},
    "spec": {
        "model": {"base": "demo://tiny"},
        "data": {"train": {"uri": "train.jsonl", "size": 4000}},
        "tools": [{"name": "search", "use": "mine:search"}],
        "rewards": [{"rule": "mine:reward"}],
    },
}
HTTP = "spec.tools[0].http"
OPENAPI = "openapi: 'https://h/openapi.json'"
ENDPOINT = "{name: a, description: A, path: /a}"
REQUIRING = "{name: a, description: A, path: '/{b}', required: [c]}"
CLAIM = "claim: {warmPool: a, secretRef: {name: s}}"
SECRET_HEADER = "secretHeaders: {A: {secretRef: {name: n}, secretKey: K}}"


def refused(*overrides: str, document: Any = None) -> list[str]:
    """The problems of the manifest under overrides."""
    with pytest.raises(ProblemsError) as caught:
        parse_job(with_overrides(MANIFEST if document is None else document, overrides))
    return [str(problem) for problem in caught.value.problems]


def test_a_minimal_manifest_gets_the_vetted_defaults() -> None:
    spec = parse_job(MANIFEST).spec
    assert spec.algorithm.name == "grpo"
    assert algorithm_settings(spec).clip_high == 0.28
    assert spec.sampling.temperature == 1.0
    assert spec.rollout.deadlines.turn == 120.0


def test_what_is_written_out_reads_back_the_same() -> None:
    job = parse_job(MANIFEST)
    assert parse_job(job.model_dump(by_alias=True, mode="json")) == job


def test_an_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    assert refused("algorithm.groupsize=4") == ["spec.algorithm.groupsize: unknown field; did you mean groupSize?"]


def test_every_problem_is_reported_at_once() -> None:
    problems = refused("algorithm.groupSize=many", "rollout.deadlines.tool=10", "bogus=1")
    assert len(problems) == 3
    assert any(problem.startswith("spec.rollout.deadlines.tool: 10 is not a duration") for problem in problems)
    assert any(problem.startswith("spec.algorithm.groupSize:") and "'many'" in problem for problem in problems)
    assert any(problem.startswith("spec.bogus: unknown field; known here: model, data") for problem in problems)


@pytest.mark.parametrize(
    ("read", "example", "message"),
    [
        (read_job, "retool/sft.yaml", "kind: is SFTJob, for `kestrl sft`; this command reads AgentRLJobs"),
        (read_sft_job, "retool/rl.yaml", "kind: is AgentRLJob, for `kestrl run`; this command reads SFTJobs"),
        (read_job, "gsm8k/threshold.yaml", "kind: is Threshold, for `kestrl verify`; this command reads AgentRLJobs"),
        (read_threshold, "gsm8k/job.yaml", "kind: is AgentRLJob, for `kestrl run`; this command reads Thresholds"),
    ],
)
def test_a_file_of_another_kind_is_for_another_command(read: Callable[[Path], Any], example: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read(Path(__file__).parents[4] / "examples" / example)


def test_a_missing_field_is_named() -> None:
    document = copy.deepcopy(MANIFEST)
    del document["spec"]["model"]["base"]
    assert refused(document=document) == ["spec.model.base: is required; add it"]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["rollout.deadlines.turn=20s"], "spec.rollout.deadlines.turn"),
        (["rollout.deadlines.episode=1m"], "spec.rollout.deadlines.episode"),
        (["rollout.deadlines.group=5m"], "spec.rollout.deadlines.group"),
        (["rollout.deadlines.step=10m"], "spec.rollout.deadlines.step"),
        (["rollout.deadlines.group=20m", "rollout.deadlines.step=15m"], "spec.rollout.deadlines.step"),
        (["activeDeadline=1m"], "spec.activeDeadline"),
        (["sampling.temperature=0"], "spec.sampling.temperature"),
        (["sampling.topP=0.9"], "spec.sampling.topP"),
        (["evaluation.topP=0"], "spec.evaluation.topP"),
        (["evaluation.topP=1.1"], "spec.evaluation.topP"),
        (["evaluation.topK=-1"], "spec.evaluation.topK"),
        (["evaluation.samples=0"], "spec.evaluation.samples"),
        (["evaluation={temperature: 0, topP: 0.6}"], "spec.evaluation.temperature"),
        (["evaluation={temperature: 0, samples: 2}"], "spec.evaluation.temperature"),
        (["algorithm.groupSize=1"], "spec.algorithm.groupSize"),
        (["algorithm.onFailedEpisode=shrink", "algorithm.minGroupSize=9"], "spec.algorithm.minGroupSize"),
        (["algorithm.miniBatches=9"], "spec.algorithm.miniBatches"),
        (["algorithm.name=gdpo", "algorithm.kl={coefficient: 0.1, place: reward}"], "spec.algorithm.kl.place"),
        (["algorithm.name=gdpo", "algorithm.dynamicSampling=true"], "spec.algorithm.dynamicSampling"),
        (["algorithm.name=dapo", "algorithm.advantage=gdpo"], "spec.algorithm.dynamicSampling"),
        (["algorithm.correction.low=3"], "spec.algorithm.correction.low"),
        (["algorithm.correction.rejectBelow=2"], "spec.algorithm.correction.rejectBelow"),
        (["algorithm.maxStaleness=3"], "spec.inference.adapterSlots"),
        (["schedule.staleGroups=continue"], "spec.schedule.staleGroups"),
        (["model.adapter.rank=1024"], "spec.model.adapter.rank"),
        (["agent.maxTokens=4096"], "spec.agent.maxTokens"),
        (["learner.activationOffload=true", "learner.accelerator.profile=nvidia"], "spec.learner.activationOffload"),
        (
            ["learner.activationOffload=true", "learner.gradientCheckpointing=true"],
            "spec.learner.activationOffload",
        ),
        (["learner.checkpointedLayers=2"], "spec.learner.checkpointedLayers"),
        (["agent.maxTokensPerTurn=4000"], "spec.agent.maxTokensPerTurn"),
        (["tools=[{name: a, use: 'm:f'}, {name: a, use: 'm:g'}]"], "spec.tools"),
        (["tools=[{use: 'm:a'}, {name: a, use: 'm:g'}]"], "spec.tools"),
        (["tools=[{use: 'm:Env', methods: [a, b]}, {name: b, use: 'm:g'}]"], "spec.tools"),
        (["tools=[{mcp: {command: [a]}}, {mcp: {command: [b]}}]"], "spec.tools"),
        (["tools=[{name: a}]"], "spec.tools[0]"),
        (["tools=[{use: 'm:f', mcp: {command: [a]}}]"], "spec.tools[0]"),
        (["tools=[{use: 'm:f', tools: [a]}]"], "spec.tools[0].tools"),
        (
            ["tools=[{use: 'm:f', sandbox: {runtimeClassName: a}}, {use: 'm:g', sandbox: {runtimeClassName: b}}]"],
            "spec.tools[1].sandbox.runtimeClassName",
        ),
        (["tools=[{use: 'm:f', sandbox: {runtimeClassName: G}}]"], "spec.tools[0].sandbox.runtimeClassName"),
        (["tools=[{use: 'm:f', sandbox: {}}]"], "spec.tools[0].sandbox"),
        ([f"tools=[{{use: 'm:f', sandbox: {{runtimeClassName: a, {CLAIM}}}}}]"], "spec.tools[0].sandbox"),
        ([f"tools=[{{mcp: {{command: [a]}}, sandbox: {{{CLAIM}}}}}]"], "spec.tools[0].sandbox.claim"),
        ([f"tools=[{{use: 'm:f', process: {{}}, sandbox: {{{CLAIM}}}}}]"], "spec.tools[0].process"),
        (["tools=[{use: 'm:f', sandbox: {claim: {warmPool: a}}}]"], "spec.tools[0].sandbox.claim.secretRef"),
        (
            ["tools=[{use: 'm:f', sandbox: {claim: {warmPool: A, secretRef: {name: s}}}}]"],
            "spec.tools[0].sandbox.claim.warmPool",
        ),
        (
            [
                f"tools=[{{use: 'm:f', sandbox: {{{CLAIM}}}}}, "
                "{use: 'm:g', sandbox: {claim: {warmPool: b, secretRef: {name: s}}}}]"
            ],
            "spec.tools[1].sandbox.claim",
        ),
        (["tools=[{mcp: {}}]"], "spec.tools[0].mcp"),
        (["tools=[{mcp: {command: [a], url: 'http://h'}}]"], "spec.tools[0].mcp"),
        (["tools=[{mcp: {url: 'ftp://h'}}]"], "spec.tools[0].mcp.url"),
        (["tools=[{mcp: {url: 'http://h', env: {A: b}}}]"], "spec.tools[0].mcp.env"),
        (["tools=[{mcp: {command: [a], headers: {A: b}}}]"], "spec.tools[0].mcp.headers"),
        (["tools=[{mcp: {command: [a]}, config: {x: 1}}]"], "spec.tools[0].config"),
        (
            [f"tools=[{{mcp: {{url: 'http://h', headers: {{a: b}}, {SECRET_HEADER}}}}}]"],
            "spec.tools[0].mcp.secretHeaders.A",
        ),
        (["tools=[{http: {}}]"], "spec.tools[0].http"),
        (["tools=[{http: {openapi: a.yaml, baseUrl: 'http://h'}, mcp: {command: [a]}}]"], "spec.tools[0]"),
        (["tools=[{http: {openapi: a.yaml}}]"], "spec.tools[0].http.baseUrl"),
        ([f"tools=[{{http: {{endpoints: [{ENDPOINT}]}}}}]"], "spec.tools[0].http.baseUrl"),
        ([f"tools=[{{http: {{{OPENAPI}, endpoints: [{ENDPOINT}]}}}}]"], "spec.tools[0].http"),
        ([f"tools=[{{http: {{{OPENAPI}, timeout: 1h}}}}]"], "spec.tools[0].http.timeout"),
        (
            [f"tools=[{{http: {{{OPENAPI}, headers: {{a: b}}, {SECRET_HEADER}}}}}]"],
            "spec.tools[0].http.secretHeaders.A",
        ),
        ([f"tools=[{{http: {{{OPENAPI}, allowHosts: ['https://h']}}}}]"], f"{HTTP}.allowHosts[0]"),
        ([f"tools=[{{http: {{{OPENAPI}, privateNetworks: [10.0.0.1/8]}}}}]"], f"{HTTP}.privateNetworks[0]"),
        ([f"tools=[{{http: {{{OPENAPI}}}, config: {{x: 1}}}}]"], "spec.tools[0].config"),
        (
            ["tools=[{http: {baseUrl: 'http://h', endpoints: [{name: a, description: A, path: a}]}}]"],
            "spec.tools[0].http.endpoints[0].path",
        ),
        ([f"tools=[{{http: {{baseUrl: 'http://h', endpoints: [{ENDPOINT}, {ENDPOINT}]}}}}]"], "spec.tools"),
        (
            [f"tools=[{{http: {{baseUrl: 'http://h', endpoints: [{REQUIRING}]}}}}]"],
            "spec.tools[0].http.endpoints[0].required",
        ),
        (["agent.loop=toolagent"], "spec.agent.loop"),
        (["agent.config={depth: 2}"], "spec.agent.config"),
        (["agent.loopsConfig={other: {depth: 2}}"], "spec.agent.loopsConfig.other"),
        (["agent.loops={q: single_turn}", "agent.loopsConfig={q: {depth: 2}}"], "spec.agent.loopsConfig.q"),
        (["rewards=[{rule: exactly}]"], "spec.rewards[0].rule"),
        (["rewards=[{rule: format, config: {a: 1}}]"], "spec.rewards[0].config"),
        (["rewards=[{rule: loop_reward}]"], "spec.rewards[0].rule"),
        (["rewards=[{ruler: {}}]"], "spec.rewards[0].ruler.baseUrl"),
        (["rewards=[{ruler: {baseUrl: 'http://x/v1'}}]"], "spec.rewards[0].ruler.model"),
        (["rewards=[{rule: exact_answer, correctness: {}}]"], "spec.rewards[0].correctness.baseUrl"),
        (
            ["rewards=[{rule: format, correctness: {self: true, timeout: 10s}}]"],
            "spec.rewards[0].correctness.requestTimeout",
        ),
        (["rewards=[{ruler: {self: true}, correctness: {self: true}}]"], "spec.rewards[0]"),
        (
            ["rewards=[{rule: format, correctness: {self: true}}, {rule: exact_answer, correctness: {self: true}}]"],
            "spec.rewards[1].correctness",
        ),
        (["rewards=[{ruler: {baseUrl: 'ftp://x', model: m}}]"], "spec.rewards[0].ruler.baseUrl"),
        (["rewards=[{ruler: {baseUrl: 'http://u:p@x/v1', model: m}}]"], "spec.rewards[0].ruler.baseUrl"),
        (["rewards=[{ruler: {self: true, model: m}}]"], "spec.rewards[0].ruler.model"),
        (["rewards=[{ruler: {self: true, secretRef: {name: s}}}]"], "spec.rewards[0].ruler.secretRef"),
        (["rewards=[{ruler: {self: true, budget: {cost: 1}}}]"], "spec.rewards[0].ruler.budget.cost"),
        (["rewards=[{ruler: {self: true, budget: {calls: 0}}}]"], "spec.rewards[0].ruler.budget.calls"),
        (["rewards=[{ruler: {self: true, permutations: 17}}]"], "spec.rewards[0].ruler.permutations"),
        (["rewards=[{ruler: {self: true, timeout: 10s}}]"], "spec.rewards[0].ruler.requestTimeout"),
        (["rewards=[{ruler: {self: true}, config: {a: 1}}]"], "spec.rewards[0].config"),
        (["rewards=[{ruler: {self: true, gate: {rule: format}}}]"], "spec.rewards[0].ruler.gate.rule"),
        (["rewards=[{ruler: {self: true}}, {ruler: {self: true}}]"], "spec.rewards[1].ruler"),
        (
            ["rewards=[{ruler: {baseUrl: 'http://x/v1', model: m, budget: {cost: 1}}}]"],
            "spec.rewards[0].ruler.budget.cost",
        ),
        (
            ["rewards=[{ruler: {self: true, timeout: 20m}}]", "rollout.deadlines.group=15m"],
            "spec.rewards[0].ruler.timeout",
        ),
        (["rollout.concurrency=4"], "spec.rollout.concurrency"),
        (["data.train.size=4"], "spec.data.train.size"),
        (["schedule.evalEvery=5"], "spec.schedule.evalEvery"),
        (["learner.accelerator={profile: nvidia, count: 65}"], "spec.learner.accelerator.count"),
        (["learner.replicas=65"], "spec.learner.replicas"),
        (["pendingDeadline=0s"], "spec.pendingDeadline"),
        (["pendingDeadline=12h", "activeDeadline=12h"], "spec.pendingDeadline"),
        (["patches=[{role: tools, template: {}}]"], "spec.patches[0].template"),
        (["patches=[{role: tools, template: {containers: []}}]"], "spec.patches[0].template.containers"),
        (["patches=[{role: tools, template: {spec: []}}]"], "spec.patches[0].template.spec"),
        (["patches=[{role: tools, template: {metadata: null}}]"], "spec.patches[0].template.metadata"),
        (["failurePolicy.rules=[{reason: enigne/*, action: Fail}]"], "spec.failurePolicy.rules[0].reason"),
        (["failurePolicy.rules=[{role: tools, reason: tool/*, action: Fail}]"], "spec.failurePolicy.rules[0].role"),
    ],
)
def test_rules_across_fields(overrides: list[str], path: str) -> None:
    problems = refused(*overrides)
    assert [problem.partition(": ")[0] for problem in problems] == [path]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            "pendingDeadline=0s",
            "spec.pendingDeadline: 0s fails every job, since pods take time to start; use a value such as 30m",
        ),
        (
            "patches=[{role: learner, template: {spec: {}, nodeSelector: {a: b}}}]",
            "spec.patches[0].template.nodeSelector: a pod template has metadata and spec only; put it beneath one of "
            "them",
        ),
        (
            "failurePolicy.rules=[{reason: engin/x, action: Fail}]",
            "spec.failurePolicy.rules[0].reason: 'engin' is not a failure boundary; use one of policy, tool, "
            "sandbox, judge, "
            "engine, infrastructure, user_code, environment",
        ),
        (
            "failurePolicy.rules=[{action: Fail}, {reason: OOMKilled, action: Ignore}]",
            "spec.failurePolicy.rules[1]: is never reached, since rules[0] matches the same failures; move it up or "
            "remove it",
        ),
        ("failurePolicy.rules=[{reason: oom/, action: Fail}]", None),
        ("failurePolicy.rules=[{reason: OOMKilled, action: Restart}]", None),
        ("patches=[{role: engine, template: {spec: {}}}]", None),
        ("pendingDeadline=soon", None),
    ],
)
def test_problems_of_a_failure_policy_and_of_patches_are_reported(overrides: str, problem: str | None) -> None:
    problems = refused(overrides)
    assert len(problems) == 1
    assert problem is None or problems == [problem]


@pytest.mark.parametrize(
    "rules",
    [
        "[]",
        "[{action: Fail}]",
        "[{reason: OOMKilled, action: Ignore}, {action: Fail}]",
        "[{role: tools, action: Ignore}, {reason: OOMKilled, action: Fail}]",
        "[{role: tools, action: Ignore}, {role: judge, action: Fail}]",
        "[{reason: engine/logprob_gap, action: Ignore}, {reason: engine/*, action: Fail}]",
        "[{role: learner, reason: user_code/*, action: Fail}, {reason: user_code/user_code_raised, action: Ignore}]",
        "[{reason: engine/*, action: Fail}, {reason: Error, action: Fail}]",
    ],
)
def test_rules_that_can_all_be_reached_are_accepted(rules: str) -> None:
    job = parse_job(with_overrides(MANIFEST, [f"failurePolicy.rules={rules}"]))
    assert len(job.spec.failure_policy.rules) == len(yaml.safe_load(rules))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("{action: Fail}", "{role: tools, action: Ignore}"),
        ("{reason: Error, action: Fail}", "{role: tools, reason: Error, action: Ignore}"),
        (
            "{role: learner, reason: engine/*, action: Fail}",
            "{role: learner, reason: engine/logprob_gap, action: Ignore}",
        ),
        ("{role: judge, action: Fail}", "{role: judge, action: Fail}"),
    ],
)
def test_a_rule_behind_a_wider_one_is_never_reached(first: str, second: str) -> None:
    (problem,) = refused(f"failurePolicy.rules=[{first}, {second}]")
    assert problem.startswith("spec.failurePolicy.rules[1]: is never reached, since rules[0] ")


def test_a_job_without_a_pending_deadline_waits() -> None:
    assert parse_job(MANIFEST).spec.pending_deadline is None
    spec = parse_job(with_overrides(MANIFEST, ["pendingDeadline=30m", "activeDeadline=12h"])).spec
    assert (spec.pending_deadline, spec.failure_policy.backoff_limit, spec.patches) == (1800.0, 3, [])


def test_a_reward_is_one_kind_only() -> None:
    problems = refused("rewards=[{rule: 'm:f', ruler: {baseUrl: 'http://x', model: m}}]")
    assert problems == ["spec.rewards[0]: give either `rule` or `ruler`, and one of them only"]


def test_overrides_reach_lists_and_new_objects() -> None:
    job = parse_job(
        with_overrides(MANIFEST, ["rewards[0].weight=0.5", "inference.args.max-num-seqs=64", "suspend=true"])
    )
    assert job.spec.rewards[0].weight == 0.5
    assert job.spec.inference.args == {"max-num-seqs": 64}
    assert job.spec.suspend is True
    assert "suspend" not in MANIFEST["spec"]


def test_a_run_can_be_named_by_an_override() -> None:
    assert parse_job(with_overrides(MANIFEST, ["metadata.name=seed-43"])).metadata.name == "seed-43"


@pytest.mark.parametrize(
    "name", ["", "Run", "1st-run", "a.b", "a_b", "-run", "run-", "r" * 64, "lauf-ä", "2026", "run\n"]
)
def test_a_name_that_no_service_can_have_is_refused(name: str) -> None:
    document = copy.deepcopy(MANIFEST)
    document["metadata"]["name"] = name
    assert refused(document=document)[0].startswith("metadata.name: ")


@pytest.mark.parametrize("name", ["r", "run-1", "a1", "r" * 63, "x--y"])
def test_a_valid_service_name_is_accepted(name: str) -> None:
    document = copy.deepcopy(MANIFEST)
    document["metadata"]["name"] = name
    assert parse_job(document).metadata.name == name


@pytest.mark.parametrize("override", ["nonsense", "=1", "rewards[7].weight=1", "data.train.uri.x=1", "data.seed=[1"])
def test_a_malformed_override_is_refused(override: str) -> None:
    assert refused(override)[0].startswith("--set:")


def test_an_invalid_manifest_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="cannot be read"):
        read_job(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [")
    with pytest.raises(UserInputError, match=r"bad\.yaml: not YAML"):
        read_job(bad)
    bad.write_text("a: 1\n---\nb: 2\n")
    with pytest.raises(UserInputError, match="holds 2 documents"):
        read_job(bad)
    bad.write_text("- 1\n")
    with pytest.raises(UserInputError, match="manifest: must be an object"):
        read_job(bad)


def test_the_schema_accepts_what_the_models_accept() -> None:
    schema = job_schema()
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    validator.validate(MANIFEST)
    validator.validate(yaml.safe_load(yaml.safe_dump(parse_job(MANIFEST).model_dump(by_alias=True, mode="json"))))
    assert not validator.is_valid(with_overrides(MANIFEST, ["algorithm.groupsize=4"]))


def test_every_field_of_the_schema_has_a_description() -> None:
    job = job_schema()["$defs"]["Algorithm"]["properties"]
    assert job["maxStaleness"]["description"].startswith("Maximum age in steps of a group in training.")


@given(st.integers(min_value=0, max_value=10**8))
def test_durations_round_trip(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-3)


@pytest.mark.parametrize("text", ["", "5", "5 s", "-5s", "1y", "s", 5, None, True])
def test_an_invalid_duration_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("algorithm.maxGradNorm=.inf", "spec.algorithm.maxGradNorm"),
        ("algorithm.correction.cap=.nan", "spec.algorithm.correction.cap"),
        ("algorithm.logprobGapBound=.inf", "spec.algorithm.logprobGapBound"),
        ("rewards=[{rule: 'm:f', weight: -.inf}]", "spec.rewards[0].weight"),
        ("inference.args.x=.inf", "spec.inference.args.x"),
        ("tools=[{name: a, use: 'm:f', config: {x: [.inf]}}]", "spec.tools[0].config"),
        ("tools=[{name: a, use: 'm:f', config: {day: 2026-01-01}}]", "spec.tools[0].config"),
        ("tools=[{name: a, use: 'm:f', config: {1: x}}]", "spec.tools[0].config"),
        ("rollout.deadlines.tool=-5.0", "spec.rollout.deadlines.tool"),
        ("rollout.deadlines.tool=.nan", "spec.rollout.deadlines.tool"),
        ("rollout.deadlines.tool=0s", "spec.rollout.deadlines.tool"),
        ("rollout.deadlines.tool=0.1ms", "spec.rollout.deadlines.tool"),
        (f"activeDeadline={'9' * 400}s", "spec.activeDeadline"),
        ("data.seed=9223372036854775808", "spec.data.seed"),
        ("inference.replicas=200000", "spec.inference.replicas"),
        ("rollout.replicas=1025", "spec.rollout.replicas"),
        ("inference.contextLength=1000000000", "spec.inference.contextLength"),
        ("schedule.epochs=99999999999", "spec.schedule.epochs"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_field(override: str, path: str) -> None:
    problems = refused(override)
    assert all(problem.startswith(path) for problem in problems)
    assert all(len(problem) < 300 for problem in problems)


def test_a_finished_object_may_be_deleted_at_once() -> None:
    assert parse_job(with_overrides(MANIFEST, ["ttlAfterFinished=0s"])).spec.ttl_after_finished == 0.0


def test_built_in_rewards_with_settings_take_a_config() -> None:
    rewards = [{"rule": "overlong", "config": {"max_tokens": 512, "buffer": 64}}]
    document = {**MANIFEST, "spec": {**MANIFEST["spec"], "rewards": rewards}}
    assert parse_job(document).spec.rewards[0].config == rewards[0]["config"]
    rewards.append({"rule": "math_answer", "config": {"x": 1}})
    assert refused(document=document) == ["spec.rewards[1].config: math_answer takes no config; remove it"]


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        ("{loss: sapo, lossConfig: {positive: 0}}", ".positive: Input should be greater than 0"),
        ("{loss: sapo, lossConfig: {tau: 1}}", ".tau: sapo takes no tau; it takes positive, negative"),
        ("{loss: dppo_tv, lossConfig: {bound: 2}}", ".bound: Input should be less than or equal to 1"),
        ("{name: gspo, lossConfig: {positive: 1}}", ": gspo takes no config; remove it"),
        ("{name: 'mine:Loss', lossConfig: {positive: 1}}", ": mine:Loss has its own loss; use algorithm.config"),
    ],
)
def test_parameters_of_a_loss_are_those_that_it_takes(algorithm: str, problem: str) -> None:
    assert refused(f"algorithm={algorithm}") == [f"spec.algorithm.lossConfig{problem}"]


def test_the_manifest_of_a_run_that_kept_all_episodes_is_still_read() -> None:
    """As version 0.1 wrote its default."""
    assert parse_job(with_overrides(MANIFEST, ["schedule.keepEpisodes=null"])).spec.schedule.keep_episodes is None
