"""Texts of stored tokens, decoded by the run's tokenizer in a process of the rollout worker's."""

from __future__ import annotations

from collections.abc import Sequence

from kestrl._app.episodes.places import EpisodePlace
from kestrl._shared.checking import DecodeRequest, ask
from kestrl.errors import SeveralProblems, UserInputError

DECODE_SECONDS = 60.0


def tokenizer_of(place: EpisodePlace, subject: str) -> str:
    settings = None if place.run is None else place.run.read_json("settings/rollout-0.json")
    if settings is None:
        where = place.store.uri if place.run is None else place.run.path
        raise UserInputError(f"{subject} needs {where}/settings/rollout-0.json, which names the tokenizer")
    return str(settings["tokenizer"])


def decoded(tokenizer: str, ids: list[list[int]], subject: str) -> Sequence[str]:
    """The texts of sequences of tokens.

    Raises:
        UserInputError: They cannot be decoded here.
    """
    request = DecodeRequest(tokenizer=tokenizer, ids=ids)
    report = ask("kestrl_rollout.decode", request, subject="the tokenizer", seconds=DECODE_SECONDS)
    if report.missing:
        raise UserInputError(f"{subject} needs the tokenizer of {report.missing}; install it in this environment")
    if report.problems:
        raise SeveralProblems(report.problems)
    return [str(text) for text in report.facts["texts"]]
