"""`python -m kestrl_rollout.decode`: token ids as text, control tokens written out."""

from __future__ import annotations

from typing import Any

from kestrl._shared.checking import DecodeRequest, run_check
from kestrl._shared.text.chat_model import load_vocabulary


def decode(request: DecodeRequest) -> dict[str, Any]:
    """The texts.

    Raises:
        UserInputError: The tokenizer cannot be loaded.
    """
    vocabulary = load_vocabulary(request.tokenizer)
    return {"texts": [vocabulary.decode(ids) for ids in request.ids]}


if __name__ == "__main__":
    run_check(DecodeRequest, decode)
