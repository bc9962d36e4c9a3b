"""A job whose agent is a function with OpenAI's own client: it learns, and what it does wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kestrl._app.local.rundir import RunDir
from kestrl.episode import Purpose, StopReason
from kestrl.storage import open_store
from kestrl.storage.episodes import GroupOutcome, ObjectEpisodeStore

from .runs import belonging_to, kestrl, summary_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("own-agent"), pytest.mark.share(3)]
AGENT = '''\
"""Repeats a word, by OpenAI's client."""

import openai


class Rambling(Exception):
    """The model wrote more than a word."""


def agent(row, base_url, key, deadline, longest):
    if row["id"] == "repeat-lamp":
        raise KeyError("no lamp")
    with openai.OpenAI(base_url=base_url, api_key=key) as client:
        reply = client.chat.completions.create(model="policy", messages=row["messages"])
    answer = reply.choices[0].message.content or ""
    if len(answer) > longest:
        raise Rambling(answer)
    reward = 0.5 * (answer == row["ground_truth"])
    return {"metrics": {"characters": len(answer)}, "reward": reward, "info": {"answer": answer}}
'''
JOB = {
    "agent": {
        "run": "mine:agent",
        "config": {"longest": 45},
        "stops": {"mine.Rambling": "model_behavior"},
        "stoppedReward": 0,
        "maxTurns": 1,
        "maxTokens": 16,
    },
    "rewards": [{"rule": "rewards:repeated"}, {"rule": "loop_reward"}],
    "schedule": {"epochs": 12, "maxSteps": 10},
}
RISE = 0.3
"""Least rise of the reward at the training temperature; seen was 1.17 in ten steps."""


def test_a_bare_client_is_trained(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    kestrl("new", "--template", "reward-only", folder)
    (folder / "mine.py").write_text(AGENT, encoding="utf-8")
    document = yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8"))
    document["spec"].update(JOB)
    (folder / "job.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    kestrl("run", folder / "job.yaml", "--runs", folder / "runs")
    run = RunDir(folder / "runs" / "repeat-1")
    summary = summary_of(run)
    assert summary["after"]["sampled_reward"] >= summary["before"]["sampled_reward"] + RISE, summary
    assert list(summary["failures"]) == ["user_code/agent_raised"]
    stored = ObjectEpisodeStore(open_store(f"file://{run.path}"))
    episodes = [
        episode
        for step in stored.steps(Purpose.TRAIN)
        for each in stored.read(Purpose.TRAIN, step).stored
        if each.outcome is GroupOutcome.TRAINED
        for episode in each.group.episodes
    ]
    assert len(episodes) == 10 * 40
    assert "repeat-lamp" not in {episode.scenario_id for episode in episodes}
    for episode in episodes:
        assert episode.failure is None
        assert sum(sum(row.mask) for row in episode.rows) == episode.metrics["sampled_tokens"]
        stopped = episode.stop_reason is StopReason.MODEL_BEHAVIOR
        assert stopped == ("stopped_by.Rambling" in episode.metrics)
        assert stopped or len(str(episode.info["answer"])) == episode.metrics["characters"] <= 45
        assert episode.rewards["loop_reward"] == episode.loop_reward
    assert any(episode.stop_reason is StopReason.MODEL_BEHAVIOR for episode in episodes)
    assert belonging_to(tmp_path) == []
