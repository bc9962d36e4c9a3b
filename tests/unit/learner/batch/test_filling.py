"""The episodes that a forward pass computes: every one once, within the limit, in few passes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kestrl_learner.batch.filling import Chosen, Sizes, filled
from kestrl_learner.batch.rows import PASS_COST

LIMIT = 1000


def sizes(prompt: int, *episodes: int) -> Sizes:
    return Sizes(prompt=prompt, episodes=episodes, limit=LIMIT)


def tokens(groups: Sequence[Sizes], chosen: Chosen) -> int:
    return sum(groups[number].prompt + sum(groups[number].episodes[one] for one in some) for number, some in chosen)


GROUPS = st.lists(
    st.builds(
        lambda prompt, some: sizes(prompt, *some), st.integers(0, 400), st.lists(st.integers(1, 700), max_size=8)
    ),
    max_size=8,
)


@given(groups=GROUPS, least=st.integers(1, 4))
def test_every_episode_is_in_one_pass_and_a_pass_of_several_is_within_the_limit(
    groups: list[Sizes], least: int
) -> None:
    plan = filled(groups, joined=LIMIT, least_passes=least)
    computed = [(number, episode) for chosen in plan for number, some in chosen for episode in some]
    assert sorted(computed) == [
        (number, one) for number, size in enumerate(groups) for one in range(len(size.episodes))
    ]
    for chosen in plan:
        assert len({number for number, _ in chosen}) == len(chosen), "a piece for each group"
        several = sum(len(some) for _, some in chosen) > 1
        assert tokens(groups, chosen) <= LIMIT or not several
    assert plan == filled(groups, joined=LIMIT, least_passes=least)


@given(groups=st.lists(st.builds(lambda prompt: sizes(prompt, *[40] * 8), st.integers(0, 100)), min_size=1, max_size=9))
def test_passes_cost_no_more_than_full_ones(groups: list[Sizes]) -> None:
    """A full pass has a gap below a prompt and an episode, and repeats one prompt."""
    total = sum(size.prompt + sum(size.episodes) for size in groups)
    plan = filled(groups, joined=LIMIT)
    full = -(-total // (LIMIT - 2 * 100 - 40))
    cost = sum(PASS_COST + tokens(groups, chosen) for chosen in plan)
    assert cost <= full * PASS_COST + total + (full - 1) * 100


def test_groups_of_more_than_half_a_pass_are_cut_where_that_saves_passes() -> None:
    groups = [sizes(50, *[50] * 12)] * 6
    plan = filled(groups, joined=LIMIT)
    assert len(plan) == 4, "not one for each of 650 tokens"
    assert sum(tokens(groups, chosen) for chosen in plan) <= 6 * 650 + 3 * 50


def test_each_rank_keeps_a_pass() -> None:
    groups = [sizes(20, 60, 60)] * 4
    assert [len(filled(groups, joined=LIMIT, least_passes=ranks)) for ranks in (1, 2, 4)] == [1, 2, 4]


def test_groups_above_the_joined_limit_stay_alone() -> None:
    groups = [sizes(100, *[100] * 6), sizes(50, 50), sizes(50, 50)]
    assert filled(groups, joined=300) == [[(0, [0, 1, 2, 3, 4, 5])], [(1, [0]), (2, [0])]]
