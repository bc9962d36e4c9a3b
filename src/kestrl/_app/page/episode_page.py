"""What the pages of an episode show: its verdict and turns beside another episode, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kestrl._app.episodes.decoding import decoded, tokenizer_of
from kestrl._app.episodes.difference import best_sibling
from kestrl._app.episodes.places import EpisodePlace
from kestrl._app.episodes.reading import Batch, batch_table
from kestrl._app.episodes.tokens import TokenFacts, row_tokens
from kestrl._app.episodes.verdict import verdict_of
from kestrl._app.page.addresses import digest
from kestrl._app.page.conversation import aligned, difference_place, exchanges
from kestrl._app.page.reader import EpisodeReader
from kestrl.episode import Episode
from kestrl.errors import UserInputError
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import ObjectEpisodeStore, StoredEpisode

SHOWN_TOKENS = 500
"""Tokens of a page."""


@dataclass(frozen=True, slots=True)
class EpisodeAddress:
    """An episode by its place and the digest of its id."""

    run: str
    batch: Batch
    digest: str

    def id_in(self, store: ObjectStore) -> str | None:
        """Id of the episode; None if there is none."""
        if self.batch.step not in ObjectEpisodeStore(store).steps(self.batch.purpose):
            return None
        names = batch_table(store, self.batch, ["episode"]).column("episode").to_pylist()
        return next((name for name in names if name is not None and digest(name) == self.digest), None)


def episode_facts(
    reader: EpisodeReader, episode_address: EpisodeAddress, *, beside_earlier: bool
) -> dict[str, Any] | None:
    """An episode beside the best sibling of its group, or beside an earlier attempt at the scenario; None if there is
    no such episode.
    """
    stored = reader.read(episode_address.batch, episode_address.digest)
    if stored is None:
        return None
    sibling = best_sibling(stored.episode, stored.group.episodes)
    predecessor = reader.earlier(stored) if beside_earlier or sibling is None else None
    beside, batch = (
        (predecessor.episode, Batch(predecessor.purpose, predecessor.step))
        if predecessor
        else (sibling, episode_address.batch)
    )
    prompt = len(stored.group.scenario.messages)
    left, right = exchanges(stored.episode, prompt), () if beside is None else exchanges(beside, prompt)
    differs = difference_place(left, stored.episode, beside)
    turn = None if differs is None else left[differs].turn
    verdict = verdict_of(stored.episode, None if turn is None else turn.index)
    names = [episode.id for episode in stored.group.episodes]
    place = names.index(stored.episode.id)
    return {
        "stored": stored,
        "episode": stored.episode,
        "verdict": verdict,
        "turns": aligned(left, right, differs=differs, opened=verdict.turn),
        "beside": beside,
        "beside_batch": batch,
        "beside_words": _beside_words(stored, beside, predecessor),
        "earlier": beside_earlier,
        "label": reader.labels.get(stored.episode.id),
        "previous": names[place - 1] if place else None,
        "next": names[place + 1] if place + 1 < len(names) else None,
    }


def _beside_words(stored: StoredEpisode, beside: Episode | None, before: StoredEpisode | None) -> str:
    if before is not None:
        return f"the same scenario {stored.step - before.step} steps before"
    return "nothing to compare with" if beside is None else "the best other episode of its group"


def token_facts(place: EpisodePlace, episode_address: EpisodeAddress, row: int, begin: int) -> dict[str, Any] | None:
    """A page of tokens of one row; None if there is no such episode or row."""
    stored = EpisodeReader(place.store).read(episode_address.batch, episode_address.digest)
    if stored is None or not 0 <= row < max(1, len(stored.episode.rows)):
        return None
    rows = row_tokens(stored.episode, stored.stored.tokens.get(stored.episode.id))
    every = rows[row] if rows else ()
    tokens_of_page = every[begin : begin + SHOWN_TOKENS]
    texts, problem = _texts(place, tokens_of_page)
    return {
        "episode": stored.episode,
        "row": row,
        "rows": len(rows),
        "tokens": list(zip(tokens_of_page, texts, strict=True)),
        "total": len(every),
        "begin": begin,
        "further": begin + SHOWN_TOKENS if begin + SHOWN_TOKENS < len(every) else None,
        "problem": problem,
    }


def _texts(place: EpisodePlace, tokens: Sequence[TokenFacts]) -> tuple[list[str], str]:
    """Texts of tokens; without them, why this machine cannot decode them."""
    if not tokens:
        return [], ""
    ids = [[token.id] for token in tokens]
    try:
        return list(decoded(tokenizer_of(place, "the text of tokens"), ids, "the text of tokens")), ""
    except UserInputError as error:
        return [""] * len(tokens), str(error)
