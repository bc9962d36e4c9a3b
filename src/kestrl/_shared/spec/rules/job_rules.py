"""Cross-field rules: pure functions from a spec to problems, each with its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kestrl._shared.spec.algorithms import OF_COMPONENTS, PRESETS
from kestrl._shared.spec.job import Evaluation, FailureRule, JobSpec
from kestrl._shared.spec.problems import Problem
from kestrl._shared.spec.rules.adapter_rules import target_problems
from kestrl._shared.spec.rules.agent_rules import agent_problems
from kestrl._shared.spec.rules.config_rules import config_problems, loss_config_problems, reward_config_problems
from kestrl._shared.spec.rules.engine_rules import engine_problems
from kestrl._shared.spec.rules.environment_rules import environment_problems
from kestrl._shared.spec.rules.file_rules import file_problems
from kestrl._shared.spec.rules.judge_rules import judge_problems
from kestrl._shared.spec.rules.learner_rules import checkpointing_problems, offload_problems
from kestrl._shared.spec.rules.tool_rules import tool_problems
from kestrl._shared.spec.scalars import format_duration
from kestrl.agents.registry import BUILT_IN as LOOPS
from kestrl.engines.registry import DIALECTS
from kestrl.episode.deadlines import NESTING, overlaps
from kestrl.errors import Boundary
from kestrl.rewards.registry import BUILT_IN as REWARDS

Rule = Callable[[JobSpec], Iterator[Problem]]


def deadlines_nest(spec: JobSpec) -> Iterator[Problem]:
    limits = spec.rollout.deadlines
    for inside, short, outside, long in overlaps(**dict(limits)):
        yield Problem(
            f"spec.rollout.deadlines.{outside}",
            f"{format_duration(long)} does not leave room for {inside} ({format_duration(short)}); {NESTING}, so raise "
            f"{outside} or lower {inside}",
        )
    if spec.active_deadline is not None and spec.active_deadline <= limits.episode:
        yield Problem("spec.activeDeadline", "must be longer than rollout.deadlines.episode, or no episode can end")


def temperature_is_positive(spec: JobSpec) -> Iterator[Problem]:
    if spec.sampling.temperature == 0:
        yield Problem(
            "spec.sampling.temperature",
            "0 samples the same episode every time, so there is nothing to learn from; use 1.0 (evaluation is greedy "
            "anyway)",
        )


def greedy_problem(evaluation: Evaluation) -> str | None:
    """What contradicts temperature 0."""
    if evaluation.temperature != 0:
        return None
    if evaluation.samples > 1:
        return f"0 samples the same episode {evaluation.samples} times; raise it, or set samples to 1"
    if evaluation.top_p < 1 or evaluation.top_k:
        return "0 takes the most probable token, whatever topP and topK are; raise it, or set them to 1 and 0"
    return None


def evaluation_samples_differ(spec: JobSpec) -> Iterator[Problem]:
    problem = greedy_problem(spec.evaluation)
    if problem is not None:
        yield Problem("spec.evaluation.temperature", problem)


def components_are_compared(spec: JobSpec) -> Iterator[Problem]:
    """What works on an episode's total reward has no part in an estimator that compares its components."""
    algorithm = spec.algorithm
    preset = PRESETS.get(algorithm.name)
    name = preset and (algorithm.advantage or preset.advantage)
    if preset is None or name not in OF_COMPONENTS:
        return
    if algorithm.kl.coefficient > 0 and algorithm.kl.place == "reward":
        yield Problem(
            "spec.algorithm.kl.place",
            f"`reward` changes the total reward, and {name} compares the components of the reward; use `loss`",
        )
    if preset.dynamic_sampling if algorithm.dynamic_sampling is None else algorithm.dynamic_sampling:
        yield Problem(
            "spec.algorithm.dynamicSampling",
            f"refuses groups with equal totals, from whose components {name} learns; set it to false",
        )


def group_is_large_enough(spec: JobSpec) -> Iterator[Problem]:
    algorithm = spec.algorithm
    if algorithm.group_size < 2:
        yield Problem(
            "spec.algorithm.groupSize",
            f"{algorithm.name} scores episodes relative to their group: it needs at least 2, is {algorithm.group_size}",
        )
    elif algorithm.on_failed_episode == "shrink" and algorithm.min_group_size > algorithm.group_size:
        yield Problem("spec.algorithm.minGroupSize", f"is above groupSize ({algorithm.group_size}); lower it")
    if algorithm.mini_batches > algorithm.groups_per_step:
        yield Problem(
            "spec.algorithm.miniBatches",
            f"is above groupsPerStep ({algorithm.groups_per_step}), so that an update would have no group; lower it",
        )
    if algorithm.correction.low > algorithm.correction.high:
        yield Problem("spec.algorithm.correction.low", f"is above high ({algorithm.correction.high:g}); lower it")
    if algorithm.correction.reject_below > algorithm.correction.reject_above:
        yield Problem(
            "spec.algorithm.correction.rejectBelow",
            f"is above rejectAbove ({algorithm.correction.reject_above:g}); lower it",
        )


def slots_hold_every_version(spec: JobSpec) -> Iterator[Problem]:
    needed = spec.algorithm.max_staleness + 2
    if spec.inference.adapter_slots < needed:
        yield Problem(
            "spec.inference.adapterSlots",
            f"{spec.inference.adapter_slots} cannot hold every version a rollout may still need: "
            f"maxStaleness + 2 = {needed}; raise it or lower maxStaleness",
        )


def turns_can_be_taken(spec: JobSpec) -> Iterator[Problem]:
    inference, learner, place = spec.inference, spec.learner, "spec.inference.sharing"
    if inference.sharing != "turns":
        return
    if spec.algorithm.max_staleness:
        yield Problem(
            place,
            f"turns needs algorithm.maxStaleness 0, as no group is rolled out during an update, and it is "
            f"{spec.algorithm.max_staleness}; lower it or use split",
        )
    if DIALECTS[inference.engine].sleep_routes is None:
        yield Problem(place, f"turns needs an engine that can sleep, which {inference.engine} cannot; use split")
    profiles = inference.accelerator.profile, learner.accelerator.profile
    if "cpu" in profiles or len(set(profiles)) > 1:
        yield Problem(
            place,
            f"turns is for a device that engine and learner share, and their profiles are {' and '.join(profiles)}; "
            "give both one of a device, or use split",
        )
    if not inference.replicas.fixed or inference.replicas.min > 1:
        yield Problem(place, "turns is for one engine, beside the learner; set inference.replicas to 1, or use split")
    if learner.replicas * learner.accelerator.count > 1:
        yield Problem(place, "turns needs a learner of one rank; lower learner.accelerator.count, or use split")


def groups_continue_over_updates(spec: JobSpec) -> Iterator[Problem]:
    if spec.schedule.stale_groups == "continue" and spec.algorithm.max_staleness == 0:
        yield Problem(
            "spec.schedule.staleGroups",
            "`continue` has nothing to continue: with maxStaleness 0 no group runs while a step trains; raise "
            "algorithm.maxStaleness, or use `release` or `wait`",
        )


def rank_fits_the_engine(spec: JobSpec) -> Iterator[Problem]:
    rank, limits = spec.model.adapter.rank, DIALECTS[spec.inference.engine].ranks
    if limits and rank > limits[-1]:
        yield Problem("spec.model.adapter.rank", f"{rank} is above the engine's limit of {limits[-1]}; lower it")


def adapter_can_be_proved(spec: JobSpec) -> Iterator[Problem]:
    yield from target_problems(spec.model.adapter)


def tokens_fit_the_context(spec: JobSpec) -> Iterator[Problem]:
    agent = spec.agent
    loops = [LOOPS[path] for path in (agent.loop, *agent.loops.values()) if path in LOOPS]
    several_rows = agent.outside is not None or any(loop.compacts for loop in loops)
    if agent.max_tokens >= spec.inference.context_length and not several_rows:
        yield Problem(
            "spec.agent.maxTokens",
            f"{agent.max_tokens} sampled tokens leave no room for a prompt in inference.contextLength "
            f"({spec.inference.context_length}); lower it or raise contextLength",
        )
    if agent.max_tokens_per_turn is not None and agent.max_tokens_per_turn > agent.max_tokens:
        yield Problem("spec.agent.maxTokensPerTurn", f"is above maxTokens ({agent.max_tokens}); lower it")


def loop_is_known(spec: JobSpec) -> Iterator[Problem]:
    loop = spec.agent.loop
    paths = {"loop": loop, **{f"loops.{name}": path for name, path in spec.agent.loops.items()}}
    for field, path in paths.items():
        if ":" not in path and path not in LOOPS:
            yield Problem(
                f"spec.agent.{field}",
                f"{path!r} is not one of {', '.join(LOOPS)}, nor an import path package.module:Class",
            )
    configured = {"config": (loop, spec.agent.config)}
    for name, config in spec.agent.loops_config.items():
        if name not in spec.agent.loops:
            names = ", ".join(spec.agent.loops) or "none"
            yield Problem(f"spec.agent.loopsConfig.{name}", f"there is no loop of this name in agent.loops ({names})")
        else:
            configured[f"loopsConfig.{name}"] = (spec.agent.loops[name], config)
    for field, (path, config) in configured.items():
        if field == "config" and spec.agent.outside:
            continue
        if path in LOOPS:
            yield from config_problems(
                f"spec.agent.{field}", path, LOOPS[path].config, config, otherwise=", or use your own loop"
            )
        at, context = config.get("at"), spec.inference.context_length
        if path == "compacting_agent" and isinstance(at, int) and at >= context:
            yield Problem(
                f"spec.agent.{field}.at",
                f"{at} leaves no room for a summary in inference.contextLength, {context}; lower it",
            )


def rewards_are_known(spec: JobSpec) -> Iterator[Problem]:
    for index, reward in enumerate(spec.rewards):
        if reward.rule is not None and ":" not in reward.rule and reward.rule not in REWARDS:
            yield Problem(
                f"spec.rewards[{index}].rule",
                f"{reward.rule!r} is not one of {', '.join(REWARDS)}, nor an import path package.module:function",
            )
        if reward.rule == "loop_reward" and spec.agent.loop in LOOPS and not spec.agent.outside:
            yield Problem(
                f"spec.rewards[{index}].rule",
                f"{spec.agent.loop} returns no reward; set agent.loop to your own loop, or use another rule",
            )


def a_group_fits_a_worker(spec: JobSpec) -> Iterator[Problem]:
    if spec.algorithm.group_size > spec.rollout.concurrency:
        yield Problem(
            "spec.rollout.concurrency",
            f"{spec.rollout.concurrency} cannot hold one group of {spec.algorithm.group_size}; raise it",
        )


def data_fills_a_step(spec: JobSpec) -> Iterator[Problem]:
    size = spec.data.train.size
    if size is not None and size * spec.schedule.epochs < spec.algorithm.groups_per_step:
        yield Problem(
            "spec.data.train.size",
            f"{size} scenarios x {spec.schedule.epochs} epochs do not fill one step of "
            f"{spec.algorithm.groups_per_step} groups",
        )


def evaluation_has_data(spec: JobSpec) -> Iterator[Problem]:
    if spec.schedule.eval_every is not None and spec.data.validation is None:
        yield Problem("spec.schedule.evalEvery", "there is nothing to evaluate on: add data.validation")


def a_wait_for_pods_can_end(spec: JobSpec) -> Iterator[Problem]:
    limit, active = spec.pending_deadline, spec.active_deadline
    if limit == 0:
        yield Problem(
            "spec.pendingDeadline", "0s fails every job, since pods take time to start; use a value such as 30m"
        )
    elif limit is not None and active is not None and limit >= active:
        yield Problem(
            "spec.pendingDeadline",
            f"is never reached, since activeDeadline ({format_duration(active)}) comes first; lower it or remove it",
        )


def failure_rules_can_fit(spec: JobSpec) -> Iterator[Problem]:
    rules = spec.failure_policy.rules
    for index, rule in enumerate(rules):
        path = f"spec.failurePolicy.rules[{index}]"
        boundary, code, _ = rule.reason.partition("/")
        if code and boundary not in set(Boundary):
            yield Problem(f"{path}.reason", f"{boundary!r} is not a failure boundary; use one of {', '.join(Boundary)}")
        elif code and rule.role not in {None, "learner"}:
            yield Problem(
                f"{path}.role",
                "only the learner reports failures as boundary/code; remove role, or name a container's reason such "
                "as OOMKilled",
            )
        first = next((number for number, former in enumerate(rules[:index]) if _covers(former, rule)), None)
        if first is not None:
            yield Problem(
                path, f"is never reached, since rules[{first}] matches the same failures; move it up or remove it"
            )


def _covers(former: FailureRule, latter: FailureRule) -> bool:
    """Whether a rule matches every failure that another one matches."""
    reasons = former.reason in {"*", latter.reason} or (
        former.reason.endswith("/*") and latter.reason.startswith(former.reason[:-1])
    )
    return reasons and former.role in {None, latter.role}


def patches_are_of_templates(spec: JobSpec) -> Iterator[Problem]:
    for index, patch in enumerate(spec.patches):
        path = f"spec.patches[{index}].template"
        if not patch.template and not patch.remove:
            yield Problem(path, "changes nothing; give it metadata or spec, or remove the patch")
        for field, value in patch.template.items():
            if field not in {"metadata", "spec"}:
                yield Problem(
                    f"{path}.{field}", "a pod template has metadata and spec only; put it beneath one of them"
                )
            elif not isinstance(value, dict):
                yield Problem(f"{path}.{field}", "must be a map")


def offloading_saves_memory(spec: JobSpec) -> Iterator[Problem]:
    learner = spec.learner
    yield from offload_problems(
        offload=learner.activation_offload,
        checkpointing=learner.gradient_checkpointing,
        on_cpu=learner.accelerator.profile == "cpu",
    )
    yield from checkpointing_problems(layers=learner.checkpointed_layers, checkpointing=learner.gradient_checkpointing)


RULES: tuple[Rule, ...] = (
    deadlines_nest,
    temperature_is_positive,
    evaluation_samples_differ,
    group_is_large_enough,
    components_are_compared,
    slots_hold_every_version,
    turns_can_be_taken,
    groups_continue_over_updates,
    rank_fits_the_engine,
    adapter_can_be_proved,
    tokens_fit_the_context,
    offloading_saves_memory,
    tool_problems,
    environment_problems,
    loop_is_known,
    agent_problems,
    rewards_are_known,
    reward_config_problems,
    loss_config_problems,
    judge_problems,
    a_group_fits_a_worker,
    data_fills_a_step,
    file_problems,
    evaluation_has_data,
    engine_problems,
    a_wait_for_pods_can_end,
    failure_rules_can_fit,
    patches_are_of_templates,
)


def check(spec: JobSpec) -> list[Problem]:
    """All cross-field problems, in the order of the rules."""
    return [problem for rule in RULES for problem in rule(spec)]
