"""Conformance suite of episode stores, for a user's test: `check_episode_store(lambda: MyStore(address))`.

It stores batches, reads them again through a second instance, selects and deletes, and raises `AssertionError` with the
property that does not hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from kestrl.episode import (
    CallOutcome,
    Episode,
    Group,
    PolicyVersion,
    Purpose,
    Row,
    Scenario,
    StopReason,
    ToolCall,
    Turn,
)
from kestrl.episode.codec import group_to_proto
from kestrl.errors import Boundary, Failure, StorageError
from kestrl.storage.episodes import (
    EpisodeBatch,
    EpisodeFilter,
    EpisodeStore,
    GroupOutcome,
    StoredEpisode,
    StoredGroup,
    TrainedTokens,
    select_in,
)

STEPS = (12, 0, 3)
"""Steps in the order in which they are stored."""


def check_episode_store(make: Callable[[], EpisodeStore]) -> None:
    """Checks an episode store.

    Args:
        make: Opens the store; the first call must give an empty one, and each further call the same content.

    Raises:
        AssertionError: A property does not hold; the message names it.
    """
    store = make()
    _check_empty(store)
    batches = {
        (purpose, step): _batch(purpose, step) for purpose, step in product((Purpose.EVALUATION, Purpose.TRAIN), STEPS)
    }
    with ThreadPoolExecutor(4) as threads:  # as the learner does: its event loop never waits for storage
        list(threads.map(store.append, batches.values()))
    for opened in (store, make()):
        _check_batches(opened, batches)
        _check_selection(opened, batches)
    _check_replacement(store, make)
    _check_deletion(store, make)


def _check_empty(store: EpisodeStore) -> None:
    for purpose in Purpose:
        assert not store.steps(purpose), f"make() must give an empty store at first; it has steps for {purpose}"
        _check_missing(store, purpose, 0)
    assert not list(store.select(EpisodeFilter())), "an empty store selects no episode"


def _check_missing(store: EpisodeStore, purpose: Purpose, step: int) -> None:
    try:
        outcome: object = store.read(purpose, step)
    except StorageError as error:
        outcome = error.code
    assert outcome == "not_found", f"reading a missing batch is a StorageError with code not_found, not {outcome!r}"


def _check_batches(store: EpisodeStore, batches: dict[tuple[Purpose, int], EpisodeBatch]) -> None:
    for purpose in Purpose:
        steps = list(store.steps(purpose))
        assert steps == sorted(STEPS), f"steps({purpose}) is {steps}, not the stored {sorted(STEPS)} in ascending order"
    for (purpose, step), batch in batches.items():
        stored_batch = store.read(purpose, step)
        assert (stored_batch.purpose, stored_batch.step) == (purpose, step), (
            f"read({purpose}, {step}) returned another batch"
        )
        assert _content(stored_batch.stored) == _content(batch.stored), (
            f"read({purpose}, {step}) differs from what was stored"
        )


def _content(stored: Sequence[StoredGroup]) -> list[tuple[object, ...]]:
    """Everything of the groups, comparable: log-probs to the bit, and sequences of whatever type."""
    return [
        (
            group_to_proto(stored_group.group).SerializeToString(deterministic=True),
            stored_group.outcome,
            stored_group.attempt,
            stored_group.reason,
            stored_group.failure,
            {
                episode: (tokens.advantages.tobytes(), tokens.learner_logprobs.tobytes())
                for episode, tokens in stored_group.tokens.items()
            },
        )
        for stored_group in stored
    ]


def _filters() -> Iterator[EpisodeFilter]:
    yield EpisodeFilter()
    for purpose in Purpose:
        yield EpisodeFilter(purpose=purpose)
        yield EpisodeFilter(purpose=purpose, step=3)
        yield EpisodeFilter(purpose=purpose, step=99)
        yield EpisodeFilter(id=f"{purpose}/3/scenario-1/1")
    yield EpisodeFilter(step=0, failed=True)
    yield EpisodeFilter(scenario="scenario-0", failed=False)
    yield EpisodeFilter(outcomes={GroupOutcome.SHRUNK, GroupOutcome.RETRIED})
    yield EpisodeFilter(scenario="no such scenario")


def _check_selection(store: EpisodeStore, batches: dict[tuple[Purpose, int], EpisodeBatch]) -> None:
    for episode_filter in _filters():
        expected = [
            _place(stored)
            for purpose in Purpose
            for step in sorted(STEPS)
            if episode_filter.purpose in {None, purpose} and episode_filter.step in {None, step}
            for stored in select_in(batches[purpose, step], episode_filter)
        ]
        places = [_place(stored) for stored in store.select(episode_filter)]
        assert places == expected, f"select({episode_filter}) gives {places}, not {expected}"


def _place(stored: StoredEpisode) -> tuple[Purpose, int, str, str]:
    return stored.purpose, stored.step, stored.group.id, stored.episode.id


def _check_replacement(store: EpisodeStore, make: Callable[[], EpisodeStore]) -> None:
    replacement = EpisodeBatch(purpose=Purpose.TRAIN, step=3, stored=[_stored("again/0", "another", 1)])
    store.append(replacement)
    stored_groups = make().read(Purpose.TRAIN, 3).stored
    assert _content(stored_groups) == _content(replacement.stored), (
        "a batch of a step that was stored before replaces it"
    )
    store.append(EpisodeBatch(purpose=Purpose.TRAIN, step=3, stored=[]))
    assert not make().read(Purpose.TRAIN, 3).stored, "a batch may be empty"


def _check_deletion(store: EpisodeStore, make: Callable[[], EpisodeStore]) -> None:
    store.delete(Purpose.TRAIN, 0)
    _check_missing(make(), Purpose.TRAIN, 0)
    store.delete(Purpose.TRAIN, 0)
    assert list(make().steps(Purpose.TRAIN)) == [3, 12], "delete removes one step of one purpose"
    assert list(make().steps(Purpose.EVALUATION)) == sorted(STEPS), "delete removes one step of one purpose"


def _batch(purpose: Purpose, step: int) -> EpisodeBatch:
    stored = [_stored(f"{purpose}/{step}/scenario-{index}", f"scenario-{index}", 3) for index in range(2)]
    late = Failure(boundary=Boundary.INFRASTRUCTURE, code="step_deadline", message="late", retryable=True)
    failed = StoredGroup(
        group=_group(f"{purpose}/{step}/scenario-2", "scenario-2", 0),
        outcome=GroupOutcome.RETRIED,
        attempt=1,
        reason="late",
        failure=late,
    )
    return EpisodeBatch(purpose=purpose, step=step, stored=[*stored, failed])


def _stored(name: str, scenario: str, size: int) -> StoredGroup:
    """A group of which only the first episode was trained on."""
    tokens = TrainedTokens(advantages=array("f", [0.5, -0.25]), learner_logprobs=array("f", [-0.125, -12.5]))
    return StoredGroup(
        group=_group(name, scenario, size), outcome=GroupOutcome.SHRUNK, attempt=2, tokens={f"{name}/0": tokens}
    )


def _group(name: str, scenario: str, size: int) -> Group:
    group_scenario = Scenario(
        id=scenario,
        ordinal=1,
        messages=[{"role": "user", "content": "Which bird? \u9ce5 \U0001f985 \x00 \x1b[31m"}],
        tools=["search"],
        ground_truth={"answer": "kestrel", "sources": [1, 2.5, None]},
        metadata={"source": "suite"},
    )
    return Group(id=name, scenario=group_scenario, episodes=[_episode(name, scenario, index) for index in range(size)])


def _episode(group: str, scenario: str, index: int) -> Episode:
    """An episode: 0 has a reward, 1 the reward 0, 2 has failed."""
    failed = index == 2
    policy = PolicyVersion(job="job", step=7, sha256="ab" * 32)
    row = Row(
        token_ids=array("i", [5, 2**31 - 1, 7]),
        mask=b"\0\1\1",
        logprobs=array("f", [0.0, -0.1, -12.75]),
        policies=[policy.name],
    )
    turn = Turn(
        index=0,
        row=0,
        start=1,
        end=3,
        text="<call>",
        finish_reason="stop",
        engine="engine-0",
        policy=policy.name,
        seconds=0.25,
    )
    call = ToolCall(
        turn=0,
        name="search",
        raw='{"word": "kestrel"}',
        arguments={"word": "kestrel"},
        outcome=CallOutcome.OK,
        text="found",
        data={"hits": 3},
    )
    return Episode(
        id=f"{group}/{index}",
        group_id=group,
        scenario_id=scenario,
        index=index,
        seed=2**40 + index,
        rows=[row],
        turns=[turn],
        tool_calls=[call],
        messages=[{"role": "assistant", "content": "a kestrel"}],
        stop_reason=StopReason.FAILED if failed else StopReason.ANSWERED,
        failure=Failure(boundary=Boundary.TOOL, code="tool_raised", message="it raised") if failed else None,
        policy=policy,
        engine="engine-0",
        started_at=1.8e9,
        seconds=0.5,
        reward=None if failed else 0.5 - 0.5 * index,
        rewards={} if failed else {"exact_answer": 0.5 - 0.5 * index},
        metrics={} if failed else {"answer_correct": 1.0 - index},
        environments={"Shop": {"basket": {"lamp": 2}}},
        info={"steps": ["looked", "bought"]},
    )
