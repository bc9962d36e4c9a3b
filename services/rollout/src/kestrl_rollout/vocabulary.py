"""Text to token ids and back, with a hard line between structure and content.

Structure is what a chat template writes; its control strings become control tokens. Content is what anybody else wrote: users,
tools, tool authors, error messages. The encoder receives both as parts of one text, cuts it only at control tokens that
lie inside structure, and encodes everything between two cuts in one piece with a tokenizer that knows no added token at all.
So content can never become a control token, and harmless text still gets the very ids that encoding the whole text gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from tokenizers import Tokenizer

from kestrl.errors import KestrlError, UserInputError

Part = int | str
"""A control token by its id, or text to encode without any."""
WHITE_SPACE = " \t\r\n\u2581"
"""As text and as sentencepiece writes a space."""
CACHED_CHARACTERS = 32_768
"""Longer pieces are not kept: the cache's memory stays bounded by its entries."""


class ControlTokenError(KestrlError):
    """Content became a control token. It cannot happen; if it does, the episode ends rather than trains."""

    code = "control_token_in_content"


class Vocabulary:
    """A tokenizer twice: with control tokens for structure, without them for content. Safe to use from several threads.

    Raises:
        UserInputError: It cannot be read, or text could forge a control token.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        ordinary = _ordinary(data)
        self.added: dict[str, int] = {
            token["content"]: token["id"] for token in data.get("added_tokens") or () if token not in ordinary
        }
        self.control_ids = frozenset(self.added.values())
        self._full = _tokenizer(data)
        self._plain = _tokenizer(_without_added(data, ordinary))
        self._check_content()
        self._cached = lru_cache(maxsize=1024)(self._encode_plain)
        self._split = lru_cache(maxsize=1024)(self._split_structure)

    def _check_content(self) -> None:
        for text in self.added:
            if not self.control_ids.isdisjoint(self._plain.encode(text, add_special_tokens=False).ids):
                raise UserInputError(
                    f"the tokenizer encodes the text {text!r} as a control token even without its added tokens; "
                    "untrusted text could forge it, so the model cannot be trained"
                )

    def control(self, text: str) -> int | None:
        """The id of a control string, if it is a single added token."""
        return self.added.get(text)

    def structure(self, text: str) -> tuple[Part, ...]:
        """A template's text, cut at its control tokens."""
        return self._split(text)

    def _split_structure(self, text: str) -> tuple[Part, ...]:
        encoding = self._full.encode(text, add_special_tokens=False)
        parts: list[Part] = []
        done = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token not in self.control_ids:
                continue
            if start > done:
                parts.append(text[done:start])
            parts.append(token)
            done = end
        if done < len(text):
            parts.append(text[done:])
        return tuple(parts)

    def encode(self, parts: Iterable[Part]) -> list[int]:
        """Ids of a text given as parts; neighbouring texts are one piece, whoever wrote them."""
        ids: list[int] = []
        piece: list[str] = []
        for part in parts:
            if isinstance(part, str):
                piece.append(part)
                continue
            if piece:
                ids += self.content("".join(piece))
                piece = []
            ids.append(part)
        if piece:
            ids += self.content("".join(piece))
        return ids

    def content(self, text: str) -> Sequence[int]:
        """Ids of text that nobody vouches for: never a control token.

        Raises:
            ControlTokenError: The tokenizer broke that promise.
        """
        return self._cached(text) if len(text) <= CACHED_CHARACTERS else self._encode_plain(text)

    def _encode_plain(self, text: str) -> Sequence[int]:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self.control_ids.isdisjoint(ids):
            raise ControlTokenError("content was encoded as a control token; nothing of this episode is used")
        return ids

    def whole(self, text: str) -> list[int]:
        """Ids of a text whose control strings are meant: what transformers gives for it."""
        return list(self._full.encode(text, add_special_tokens=False).ids)

    def cut(self, text: str, limit: int, *, reserve: int = 0) -> tuple[str, int] | None:
        """Where content must end to have at most `limit` tokens; None when it is short enough.

        Cuts at a whole character. Of a text far beyond the limit only as much is encoded as can matter, so that a huge result
        cannot hold up the other episodes.

        Args:
            text: The content.
            limit: Tokens it may have.
            reserve: Tokens to leave free when it must be cut.

        Returns:
            The cut text, and how many tokens there were at least.
        """
        # A token is a byte at least, so that most results need not be encoded to be known short.
        if len(text) <= limit and len(text.encode("utf-8", "surrogatepass")) <= limit:
            return None
        window = text[: max(1, limit) * 32]
        encoding = self._plain.encode(window, add_special_tokens=False)
        count = len(encoding.ids)
        if count <= limit and len(window) == len(text):
            return None
        keep = max(1, limit - reserve)
        end = encoding.offsets[keep][0] if count > keep else len(window)
        return window[:end], count

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens written out."""
        return self._full.decode(list(ids), skip_special_tokens=False)

    def decode_plain(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        return self._full.decode(list(ids), skip_special_tokens=True)

    @property
    def size(self) -> int:
        return self._full.get_vocab_size(with_added_tokens=True)


def _tokenizer(data: Mapping[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserInputError(f"model.base: tokenizer.json cannot be used: {error}") from error


def _ordinary(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Added tokens that are text like any other: runs of white space which the model has tokens for (Gemma's)."""
    vocab = data["model"].get("vocab")
    return [
        token
        for token in data.get("added_tokens") or ()
        if not token.get("special")
        and not token["content"].strip(WHITE_SPACE)
        and isinstance(vocab, dict)
        and cast("dict[str, int]", vocab).get(token["content"]) == token["id"]
    ]


def _without_added(data: Mapping[str, Any], ordinary: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same tokenizer without its control tokens: neither matched in text, nor merged, nor looked up whole.

    What a merge needs and no merge makes is a character of the alphabet, which text cannot do without: it stays, and
    `_check_content` refuses it by name.
    """
    model: dict[str, Any] = dict(data["model"])
    if isinstance(model.get("vocab"), dict):
        vocab: dict[str, int] = model["vocab"]
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
        needed = {side for merge in merges for side in merge} - {"".join(merge) for merge in merges}
        control = {token["content"] for token in data.get("added_tokens") or ()}
        doomed = control - {token["content"] for token in ordinary} - needed - {model.get("unk_token")}
        # Removed rather than hidden: tokenizers with `ignore_merges` look a whole word up before they merge.
        model["vocab"] = {text: token for text, token in vocab.items() if text not in doomed}
        if merges:
            model["merges"] = [merge for merge in merges if doomed.isdisjoint((*merge, "".join(merge)))]
    return {**data, "added_tokens": list(ordinary), "post_processor": None, "model": model}
