"""Splits of generated data: training and validation that share no item, whatever the seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from kestrl.errors import UserInputError

SPLITS = ("train", "validation")
HELD_OUT = 5
"""One item in five is held out, by the checksum of its text."""
MAX_REPEATED = 200
"""Repeated items in a row after which there are taken to be no others."""
Item = TypeVar("Item", bound=Hashable)


def distinct(
    split: str, size: int, draw: Callable[[], Item], *, items: str, text_of: Callable[[Item], str] = str
) -> Iterator[Item]:
    """Distinct items of a split, in the order in which they are drawn; the first ones do not depend on the size.

    Args:
        split: train or validation.
        size: Number of items.
        draw: Draws an item of any split.
        items: Noun for them in messages, such as texts.
        text_of: Text of an item, which decides on its split.

    Raises:
        UserInputError: There is no such split, or there are not as many items.
    """
    if split not in SPLITS:
        raise UserInputError(f"{split!r} is not one of {', '.join(SPLITS)}")
    distinct_items: set[Item] = set()
    repeated = 0
    while len(distinct_items) < size:
        item = draw()
        held_out = zlib.crc32(text_of(item).encode()) % HELD_OUT == 0
        if item in distinct_items or held_out != (split == "validation"):
            repeated += 1
            if repeated == MAX_REPEATED:
                raise UserInputError(f"there are not {size} different {items}; ask for fewer")
            continue
        repeated = 0
        distinct_items.add(item)
        yield item
