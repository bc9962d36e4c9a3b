"""Stored episodes as lines of text, safe to print."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kestrl._app.episodes.tokens import TokenFacts, row_tokens
from kestrl._app.local.report import transcript
from kestrl.episode import Episode, Group
from kestrl.storage.episodes import GroupOutcome, StoredEpisode, TrainedTokens
from kestrl.terminal import safe, safe_line

LISTED = (
    "step", "group", "episode", "outcome", "reason", "reward", "failure_boundary", "failure_code", "failure_message",
    "stop", "num_turns", "scenario",
)  # fmt: skip
"""Columns of the table that a listed line needs."""
USUAL = frozenset({GroupOutcome.TRAINED, GroupOutcome.EVALUATED})
"""Outcomes that a listed line does not name."""


def listed_line(row: Mapping[str, Any]) -> str:
    """An episode in a list, or a group that failed as a whole."""
    boundary = row["failure_boundary"]
    failure = "" if boundary is None else f" {boundary}/{row['failure_code']}: {row['failure_message']}"
    outcome = "" if row["outcome"] in USUAL else f"  {row['outcome']}"
    label = f"  label {row['label']}" if row["label"] is not None else ""
    if row["episode"] is None:
        reason = failure or f" {row['reason']}"
        return safe_line(f"{row['group']}  step {row['step']}  without episodes{outcome}{reason}")
    reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
    facts = f"{row['episode']}  step {row['step']}  reward {reward}  turns {row['num_turns']}  {row['stop']}"
    return safe_line(f"{facts}{failure}{outcome}{label}")


def episode_lines(stored: StoredEpisode) -> Iterator[str]:
    """An episode: its turns, tool calls and rewards."""
    group, episode = stored.group, stored.episode
    began = datetime.fromtimestamp(episode.started_at, UTC).isoformat(timespec="seconds")
    yield safe_line(
        f"episode {episode.id} of scenario {group.scenario.id}, {began}, {episode.seconds:.2f} s, engine "
        f"{episode.engine}"
    )
    begun = episode.policy.name if episode.policy else "base"
    policy = ", ".join(dict.fromkeys((begun, *(turn.policy for turn in episode.turns))))
    yield safe_line(f"policy {policy}  seed {episode.seed}  trace {episode.trace_id or '-'}")
    reason = f": {stored.stored.reason}" if stored.stored.reason else ""
    yield safe_line(f"step {stored.step}  group {stored.stored.outcome}, attempt {stored.stored.attempt}{reason}")
    yield safe(f"ground truth: {json.dumps(group.scenario.ground_truth, ensure_ascii=False)}")
    yield from transcript(episode)
    for call in episode.tool_calls:
        yield safe_line(f"  turn {call.turn} call {call.name or '?'} {call.outcome} in {call.seconds * 1000:.1f} ms")
    for name, state in sorted(episode.environments.items()):
        yield safe_line(f"  environment {name}: {json.dumps(state, ensure_ascii=False)}")
    for name, reported in sorted(episode.info.items()):
        yield safe_line(f"  info {name}: {json.dumps(reported, ensure_ascii=False)}")
    for name, number in sorted(episode.rewards.items()):
        yield safe_line(f"  reward {name}: {number:.4f}")
    for name, number in sorted(episode.metrics.items()):
        yield safe_line(f"  metric {name}: {number:.4f}")
    if episode.answer is not None:
        yield safe_line(f"  answer: {json.dumps(episode.answer, ensure_ascii=False)}")
    for name, details in sorted(episode.scoring.items()):
        yield safe_line(f"  {name}: {json.dumps(details, ensure_ascii=False)}")


def judge_lines(group: Group) -> Iterator[str]:
    """Every request to a judge model for a group, with its reply or why there was none."""
    for name, details in sorted(group.scoring.items()):
        if "skipped" in details:
            yield safe_line(f"{name}: not asked, {details['skipped']}")
        for call in details.get("calls", ()):
            order = ", ".join(
                f"{label} is {'/'.join(ids)}" for label, ids in zip(call["ids"], call["order"], strict=True)
            )
            yield safe_line(f"{name}: {call['model']}, order by seed {call['seed']}: {order}")
            for message in call["messages"]:
                yield safe(f"{message['role']}: {message['content']}")
            yield safe(f"reply: {call.get('content', '')}" if "error" not in call else f"no scores: {call['error']}")


def token_lines(episode: Episode, tokens: TrainedTokens | None, texts: Sequence[Sequence[str]] | None) -> Iterator[str]:
    """Every token of an episode: position, id, mask, log-probs, advantage, policy and text.

    Args:
        episode: The episode.
        tokens: What training computed on its sampled tokens.
        texts: Of the tokens of each row.
    """
    for number, row in enumerate(row_tokens(episode, tokens)):
        yield f"row {number}: {len(row)} tokens, {sum(token.sampled for token in row)} sampled"
        for token in row:
            columns = [_numbers(token, trained=tokens is not None), token.policy]
            columns += [] if texts is None else [json.dumps(texts[number][token.position], ensure_ascii=False)]
            yield safe_line("  ".join(column for column in columns if column).rstrip())


def _numbers(token: TokenFacts, *, trained: bool) -> str:
    mask, logprob = int(token.sampled), _number(token.logprob, 6)
    columns = f"  {token.position:5d}  id {token.id:6d}  mask {mask}  logprob {logprob:>12}"
    if not trained:
        return columns
    return f"{columns}  learner {_number(token.learner, 6):>12}  advantage {_number(token.advantage, 4):>9}"


def _number(number: float | None, digits: int) -> str:
    return "-" if number is None else f"{number:.{digits}f}"
