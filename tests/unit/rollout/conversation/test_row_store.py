"""Rows: grown by what engines saw and sampled, and narrowed only to what was sampled."""

from __future__ import annotations

import pytest

from kestrl.agents import Completion
from kestrl.errors import UserCodeError
from kestrl_rollout.conversation.row_store import RowStore, Span


def completion(*ids: int, policy: str = "p") -> Completion:
    return Completion(token_ids=ids, logprobs=[-float(each) for each in ids], finish_reason="stop", policy=policy)


def record(store: RowStore, prompt: list[int], sampled: Completion) -> Span:
    return store.record(store.place(0, prompt), sampled)


def recorded() -> RowStore:
    store = RowStore()
    assert record(store, [1, 2], completion(3, 4)) == Span(row=0, start=2, end=4)
    assert record(store, [1, 2, 3, 4, 5], completion(6, policy="q")) == Span(row=0, start=5, end=6)
    return store


def test_a_prompt_that_begins_with_the_row_extends_it() -> None:
    (row,) = recorded().close()
    assert list(row.token_ids) == [1, 2, 3, 4, 5, 6]
    assert list(row.mask) == [0, 0, 1, 1, 0, 1]
    assert list(row.logprobs) == [0, 0, -3, -4, 0, -6]
    assert row.policies == ("p", "q")


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1, 2, 9, 4, 5, 6, 7], [9]])
def test_any_other_begins_a_new_row(prompt: list[int]) -> None:
    store = recorded()
    assert record(store, prompt, completion(8)).row == 1
    assert store.forks == 1
    assert list(store.close()[1].mask) == [0] * len(prompt) + [1]


def test_keep_narrows_the_mask() -> None:
    store = recorded()
    store.set_training_mask([1, 2, 3, 4, 5], [0, 0, 0, 1, 0])
    (row,) = store.close()
    assert list(row.mask) == [0, 0, 0, 1, 0, 0]
    assert list(row.logprobs) == [0, 0, 0, -4, 0, 0]
    assert list(row.token_ids) == [1, 2, 3, 4, 5, 6]


def test_keep_allows_context_that_no_engine_saw() -> None:
    store = recorded()
    store.set_training_mask([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 0, 1, 0, 0])
    assert list(store.close()[0].mask) == [0, 0, 1, 1, 0, 1]


def test_keep_chooses_one_row() -> None:
    store = recorded()
    record(store, [9], completion(8))
    store.set_training_mask([1, 2, 3, 4], [0, 0, 1, 1])
    first, second = store.close()
    assert (sum(first.mask), sum(second.mask)) == (2, 0)


@pytest.mark.parametrize(
    ("ids", "mask", "code"),
    [
        ([1, 2, 3], [0, 0], "mask_length"),
        ([1, 2, 3, 5], [0, 0, 1, 1], "tokens_not_sampled"),
        ([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], "mask_not_sampled"),
        ([1, 2], [1, 0], "mask_not_sampled"),
        ([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 1, 1], "mask_not_sampled"),
    ],
)
def test_a_mask_on_what_was_not_sampled_is_refused(ids: list[int], mask: list[int], code: str) -> None:
    with pytest.raises(UserCodeError) as refused:
        recorded().set_training_mask(ids, mask)
    assert refused.value.code == code
