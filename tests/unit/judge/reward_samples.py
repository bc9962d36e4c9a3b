"""Sample rewards of a user. `scripted` does what the episode's answer says."""

from __future__ import annotations

import asyncio
import fractions
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kestrl.rewards import Attempt, Score

calls = 0


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Unreadable(fractions.Fraction):
    def __float__(self) -> float:
        raise Own("no float")


def length(attempt: Attempt) -> float:
    return float(len(attempt.episode.final_text))


def per_turn(attempt: Attempt) -> list[float]:
    return [float(len(turn.text)) for turn in attempt.episode.turns]


def bounded(attempt: Attempt, limits: list[int], scale: float = 1.0) -> float:
    low, high = limits
    return scale * min(max(len(attempt.episode.final_text), low), high)


async def thoughtful(attempt: Attempt) -> Score:
    await asyncio.sleep(0)
    return Score(value=0.5, metrics={"turns": attempt.max_turns, "long": True})


def scripted(attempt: Attempt) -> Any:
    """Does what the episode says."""
    global calls
    calls += 1
    match attempt.episode.final_text:
        case "raise":
            raise KeyError("lost")
        case "raise badly":
            raise ValueError("\ud800")
        case "exit":
            sys.exit(0)
        case "die":
            os._exit(7)
        case "flood":  # a message of 4 GiB, of which nothing follows
            os.write(int(sys.argv[sys.argv.index("--socket") + 1]), b"\xff\xff\xff\xff")
            time.sleep(600)
        case "hang":
            time.sleep(600)
        case text if text.startswith("hang with "):
            child = subprocess.Popen(["sleep", "600"])  # which must go with it
            Path(text.removeprefix("hang with ")).write_text(str(child.pid))
            time.sleep(600)
        case text if text.startswith("detach with "):
            shell = [
                "sh",
                "-c",
                "sleep 600 > /dev/null & echo $!",
            ]  # whose child, in a session of its own, loses its parent
            detached = subprocess.run(shell, stdout=subprocess.PIPE, start_new_session=True, check=True, text=True)
            Path(text.removeprefix("detach with ")).write_text(detached.stdout)
            time.sleep(600)
        case "interrupt":
            raise KeyboardInterrupt
        case "generator":
            raise GeneratorExit("closed")
        case "group":
            raise BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError("x")])
        case "own":
            raise Own("base")
        case "mute":
            raise Mute
        case "bad value":
            return Unreadable()
        case "nan":
            return float("nan")
        case "infinite":
            return Score(value=float("inf"))
        case "text":
            return "1.0"
        case "bool":
            return True
        case "none":
            return None
        case "metric":
            return Score(value=1.0, metrics={"m": float("nan")})
        case "name":
            return Score(value=1.0, metrics={"a\ud800": 1.0})
        case "names":
            return Score(value=1.0, metrics={f"m{number}": 1.0 for number in range(10_000)})
        case "huge":
            return 10**400
        case "fraction":
            return fractions.Fraction(1, 4)
        case "print":
            print("\0" * 100_000)  # noqa: T201 - what users do
            sys.stdout.flush()
            os.write(1, b"straight to the descriptor")
            sys.stdin.read()
            return 1
        case "count":
            return calls
        case "token":
            return float("KESTRL_ROLLOUT_TO_JUDGE_TOKEN" in os.environ)
        case text if text.startswith("pid "):
            Path(text[4:]).write_text(str(os.getpid()))
            return 1.0
    return 0


def takes_nothing() -> float:
    return 1.0


constant = 1.0


def asks(attempt: Attempt) -> Score:
    """1 for an answer that the judge finds correct, 0 for another, -1 without a judge."""
    try:
        right = attempt.judged_correct(
            question="What is 2 + 2?", accepted=["4", "IV"], answer=attempt.episode.final_text
        )
    except Exception:  # noqa: BLE001 - a user may catch everything; asking is not an error
        return Score(value=-2.0)
    return Score(value=-1.0 if right is None else float(right))


async def asks_late(attempt: Attempt) -> float:
    await asyncio.sleep(0)
    return asks(attempt).value


def asks_often(attempt: Attempt) -> float:
    return sum(
        bool(attempt.judged_correct(question=str(number), accepted=["4"], answer=attempt.episode.final_text))
        for number in range(9)
    )


def last_output_is_right(attempt: Attempt) -> float:
    """1 where the last program ended well and printed the ground truth."""
    last = attempt.episode.tool_calls[-1]
    return float(last.data["outcome"] == "ok" and last.text.strip() == attempt.scenario.ground_truth)
