"""`python -m kestrl_judge.worker`: runs one reward function on one episode after another.

A separate process, so that a reward that hangs, crashes or exits affects nothing else. It communicates with the judge
over an inherited socket; output of the reward goes to the judge's log. Its process guard kills it and its descendants
with the judge.

A request is a `ScoreGroupRequest` with one episode, its answer an `EpisodeScore`, each a frame of `kestrl._shared`. The
judge's first message is the configuration of the reward as JSON, the first one of the process an `EpisodeScore`,
without a failure if the reward is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from kestrl._shared.processes.frames import read_file, write_file
from kestrl._shared.rpc.client import MAX_MESSAGE_BYTES
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode.codec import episode_from_proto, failure_to_proto, scenario_from_proto
from kestrl.errors import JudgeFailure, UserCodeError, UserInputError, described, encodable
from kestrl.rewards import Attempt, Claim, Score, VerdictNeeded
from kestrl.rewards.checking import LEFT_OUT, UnusableMetric, as_score
from kestrl.rewards.resolving import Reward, is_built_in, resolve


@dataclass(frozen=True, slots=True)
class Rule:
    """A loaded reward function."""

    name: str
    function: Reward
    built_in: bool
    runner: asyncio.Runner
    """One event loop for the lifetime of the process, so that async rewards can keep connections."""
    report: Callable[[UnusableMetric], None]
    """Called for metrics that are left out."""

    def score(self, attempt: Attempt) -> Score:
        """Scores one episode.

        Raises:
            JudgeFailure: A built-in reward raised, or the value is not a finite number.
            UserCodeError: The user's function, or its returned object, raised.
            VerdictNeeded: It asks the correctness judge.
        """
        try:
            returned: Any = self.function(attempt)
            returned = self.runner.run(_awaited(returned)) if inspect.isawaitable(returned) else returned
        except VerdictNeeded:
            raise
        except BaseException as error:
            raise self._raised(error) from error
        try:
            return as_score(self.name, returned, turns=attempt.episode.num_turns, report=self.report)
        except (JudgeFailure, UserCodeError):
            raise
        except BaseException as error:  # a number or mapping of a user's class
            raise self._raised(error) from error

    def _raised(self, error: BaseException) -> JudgeFailure | UserCodeError:
        traceback.print_exception(error)
        kind = JudgeFailure if self.built_in else UserCodeError
        return kind(f"{self.name}: {described(error)}", code="reward_raised")


class FirstWarning:
    """Writes the first unusable metric to the log, in which each episode's would be too many."""

    def __init__(self, name: str) -> None:
        self._name, self._warned = name, False

    def __call__(self, metric: UnusableMetric) -> None:
        if not self._warned:
            self._warned = True
            text = encodable(f"warning: {self._name}: {metric.text}; it is left out, and counted in {LEFT_OUT}")
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - the log of this process


async def _awaited(returned: Any) -> object:
    return await returned


def answer(rule: Rule, request: pb.ScoreGroupRequest) -> pb.EpisodeScore:
    """Score of the episode in a request, or its failure."""
    episode_id = request.group.episodes[0].id
    try:
        score = rule.score(_attempt(request))
    except VerdictNeeded as needed:
        return pb.EpisodeScore(episode_id=episode_id, claim=_claim_to_proto(needed.claim))
    except (JudgeFailure, UserCodeError) as error:
        return pb.EpisodeScore(episode_id=episode_id, failure=failure_to_proto(error.failure()))
    # Here, unlike in the judge's answer, `reward` is that of the episode without its turns.
    return pb.EpisodeScore(
        episode_id=episode_id,
        reward=score.value,
        turn_rewards=score.turns,
        metrics=score.metrics,
        answer=score.answer,
    )


def _answered(rule: Rule, frame: bytes) -> pb.EpisodeScore:
    """The answer to a request as it came: the judge does not decode what it passes on."""
    try:
        request = pb.ScoreGroupRequest.FromString(frame)
    except DecodeError as error:
        return pb.EpisodeScore(failure=failure_to_proto(_malformed(error).failure()))
    return answer(rule, request)


def _malformed(error: Exception) -> JudgeFailure:
    return JudgeFailure(f"the rollout worker sent a malformed episode: {error}", code="malformed_episode")


def _attempt(request: pb.ScoreGroupRequest) -> Attempt:
    """The attempt of a request, which the judge passes on as it was received.

    Raises:
        JudgeFailure: It holds impossible values, such as an unknown stop reason.
    """
    try:
        return Attempt(
            scenario=scenario_from_proto(request.group.scenario),
            episode=episode_from_proto(request.group.episodes[0]),
            max_turns=request.max_turns,
            verdicts=dict(request.verdicts) if request.has_judge else None,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise _malformed(error) from error


def _claim_to_proto(claim: Claim) -> pb.Claim:
    return pb.Claim(question=claim.question, accepted=claim.accepted, answer=claim.answer)


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--name", "--rule", "--field"):
        parser.add_argument(option, required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--path", action="append", default=[])
    options = parser.parse_args()
    sys.path[:0] = options.path
    with socket.socket(fileno=options.socket) as judge, judge.makefile("rwb") as stream, asyncio.Runner() as runner:
        judge.set_inheritable(False)
        try:
            function = resolve(options.rule, field=options.field, config=json.loads(read_file(stream) or b"{}"))
        except UserInputError as error:
            failure = UserCodeError(str(error), code="reward_not_loaded").failure()
            write_file(stream, pb.EpisodeScore(failure=failure_to_proto(failure)).SerializeToString())
            return
        write_file(stream, pb.EpisodeScore().SerializeToString())
        rule = Rule(options.name, function, is_built_in(options.rule), runner, FirstWarning(options.name))
        while (frame := read_file(stream, MAX_MESSAGE_BYTES)) is not None:
            write_file(stream, _answered(rule, frame).SerializeToString())


if __name__ == "__main__":
    main()
