"""Tokenization of conversations: the tiny model's tokenizer, and warm-up examples split as in a rollout.

The tokenizer splits letters, digits, white space and punctuation apart, so that a name is the same tokens in a
question, in a tool's answer and in JSON. Without that, two million parameters do not learn to copy a name that they
have never seen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kestrl_email.demonstrations import SCHEMAS, Messages

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END)
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added but not special tokens, as in Qwen, so that decoding without special tokens keeps the calls."""
PIECES = r"\p{L}+(?:_\p{L}+)*|\p{N}{1,2}|[^\p{L}\p{N}\s]+(?: [^\p{L}\p{N}\s]+)*|\s"
"""A word or identifier, two digits (so that a mail's id is a letter and one token), a run of punctuation (with the
blanks inside it, as in `": "`), or one white space."""
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and whether each is learned."""

    ids: list[int]
    learned: list[bool]


def make_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE in which a word has the same tokens everywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=3,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special: list[AddedToken] = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    markers: list[AddedToken] = [AddedToken(token, special=False, normalized=False) for token in MARKERS]
    tokenizer.add_special_tokens(special)  # pyright: ignore[reportUnknownMemberType] - the stub's list has no element type
    tokenizer.add_tokens(markers)  # pyright: ignore[reportUnknownMemberType] - as above
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of an existing token."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise KeyError(token)
    return number


def call_text(call: dict[str, Any]) -> str:
    """A tool call as the model writes it."""
    return "<tool_call>\n" + json.dumps(call, ensure_ascii=False) + "\n</tool_call>"


def segments(messages: Messages) -> Iterator[tuple[str, bool]]:
    """Pieces of a conversation that a rollout tokenizes separately, and whether the model writes the piece."""
    tools = "".join(f"\n{schema.name}({', '.join(schema.parameters['properties'])})" for schema in SCHEMAS)
    for position, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "system":
            yield f"{START}system\n", False
            yield content, False
            yield f"\nTools:{tools}{END}\n", False
        elif role == "user":
            yield f"{START}user\n", False
            yield content, False
            yield f"{END}\n", False
        elif role == "assistant":
            yield f"{START}assistant\n", False
            yield "".join(call_text(call) for call in message["tool_calls"]) + END, True
            if position < len(messages) - 1:
                yield "\n", False
        else:
            yield f"{START}user\n<tool_response>\n", False
            yield content, False
            yield f"\n</tool_response>{END}\n", False


def encode(tokenizer: Tokenizer, messages: Messages) -> Example:
    """Converts a conversation to an example in which the model's text is learned."""
    ids: list[int] = []
    learned: list[bool] = []
    for text, writes in segments(messages):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        learned += [writes] * len(piece)
    return Example(ids, learned)


def drill(tokenizer: Tokenizer, rng: random.Random) -> Example:
    """Random tokens repeated three times, of which the repetitions are learned."""
    ordinary = tokenizer.get_vocab_size() - len(SPECIAL) - len(MARKERS)
    run = [rng.randrange(ordinary) for _ in range(rng.randint(3, 16))]
    return Example(run * 3, [False] * len(run) + [True] * (2 * len(run)))
