"""The follower: sends what a run has stored to a target, each object once, and what it stores while it trains."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kestrl._app.episodes.places import EpisodePlace
from kestrl._app.push.cursor import Cursor
from kestrl._app.push.parts import DAMAGED as METRICS_DAMAGED
from kestrl._app.push.parts import PartKind, RunPart, parts_of, record_of
from kestrl._app.push.target import PartRefused, PushedRun, Target, TargetUnavailable
from kestrl._shared.backoff import Backoff
from kestrl.errors import PlaceError, StorageError, StorageUnavailable, UserInputError
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import DAMAGED, EpisodeBatch, ObjectEpisodeStore
from kestrl.storage.layout import SUMMARY
from kestrl.storage.summary import RunSummary, read_summary

POLL_SECONDS = 2.0
"""Time between two looks at the storage of a run that trains."""
BACKOFF = Backoff(2.0, 60.0)
"""Pauses between attempts at a target that does not answer."""
SUMMARY_TAG_DIGITS = 32
WAITING, LEFT_OUT, RECOVERED = "waiting: ", "not sent: ", "it answers again"
"""Lines of progress, or how they begin."""


@dataclass(slots=True)
class SentParts:
    """What was sent, and what could not be read."""

    parts: int = 0
    episodes: int = 0
    problems: list[str] = field(default_factory=list[str])


def sampled(group: str, share: float) -> bool:
    """Whether a group is among the share that is sent: by its id, so that it always is or never, and is whole."""
    number = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big")
    return number < share * 2**64


class Follower:
    """Sends one run to one target.

    Args:
        place: Where the run is.
        run: The run as the target names it.
        target: Receives it.
        cursor: What it has received.
        sample: Share of groups whose episodes are sent.
        say: Shows a line of progress.
    """

    def __init__(
        self,
        place: EpisodePlace,
        run: PushedRun,
        target: Target,
        cursor: Cursor,
        *,
        sample: float = 1.0,
        say: Callable[[str], None],
    ) -> None:
        self._place, self._run, self._target, self._cursor = place, run, target, cursor
        self._sample, self._say = sample, say
        self.sent = SentParts()
        self._unreadable: dict[str, str] = {}
        """Version of each object that could not be read, by path."""
        self._opened = False

    def push(self, *, follow: bool) -> SentParts:
        """Sends everything that was not sent; with `follow`, goes on until the run ends, and waits for a target that
        does not answer.

        Raises:
            TargetUnavailable: The target does not answer; with `follow`, also after the end of the run.
            TargetRefused: The target refuses.
            StorageError: The storage refused.
        """
        failures, reported = 0, ""
        while True:
            live = follow and self.live
            try:
                self.send_new(live=live)
            except (TargetUnavailable, StorageUnavailable) as error:
                if not live:
                    raise
                if str(error) != reported:
                    reported = str(error)
                    self._say(f"{WAITING}{error}")
                failures += 1
                time.sleep(BACKOFF.pause(failures))
                continue
            if reported:
                self._say(RECOVERED)
            failures, reported = 0, ""
            if not live:
                return self.sent
            time.sleep(POLL_SECONDS)

    @property
    def live(self) -> bool:
        """Whether more may come; at an address, until there is a result."""
        return self._place.live and (self._place.run is not None or not self._place.store.exists(SUMMARY))

    def send_new(self, *, live: bool) -> None:
        """Sends everything that was not sent, as `push` does; `live` says whether more may come."""
        store = self._place.store
        # The result is read first: what was stored before it is sent before it.
        summary = read_summary(store)
        parts = parts_of(store)
        if not self._opened:
            self._cursor.begin(self._target.open(self._run, live=live))
            self._opened = True
        for part in parts:
            if not self._done(part.path, part.version.tag):
                self._send(store, part)
        if summary is not None:
            self._finish(summary, max((part.version.modified for part in parts), default=0.0))

    def _done(self, path: str, tag: str) -> bool:
        return self._cursor.has(path, tag) or self._unreadable.get(path) == tag

    def _send(self, store: ObjectStore, part: RunPart) -> None:
        try:
            self._send_part(store, part)
        except PlaceError:
            raise
        except StorageError as error:
            if error.code == "not_found":
                return  # deleted by `schedule.keepEpisodes` since it was listed
            if error.code not in {DAMAGED, METRICS_DAMAGED}:
                raise
            self._leave_out(part, str(error))
        except PartRefused as error:
            self._leave_out(part, str(error))
        except UserInputError as error:  # written by a later version of KestRL
            self._leave_out(part, str(error))
        else:
            self._cursor.sent(part.path, part.version.tag)
            self.sent.parts += 1

    def _leave_out(self, part: RunPart, problem: str) -> None:
        """Reports a part that cannot be read or is refused, and goes on without it until it is written again."""
        self._unreadable[part.path] = part.version.tag
        self.sent.problems.append(problem)
        self._say(f"{LEFT_OUT}{problem}")

    def _send_part(self, store: ObjectStore, part: RunPart) -> None:
        if part.kind is PartKind.EPISODES:
            batch = self._chosen(ObjectEpisodeStore(store, self._run.id).read(part.purpose, part.step))
            self._target.episodes(batch)
            self.sent.episodes += sum(len(stored.group.episodes) for stored in batch.stored)
            return
        record = record_of(store, part.path)
        if part.kind is PartKind.EVALUATION:
            self._target.evaluation(part.step, record, part.version.modified)
        else:
            self._target.metrics(part.step, record, part.version.modified)

    def _chosen(self, batch: EpisodeBatch) -> EpisodeBatch:
        sampled_groups = [stored for stored in batch.stored if sampled(stored.group.id, self._sample)]
        return replace(batch, stored=sampled_groups)

    def _finish(self, summary: RunSummary, at: float) -> None:
        tag = hashlib.sha256(summary.text().encode()).hexdigest()[:SUMMARY_TAG_DIGITS]
        if not self._cursor.has(SUMMARY, tag):
            self._target.finish(summary, at)
            self._cursor.sent(SUMMARY, tag)
            self.sent.parts += 1
