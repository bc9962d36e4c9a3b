"""Episodes of linear loops, token for token as recorded: what the worker makes of them does not change by one token.

`KESTRL_RECORD=1` records them anew, which is right only where a change of tokens is intended.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import Completion, Fault, Prompt
from tests.unit.rollout.test_forks import BEHIND_CALLS, OPENED

from kestrl.episode import Episode

RECORDED = Path(__file__).parents[3] / "data" / "golden_episodes.json"
REVISING = """
from kestrl.agents import LimitReached

class Agent:
    async def run(self, conversation):
        for question in ("Are you sure?", "Again, please.", "And in one word?"):
            reply = await conversation.generate()
            if reply is None:
                return
            if reply.calls:
                await conversation.call_tools(reply.calls)
            conversation.append_user(question)
        await conversation.generate()
"""


def written(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


REPLIES = (
    written("search", word="kestrel"),
    "<think>Which bird?</think>\n" + written("search", word="falcon") + written("search", word="é"),
    written("fly", height=3) + "\nand then?",
    "<tool_call>{'name'}</tool_call>",
    written("answer", text="42"),
    "<think>A falcon, I think.</think>It is a small falcon.",
    "It is a kestrel.",
    written("search", word="owl"),
)


def by_seed(stage: Any, before: str = "") -> Callable[[Prompt], Completion]:
    """An answer that depends on nothing but the seed."""

    def script(prompt: Prompt) -> Completion:
        text = REPLIES[int(prompt.sampling["seed"]) % len(REPLIES)]
        return Completion(token_ids=stage.ids(before + text + "<|im_end|>"))

    return script


def by_seed_after_thoughts(stage: Any) -> Callable[[Prompt], Completion]:
    return by_seed(stage, "A falcon?\n</think>\n\n")


def fails_first(stage: Any) -> Callable[[Prompt], Completion | Fault]:
    """As `by_seed`, but the first request of each prompt is refused."""
    seen, answer = set[tuple[int, ...]](), by_seed(stage)

    def script(prompt: Prompt) -> Completion | Fault:
        key = (int(prompt.sampling["seed"]), *prompt.token_ids)
        if key in seen:
            return answer(prompt)
        seen.add(key)
        return Fault(status=503)

    return script


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def facts(episode: Episode, prompts: list[Prompt]) -> dict[str, Any]:
    """Everything of an episode that tokens decide."""
    return {
        "id": episode.id,
        "seed": episode.seed,
        "stop": episode.stop_reason,
        "failure": None if episode.failure is None else episode.failure.code,
        "rows": [
            [len(row.mask), digest(row.token_ids.tobytes(), row.mask, row.logprobs.tobytes())] for row in episode.rows
        ],
        "turns": [
            [
                *(turn.index, turn.row, turn.start, turn.finish_reason, turn.text, turn.reasoning_opened),
                list(episode.rows[turn.row].token_ids[turn.start : turn.end]),
            ]
            for turn in episode.turns
        ],
        "calls": [[call.turn, call.name, call.outcome, call.text] for call in episode.tool_calls],
        "messages": episode.messages,
        "final": episode.final_text,
        "metrics": {name: value for name, value in sorted(episode.metrics.items()) if name != "correct"},
        "sent": sorted(
            [prompt.sampling["seed"], prompt.sampling["max_tokens"], len(prompt.token_ids)]
            for prompt in prompts
            if any(prompt.sampling["seed"] == seed for seed in _seeds(episode))
        ),
    }


def _seeds(episode: Episode) -> list[int]:
    return [
        int.from_bytes(hashlib.blake2b(f"{episode.seed}:{turn}".encode(), digest_size=8).digest(), "little") >> 1
        for turn in range(len(episode.turns) + 1)
    ]


CASES: dict[str, dict[str, Any]] = {
    "one turn": {"agent": "single_turn", "sampling": {"max_tokens": 60}},
    "one turn, greedy": {
        "agent": "single_turn",
        "sampling": {"max_tokens": 40, "temperature": 0.0},
        "purpose": "evaluation",
    },
    "tools": {"script": by_seed},
    "tools, other seeds": {"script": by_seed, "seed": 1000, "size": 6},
    "tools, few turns": {"script": by_seed, "seed": 40, "sampling": {"max_turns": 2}},
    "tools, cut turns": {"script": by_seed, "seed": 50, "sampling": {"max_tokens_per_turn": 45}},
    "tools, cut episode": {"script": by_seed, "seed": 60, "sampling": {"max_tokens": 130}},
    "tools, one call at a time": {"script": by_seed, "seed": 70, "max_parallel_calls": 1},
    "tools, engines that fail": {"script": fails_first, "engines": 2},
    "any tokens": {"seed": 80, "sampling": {"max_tokens": 120, "max_tokens_per_turn": 50}},
    "tools, a template that writes turns anew": {"script": by_seed_after_thoughts, "template": OPENED, "seed": 1000},
    "tools, results behind calls": {"script": by_seed_after_thoughts, "template": BEHIND_CALLS, "seed": 1000},
    "questions": {"agent": REVISING, "script": by_seed},
    "questions, forgotten reasoning": {
        "agent": REVISING,
        "script": by_seed,
        "template": "forgetful",
        "seed": 1000,
        "size": 8,
    },
    "questions, any tokens": {"agent": REVISING, "sampling": {"max_tokens": 90, "max_tokens_per_turn": 30}},
}


@pytest.mark.parametrize("name", CASES)
async def test_the_tokens_are_those_recorded(
    name: str,
    make_stage: Any,
    make_file: Callable[[str, str], str],
    write_model: Callable[..., Path],
    forgetful_template: str,
) -> None:
    case = dict(CASES[name])
    settings = {key: case.pop(key) for key in ("engines", "max_parallel_calls") if key in case}
    agent = case.pop("agent", "tool_agent")
    settings["agent"] = agent if agent != REVISING else make_file("revising", REVISING) + ":Agent"
    if template := case.pop("template", None):
        template = forgetful_template if template == "forgetful" else template
        settings |= {"folder": write_model(template=template), "offers_tools": True, "tool_call_format": "hermes"}
    stage = await make_stage(**settings)
    if script := case.pop("script", None):
        script = script(stage)
        for engine in stage.engines:
            engine.script = script
    group = await stage.run(**{"size": 3, **case})
    prompts = [prompt for engine in stage.engines for prompt in engine.prompts]
    seen = json.loads(json.dumps([facts(episode, prompts) for episode in group.episodes]))
    golden: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    if os.environ.get("KESTRL_RECORD"):
        golden[name] = seen
        RECORDED.write_text(json.dumps(golden, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
    assert seen == golden[name]
