"""CEL rules of the CustomResourceDefinitions, by their place in the schema, with the messages of `rules.py` where both
exist. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from kestrl.episode.deadlines import NESTING

IDENTITY = ("model", "data", "agent", "tools", "rewards", "sampling", "evaluation", "algorithm")
"""Immutable parts of the spec, which identify a run."""
OPTIONAL = frozenset({"rewards"})
"""Those that have no default in the schema and may be missing."""


Rules = Mapping[tuple[str, ...], tuple[dict[str, str], ...]]
"""CEL rules by their position in the schema; `[]` is an item of a list."""


def rule(expression: str, message: str, path: str | None = None) -> dict[str, str]:
    """A CEL rule; `path` is the reported field."""
    return {"rule": expression, "message": message} | ({} if path is None else {"fieldPath": path})


def _unchanged(part: str) -> dict[str, str]:
    """The rule that a part of the spec does not change; `OPTIONAL` ones may be missing."""
    same = f"self.{part} == oldSelf.{part}"
    if part in OPTIONAL:
        same = f"has(self.{part}) == has(oldSelf.{part}) && (!has(self.{part}) || {same})"
    return rule(same, f"{part} cannot change under a job; make another job", f".{part}")


SPEC_RULES = (
    *map(_unchanged, IDENTITY),
    {
        **rule(
            "has(self.rewards) || has(self.environment)",
            "name a rule or a judge model; environment alone brings a reward of its own",
            ".rewards",
        ),
        "reason": "FieldValueRequired",
    },
    rule(
        "has(self.storage.uri) == has(oldSelf.storage.uri) && (!has(self.storage.uri) || self.storage.uri == "
        "oldSelf.storage.uri)",
        "storage.uri cannot change under a job: its run lies there; make another job",
        ".storage.uri",
    ),
    rule(
        "self.inference.adapterSlots >= self.algorithm.maxStaleness + 2",
        "cannot hold every version a rollout may still need: maxStaleness + 2; raise it or lower "
        "algorithm.maxStaleness",
        ".inference.adapterSlots",
    ),
    rule(
        "self.algorithm.groupSize <= self.rollout.concurrency",
        "cannot hold one group of algorithm.groupSize; raise it",
        ".rollout.concurrency",
    ),
    rule(
        "self.agent.maxTokens < self.inference.contextLength",
        "leaves no room for a prompt in inference.contextLength; lower it or raise contextLength",
        ".agent.maxTokens",
    ),
    rule(
        "!has(self.schedule.evalEvery) || has(self.data.validation)",
        "there is nothing to evaluate on: add data.validation",
        ".schedule.evalEvery",
    ),
)
PLACED_RULES: Rules = {
    ("spec",): SPEC_RULES,
    ("spec", "rollout", "deadlines"): (
        rule("duration(self.tool) < duration(self.turn)", NESTING, ".turn"),
        rule(
            "duration(self.turn) < duration(self.episode)",
            NESTING,
            ".episode",
        ),
        rule(
            "!has(self.group) || duration(self.episode) < duration(self.group)",
            NESTING,
            ".group",
        ),
        rule(
            "!has(self.step) || duration(has(self.group) ? self.group : self.episode) < duration(self.step)",
            NESTING,
            ".step",
        ),
    ),
    ("spec", "algorithm"): (
        rule("self.groupSize >= 2", "episodes are scored relative to their group: it needs at least 2", ".groupSize"),
        rule(
            "self.onFailedEpisode != 'shrink' || self.minGroupSize <= self.groupSize",
            "is above groupSize; lower it",
            ".minGroupSize",
        ),
        rule(
            "self.miniBatches <= self.groupsPerStep",
            "is above groupsPerStep, so that an update would have no group; lower it",
            ".miniBatches",
        ),
        rule(
            "self.correction.low <= self.correction.high",
            "correction.low is above correction.high; lower it",
            ".correction.low",
        ),
        rule(
            "self.correction.rejectBelow <= self.correction.rejectAbove",
            "correction.rejectBelow is above correction.rejectAbove; lower it",
            ".correction.rejectBelow",
        ),
    ),
    ("spec", "sampling"): (
        rule(
            "self.temperature > 0.0",
            "0 samples the same episode every time, so there is nothing to learn from; use 1.0",
            ".temperature",
        ),
    ),
    ("spec", "evaluation"): (
        rule(
            "!has(self.temperature) || self.temperature > 0.0 || self.samples == 1",
            "0 samples the same episode several times; raise it, or set samples to 1",
            ".temperature",
        ),
        rule(
            "!has(self.temperature) || self.temperature > 0.0 || (self.topP == 1.0 && self.topK == 0)",
            "0 takes the most probable token, whatever topP and topK are; raise it, or set them to 1 and 0",
            ".temperature",
        ),
    ),
    ("spec", "failurePolicy", "rules", "[]"): (
        rule(
            "!has(self.role) || self.role == 'learner' || !self.reason.contains('/')",
            "only the learner reports failures as boundary/code; remove role, or name a container's reason such as "
            "OOMKilled",
            ".role",
        ),
    ),
    ("spec", "tools", "[]"): (
        rule(
            "(has(self.use) ? 1 : 0) + (has(self.mcp) ? 1 : 0) + (has(self.http) ? 1 : 0) == 1",
            "give use, mcp or http, and one of them only",
        ),
        rule(
            "!has(self.http) || has(self.http.openapi) != has(self.http.endpoints)",
            "give either openapi or endpoints, and one of them only",
            ".http",
        ),
        rule(
            "!has(self.mcp) || has(self.mcp.command) != has(self.mcp.url)",
            "give either command or url, and one of them only",
            ".mcp",
        ),
    ),
    ("spec", "rewards", "[]"): (
        rule("has(self.rule) != has(self.ruler)", "give either rule or ruler, and one of them only"),
        rule(
            "!has(self.ruler) || has(self.ruler.baseUrl) != (has(self.ruler.self) && self.ruler.self)",
            "give baseUrl and model of an OpenAI-compatible server, or self: true, and one of them only",
            ".ruler",
        ),
        rule(
            "!has(self.ruler) || has(self.ruler.baseUrl) == has(self.ruler.model)",
            "give the name of the judge model on the server, with baseUrl",
            ".ruler.model",
        ),
        rule("!has(self.correctness) || has(self.rule)", "belongs to a rule; a ruler takes none", ".correctness"),
        rule(
            "!has(self.correctness) || has(self.correctness.baseUrl) != "
            "(has(self.correctness.self) && self.correctness.self)",
            "give baseUrl and model of an OpenAI-compatible server, or self: true, and one of them only",
            ".correctness",
        ),
        rule(
            "!has(self.correctness) || has(self.correctness.baseUrl) == has(self.correctness.model)",
            "give the name of the judge model on the server, with baseUrl",
            ".correctness.model",
        ),
    ),
}
"""CEL rules of AgentRLJob."""
_SOURCE_RULES = (
    rule("has(self.uri) != has(self.episodes)", "give either uri or episodes, and one of them only"),
    rule("!has(self.minReward) || has(self.episodes)", "selects episodes; rows have no reward", ".minReward"),
)
SFT_RULES: Rules = {
    ("spec",): (rule("self == oldSelf", "the spec cannot change under a job; make another job"),),
    ("spec", "data", "train"): _SOURCE_RULES,
    ("spec", "data", "validation"): _SOURCE_RULES,
}
"""CEL rules of SFTJob."""
