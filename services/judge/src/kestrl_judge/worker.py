"""`python -m kestrl_judge.worker`: one reward function, run on one episode after another.

A process of its own, so that a reward that hangs, crashes or exits takes nothing with it. It talks to the judge over a socket it
inherits; what the reward prints goes to the judge's log. It dies with the judge: by the kernel's word while it works, by the end
of the socket while it waits.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.errors import Boundary, Failure, JudgeFailure, UserCodeError, UserInputError
from kestrl.rewards import Attempt, Score
from kestrl.rewards.checking import as_score
from kestrl.rewards.resolving import Reward, is_built_in, resolve
from kestrl.rpc.codec import episode_from_proto, failure_to_proto, scenario_from_proto
from kestrl_judge.frames import read_frame, write_frame

PR_SET_PDEATHSIG = 1
MAX_MESSAGE = 500


@dataclass(frozen=True, slots=True)
class Rule:
    """A reward function, loaded."""

    name: str
    function: Reward
    built_in: bool
    runner: asyncio.Runner
    """One event loop for the process's life, so that what an async reward opens can be kept."""

    def score(self, attempt: Attempt) -> Score:
        """Scores one episode.

        Raises:
            JudgeFailure: A built-in raised, or what came back is no finite number.
            UserCodeError: A user's function raised.
        """
        return as_score(self.name, self._returned(attempt))

    def _returned(self, attempt: Attempt) -> object:
        try:
            returned: Any = self.function(attempt)
            return self.runner.run(_awaited(returned)) if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            raised = JudgeFailure if self.built_in else UserCodeError
            message = f"{self.name}: {type(error).__name__}: {error}"[:MAX_MESSAGE]
            # The wire carries UTF-8, and an error may quote what is not.
            raise raised(message.encode("utf-8", "replace").decode(), code="reward_raised") from error


async def _awaited(returned: Any) -> object:
    return await returned


def answer(rule: Rule, request: pb.ScoreGroupRequest) -> pb.EpisodeScore:
    """The score of the one episode in a request, or why there is none."""
    episode = episode_from_proto(request.group.episodes[0])
    attempt = Attempt(
        scenario=scenario_from_proto(request.group.scenario), episode=episode, max_turns=request.max_turns
    )
    try:
        score = rule.score(attempt)
    except (JudgeFailure, UserCodeError) as error:
        return pb.EpisodeScore(episode_id=episode.id, failure=failure_to_proto(error.failure()))
    return pb.EpisodeScore(episode_id=episode.id, reward=score.value, metrics=score.metrics)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--name", "--rule", "--field"):
        parser.add_argument(option, required=True)
    for option in ("--socket", "--parent"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--path", action="append", default=[])
    options = parser.parse_args()
    die_with(options.parent)
    sys.path[:0] = options.path
    with socket.socket(fileno=options.socket) as judge, judge.makefile("rwb") as stream, asyncio.Runner() as runner:
        judge.set_inheritable(False)
        try:
            function = resolve(options.rule, field=options.field, config=json.loads(read_frame(stream) or b"{}"))
        except UserInputError as error:
            failure = Failure(boundary=Boundary.USER_CODE, code="reward_not_loaded", message=str(error))
            write_frame(stream, pb.EpisodeScore(failure=failure_to_proto(failure)).SerializeToString())
            return
        write_frame(stream, pb.EpisodeScore().SerializeToString())
        rule = Rule(options.name, function, is_built_in(options.rule), runner)
        while (frame := read_frame(stream)) is not None:
            score = answer(rule, pb.ScoreGroupRequest.FromString(frame))
            write_frame(stream, score.SerializeToString())


if __name__ == "__main__":
    main()
