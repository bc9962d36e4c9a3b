"""The runs that a page shows, and what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kestrl._app.episodes.places import EpisodePlace
from kestrl._app.local.observation import observe, run_store
from kestrl._app.local.progress import (
    builds_words,
    done_words,
    failure_counts,
    held_out_line,
    means_line,
    policy_words,
    step_words,
    warnings,
)
from kestrl._app.local.rundir import RunDir
from kestrl.errors import KestrlError
from kestrl.runstate.state import RunState
from kestrl.runstate.states import LocalRunState
from kestrl.storage import ObjectStore
from kestrl.storage.summary import RunSummary, read_summary

MOST_RUNS = 500
"""Runs of a folder that the page lists, the newest first."""


class Library(Protocol):
    """The runs of a place."""

    def names(self) -> Sequence[str]:
        """Names of the runs, the newest first."""
        ...

    def place(self, name: str) -> EpisodePlace | None:
        """Where the episodes of a run are; None if there is no such run."""
        ...

    def facts(self, name: str) -> RunFacts:
        """What is known of a run that `names` has."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run, in words."""

    name: str
    state: str = ""
    live: bool = False
    step: str = ""
    held_out: str = ""
    """Means on the held-out scenarios, before -> after."""
    means: str = ""
    """Means of the last training episodes."""
    policy: str = ""
    engines: str = ""
    failures: str = ""
    warnings: Sequence[str] = ()
    problem: str = ""
    """Why the run failed, or cannot be read."""


class RunsFolder(Library):
    """The runs of a folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> Sequence[str]:
        files = sorted(self._folder.glob("*/job.json"), key=lambda path: (-path.stat().st_mtime, path.parent.name))
        return [path.parent.name for path in files[:MOST_RUNS]]

    def place(self, name: str) -> EpisodePlace | None:
        if name not in self.names():  # a name from a URL never becomes a path by itself
            return None
        run = RunDir(self._folder / name)
        return EpisodePlace(run_store(run), run)

    def facts(self, name: str) -> RunFacts:
        return _facts_of_run(name, RunDir(self._folder / name))


class SingleRun(Library):
    """One run, evaluation or address.

    Args:
        name: Its name on the page.
        place: Where its episodes are.
    """

    def __init__(self, name: str, place: EpisodePlace) -> None:
        self._name, self._place = name, place

    def names(self) -> Sequence[str]:
        return [self._name]

    def place(self, name: str) -> EpisodePlace | None:
        return self._place if name == self._name else None

    def facts(self, name: str) -> RunFacts:
        if self._place.run is not None:
            return _facts_of_run(name, self._place.run)
        return facts_at(name, self._place.store)


def facts_at(name: str, store: ObjectStore) -> RunFacts:
    """What is known of a run from its storage alone: its result, if it has one."""
    try:
        summary = read_summary(store)
    except KestrlError as error:
        return RunFacts(name=name, state="unreadable", problem=str(error))
    return _facts(name, summary, None, state="not ended" if summary is None else str(summary.status), live=True)


def _facts_of_run(name: str, run: RunDir) -> RunFacts:
    try:
        observed_run = observe(run)
    except KestrlError as error:  # one damaged run hides no other
        return RunFacts(name=name, state="unreadable", problem=str(error))
    state = None if observed_run.record is None else observed_run.record.state
    return _facts(
        name,
        observed_run.summary,
        state,
        state=str(observed_run.state),
        live=observed_run.state is LocalRunState.RUNNING,
    )


def _facts(name: str, summary: RunSummary | None, last: RunState | None, *, state: str, live: bool) -> RunFacts:
    run_state = last or (None if summary is None else summary.state)
    if run_state is None:
        reason = "" if summary is None else summary.reason
        held_out = "" if summary is None else held_out_line(summary.before, summary.after)
        return RunFacts(name=name, state=state, live=live, held_out=held_out, problem=reason)
    failure, fleet, history = run_state.activity.failure, run_state.engines, run_state.history
    evaluated = history.evaluations
    latest = history.after or (evaluated[max(evaluated)] if evaluated else None)
    reason = ("" if summary is None else summary.reason) or ("" if failure is None else str(failure))
    return RunFacts(
        name=name,
        state=state,
        live=live,
        step=step_words(run_state) if live and summary is None else done_words(run_state),
        held_out=held_out_line(history.before, latest),
        means=means_line(run_state.means),
        policy=f"{policy_words(run_state)}, proved by {fleet.verified} of {fleet.total} engines",
        engines=builds_words(run_state),
        failures=failure_counts(history.failures),
        warnings=warnings(run_state),
        problem=reason,
    )
