"""Text to token ids and back, with a strict separation of structure and content.

Structure is written by a chat template; its control strings become control tokens. Content comes from users, tools,
tool authors and error messages. The encoder receives both as parts of one text, cuts it only at control tokens that
are inside structure, and encodes everything between two cuts in one piece with a tokenizer without added tokens. So
content never becomes a control token, and text without control strings gets the same ids as when the whole text is
encoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from tokenizers import Tokenizer

from kestrl._shared.text.method_cache import method_cache
from kestrl.errors import KestrlError, UserInputError

Part = int | str
"""A control token by its id, or text to encode without any."""
WHITE_SPACE = " \t\r\n\u2581"
"""White space, including the character for a space in sentencepiece."""
CACHED_CHARACTERS = 32_768
"""Longest text that is cached, which bounds the cache's memory."""


class ControlTokenError(KestrlError):
    """Content was encoded as a control token, which is a bug: the episode fails and is not trained on."""

    code = "control_token_in_content"


class Vocabulary:
    """Two versions of a tokenizer: with control tokens for structure, without them for content. Thread-safe.

    Raises:
        UserInputError: It cannot be loaded, or text could be encoded as a control token.
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
        self._cached = method_cache(self._encode_plain, 1024)
        self._split = method_cache(self._split_structure, 1024)

    def _check_content(self) -> None:
        for text in self.added:
            if not self.control_ids.isdisjoint(self._plain.encode(text, add_special_tokens=False).ids):
                raise UserInputError(
                    f"the tokenizer encodes the text {text!r} as a control token even without its added tokens; "
                    "untrusted text could forge it, so the model cannot be used"
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
        position = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token not in self.control_ids:
                continue
            if start > position:
                parts.append(text[position:start])
            parts.append(token)
            position = end
        if position < len(text):
            parts.append(text[position:])
        return tuple(parts)

    def encode(self, parts: Iterable[Part]) -> list[int]:
        """Ids of a text given as parts; neighbouring texts are encoded as one piece, structure or content."""
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
        """Ids of untrusted text, without control tokens.

        Raises:
            ControlTokenError: The tokenizer returned a control token.
        """
        return self._cached(text) if len(text) <= CACHED_CHARACTERS else self._encode_plain(text)

    def _encode_plain(self, text: str) -> Sequence[int]:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self.control_ids.isdisjoint(ids):
            raise ControlTokenError("content was encoded as a control token; nothing of this episode is used")
        return ids

    def whole(self, text: str) -> list[int]:
        """Ids of a text with its control strings as control tokens, as transformers encodes it."""
        return list(self._full.encode(text, add_special_tokens=False).ids)

    def cut(self, text: str, limit: int, *, reserve: int = 0) -> tuple[str, int] | None:
        """Cuts content to at most `limit` tokens, at a whole character; None if it is short enough.

        Only the part of a long text that can matter is encoded, so that a huge result does not delay other episodes.

        Args:
            text: The content.
            limit: Largest number of tokens.
            reserve: Further tokens to leave free if the text is cut.

        Returns:
            The cut text, and a lower bound on the number of tokens of the whole text.
        """
        # A token has at least one byte: short texts need not be encoded.
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
        """Text of ids, including control tokens."""
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
    """Added tokens that are ordinary text: runs of white space that are in the model's vocabulary (Gemma)."""
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

    Entries that merges need and no merge produces are characters of the alphabet. They are kept, and `_check_content`
    refuses a control token among them.
    """
    model: dict[str, Any] = dict(data["model"])
    if isinstance(model.get("vocab"), dict):
        vocab: dict[str, int] = model["vocab"]
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
        needed = {side for merge in merges for side in merge} - {"".join(merge) for merge in merges}
        control = {token["content"] for token in data.get("added_tokens") or ()}
        removed = control - {token["content"] for token in ordinary} - needed - {model.get("unk_token")}
        # Removed rather than hidden: tokenizers with `ignore_merges` look a whole word up before they merge.
        model["vocab"] = {text: token for text, token in vocab.items() if text not in removed}
        if merges:
            model["merges"] = [merge for merge in merges if removed.isdisjoint((*merge, "".join(merge)))]
    return {**data, "added_tokens": list(ordinary), "post_processor": None, "model": model}
