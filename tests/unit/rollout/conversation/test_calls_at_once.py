"""Several calls of an episode at once: budgets hold, no token is trained twice, and seeds know no order."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.engine import Completion, Prompt

from kestrl.agents import Completion as Sampled
from kestrl.agents import Limits
from kestrl.episode import Episode, Scenario, StopReason
from kestrl.errors import Boundary, UserCodeError
from kestrl_rollout.conversation.budget import Budget, BudgetHeld, Full, Grant
from kestrl_rollout.conversation.main_row import main_row
from kestrl_rollout.conversation.row_store import Place, RowFacts, RowStore
from kestrl_rollout.deadlines import Waiting
from kestrl_rollout.engine.seeds import PromptSeeds

LIMITS: dict[str, Any] = {"max_turns": 6, "max_tokens": 100, "max_tokens_per_turn": 0, "context_length": 60}
FAST = settings(max_examples=200, deadline=None)


def limits(**changes: int) -> Limits:
    return Limits(temperature=1.0, **{**LIMITS, **changes})


def sampled(ids: list[int]) -> Sampled:
    return Sampled(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", policy="p")


@FAST
@given(
    per_turn=st.sampled_from([0, 5, 40]),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 70), st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 50)),
        max_size=40,
    ),
)
def test_budgets_are_never_exceeded(per_turn: int, steps: list[tuple[int, int, int | None, int]]) -> None:
    budget, held = Budget(limits(max_tokens_per_turn=per_turn)), dict[int, int]()
    for number, (kind, prompt, wanted, used) in enumerate(steps):
        if kind < 2:
            decision = budget.decide(prompt, wanted)
            if isinstance(decision, Grant):
                assert 1 <= decision.tokens <= min(60 - prompt, per_turn or 60, wanted or 60)
                budget.hold(number, decision.tokens)
                held[number] = decision.tokens
            elif isinstance(decision, BudgetHeld):
                assert held, "only calls in flight can be waited for"
        elif held:
            call, tokens = held.popitem()
            if kind == 2:
                budget.spend(call, min(used, tokens))
            else:
                budget.release(call)
                budget.release(call)
        assert budget.sampled + sum(held.values()) <= 100
        assert budget.turns + len(held) <= 6


def test_a_call_waits_where_others_hold_its_tokens() -> None:
    budget = Budget(limits(max_tokens=50))
    assert budget.decide(10) == Grant(50)
    budget.hold(0, 50)
    assert budget.decide(10) == BudgetHeld()
    budget.spend(0, 20)
    assert budget.decide(10) == Grant(30)
    assert budget.decide(60) == Full(StopReason.MAX_TOKENS)


ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@FAST
@given(
    steps=st.lists(st.tuples(st.sampled_from(["open", "follow", "end", "break"]), st.integers(0, 50), ids), max_size=30)
)
def test_every_sampled_token_is_trained_in_one_row(steps: list[tuple[str, int, list[int]]]) -> None:
    """Calls of few distinct tokens, so that prompts often begin with rows, end in any order."""
    store, flying, done = RowStore(), list[Place](), list[tuple[list[int], list[int]]]()
    spans: list[tuple[int, int, int]] = []
    for number, (kind, pick, some) in enumerate(steps):
        if kind == "open" or (kind == "follow" and not done):
            flying.append(store.place(number, some))
        elif kind == "follow":
            prompt, answer = done[pick % len(done)]
            flying.append(store.place(number, [*prompt, *answer, *some]))
        elif flying:
            place = flying.pop(pick % len(flying))
            if kind == "break":
                store.release(place)
                continue
            span = store.record(place, sampled(some))
            spans.append((span.row, span.start, span.end))
            done.append((list(place.prompt), some))
    for place in flying:
        store.release(place)
    rows = store.close()
    # Each span holds what the engine saw and sampled, and nothing else is trained.
    for (row, start, end), (prompt, answer) in zip(spans, done, strict=True):
        assert list(rows[row].token_ids[:start]) == prompt
        assert list(rows[row].token_ids[start:end]) == answer
    positions = [(row, place) for row, start, end in spans for place in range(start, end)]
    assert len(set(positions)) == len(positions)
    trained = {(number, place) for number, row in enumerate(rows) for place, on in enumerate(row.mask) if on}
    assert trained == set(positions)


def test_a_prompt_extends_the_longest_row_that_is_free() -> None:
    store = RowStore()
    store.record(store.place(0, [1]), sampled([2]))
    store.record(store.place(1, [9]), sampled([8]))
    store.record(store.place(2, [1, 2, 3]), sampled([4]))
    first, second = store.place(3, [1, 2, 3, 4, 5]), store.place(4, [1, 2, 3, 4, 6])
    assert (first.lane, second.lane) == (0, 1)
    assert store.record(second, sampled([7])).row == 2
    assert store.record(first, sampled([7])).row == 0
    assert store.record(store.place(5, [9, 8, 1]), sampled([7])).row == 1


@FAST
@given(prompts=st.lists(ids, min_size=1, max_size=8), data=st.data())
def test_seeds_do_not_depend_on_the_order_of_arrival(prompts: list[list[int]], data: st.DataObject) -> None:
    def seeds(arriving: list[list[int]]) -> list[tuple[list[int], int]]:
        arrived = PromptSeeds(7)
        return sorted((prompt, arrived.next(prompt)) for prompt in arriving)

    once = seeds(prompts)
    assert once == seeds(data.draw(st.permutations(prompts)))
    assert len({seed for _, seed in once}) == len(prompts)
    assert all(0 <= seed < 2**63 for _, seed in once)


def facts(opening: list[int], *calls: int) -> RowFacts:
    return RowFacts(opening=opening, calls=calls)


def test_the_main_row_is_of_the_first_conversation_that_goes_on() -> None:
    title, task, helper = facts([1, 5], 0), facts([1, 6], 1, 4), facts([2], 2, 3, 5, 6, 7)
    assert getattr(main_row([title, task, helper], linear=False), "row", None) == 1
    # Written anew at each turn: the last of its rows.
    anew = [facts([1, 6], 0), facts([1, 6, 7, 1], 2), facts([1, 9], 1), facts([1, 6, 7, 1, 8], 3)]
    chosen = main_row(anew, linear=False)
    assert chosen is not None
    assert (chosen.row, sorted(chosen.conversation)) == (3, [0, 1, 3])
    # Nothing goes on: the last call is the answer.
    assert getattr(main_row([facts([1], 1), facts([2], 0)], linear=False), "row", None) == 0
    assert getattr(main_row([title, task, helper], linear=False, loop_row=2), "row", None) == 2
    assert main_row([], linear=False) is None


AT_ONCE = """
import asyncio
from kestrl.agents import LimitReached

async def agent(conversation):
    {body}
"""


@pytest.fixture
def at_once(make_stage: Any, make_file: Callable[[str, str], str]) -> Callable[..., Awaitable[Any]]:
    """A stage whose loop has this body."""

    async def make(body: str, **changes: Any) -> Any:
        return await make_stage(agent=make_file("at_once", AT_ONCE.format(body=body)) + ":agent", **changes)

    return make


def shape_of(episode: Episode) -> list[tuple[list[int], bytes]]:
    return sorted((list(row.token_ids), bytes(row.mask)) for row in episode.rows)


async def test_calls_at_once_have_seeds_of_their_own_in_any_order(at_once: Any) -> None:
    prompts = [[1], [1], [2], [1, 7]]
    body = f"""
    order = {prompts!r} if conversation.scenario.id == "s-1" else {prompts[::-1]!r}
    await asyncio.gather(*(conversation.generate_tokens(prompt, max_tokens=5) for prompt in order))"""
    stage = await at_once(body)
    first = await stage.episode()
    second = await stage.episode(scenario=Scenario(id="s-2", ordinal=0, messages=[{"role": "user", "content": "?"}]))
    assert first.failure is second.failure is None
    assert shape_of(first) == shape_of(second)
    assert len(first.rows) == 4
    seeds = {turn.seed for turn in first.turns}
    assert len(seeds) == 4
    assert seeds == {turn.seed for turn in second.turns}


async def test_calls_at_once_never_exceed_the_budget(at_once: Any) -> None:
    body = """
    async def ask(number):
        try:
            return len((await conversation.generate_tokens([number], max_tokens=4)).token_ids)
        except LimitReached:
            return 0
    counts = await asyncio.gather(*(ask(number) for number in range(8)))
    conversation.metrics["sampled"] = sum(counts)"""
    stage = await at_once(body)
    stage.engine.script = lambda prompt: Completion(token_ids=[5] * 9)
    episode = await stage.episode(sampling={"max_tokens": 14, "max_turns": 100})
    assert (episode.failure, episode.stop_reason) == (None, StopReason.MAX_TOKENS)
    assert episode.metrics["sampled"] == episode.sampled_tokens == 14
    assert sorted(len(bytes(row.mask).replace(b"\0", b"")) for row in episode.rows) == [2, 4, 4, 4]
    episode = await stage.episode(sampling={"max_tokens": 100, "max_turns": 3})
    assert (episode.stop_reason, episode.num_turns) == (StopReason.MAX_TURNS, 3)


async def test_calls_without_a_limit_of_their_own_follow_each_other(at_once: Any) -> None:
    stage = await at_once("await asyncio.gather(*(conversation.generate_tokens([number]) for number in range(3)))")
    stage.engine.script = lambda prompt: Completion(token_ids=[5] * 3)
    episode = await stage.episode(sampling={"max_tokens": 30})
    assert episode.failure is None
    assert [prompt.sampling["max_tokens"] for prompt in stage.engine.prompts] == [30, 27, 24]


async def test_a_call_that_the_loop_gives_up_leaves_its_row_and_budget(at_once: Any) -> None:
    body = """
    first = await conversation.generate_tokens([1], max_tokens=4)
    row = [1, *first.token_ids]
    late = asyncio.ensure_future(conversation.generate_tokens([*row, 2], max_tokens=6))
    while not late.done() and conversation.scenario.metadata["waits"]:
        await asyncio.sleep(0)
        late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    await conversation.generate_tokens([*row, 3], max_tokens=6)"""
    stage = await at_once(body)
    scenario = Scenario(id="s", ordinal=0, messages=[{"role": "user", "content": "?"}], metadata={"waits": True})
    stage.engine.script = lambda prompt: Completion(token_ids=[5] * 9)
    episode = await stage.episode(scenario=scenario, sampling={"max_tokens": 10})
    assert episode.failure is None
    assert [(turn.row, turn.start, turn.end) for turn in episode.turns] == [(0, 1, 5), (0, 6, 12)]


async def test_what_still_runs_at_the_end_is_no_part_of_the_episode(at_once: Any) -> None:
    body = """
    global late
    late = asyncio.ensure_future(conversation.generate_tokens([2], max_tokens=4))
    await conversation.generate_tokens([1], max_tokens=4)"""
    stage = await at_once(body, engines=2)
    gate = asyncio.Event()
    for engine in stage.engines:
        engine.script = lambda prompt: Completion(
            token_ids=[5, 6], after=gate if list(prompt.token_ids) == [2] else None
        )
    episode = await stage.episode()
    assert episode.failure is None
    assert [list(row.token_ids) for row in episode.rows] == [[1, 5, 6]]
    gate.set()
    with pytest.raises(UserCodeError, match="the episode is over"):
        await importlib.import_module("at_once").late
    assert stage.groups._episodes.engine_sets.sessions.count == 0


async def test_calls_at_once_are_placed_one_by_one(at_once: Any) -> None:
    body = """
    async def thread(opening):
        prompt = [opening]
        for _ in range(3):
            answer = await conversation.generate_tokens(prompt, max_tokens=2)
            prompt += [*answer.token_ids, 7]
    await asyncio.gather(thread(1), thread(2))"""
    stage = await at_once(body, engines=2)
    episode = await stage.episode()
    assert episode.failure is None
    by_engine = [{prompt.token_ids[0] for prompt in engine.prompts} for engine in stage.engines]
    assert sorted(map(sorted, by_engine)) == [[1], [2]]
    assert len({turn.engine for turn in episode.turns}) == 2


@pytest.mark.parametrize("what", ["conversation.generate()", "conversation.call_tools([])"])
async def test_a_linear_loop_makes_one_turn_at_a_time(at_once: Any, what: str) -> None:
    stage = await at_once(f"await asyncio.gather(conversation.generate(), {what})")
    episode = await stage.episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, "concurrent_turns")


TITLE_AND_TASK = """
    await conversation.generate_tokens([1, 1], max_tokens=2)
    prompt = [1, 2]
    for helper in (3, 4):
        answer = await conversation.generate_tokens(prompt, max_tokens=2)
        prompt += [*answer.token_ids, 9]
        for _ in range(3):
            await conversation.generate_tokens([helper], max_tokens=2)
    await conversation.generate_tokens([5, 5], max_tokens=2)
    {names}"""


@pytest.mark.parametrize(
    ("names", "last"),
    [
        ("", [1, 2]),
        ("conversation.set_main([4])", [4]),
        ("conversation.set_main([4]); conversation.keep([3], [0])", [4]),
        ("conversation.keep([5, 5], [0, 0])", [5, 5]),
    ],
)
async def test_the_judge_reads_the_conversation_of_the_main_row(at_once: Any, names: str, last: list[int]) -> None:
    stage = await at_once(TITLE_AND_TASK.format(names=names))
    letters = {token: stage.chat_model.vocabulary.decode([token]) for token in range(10, 90)}

    def script(prompt: Prompt) -> Completion:
        return Completion(token_ids=[10 + 8 * prompt.token_ids[0] + len(prompt.token_ids)])

    stage.engine.script = script
    episode = await stage.episode(sampling={"max_turns": 20})
    assert episode.failure is None
    assert episode.main_row is not None
    row = episode.rows[episode.main_row]
    assert list(row.token_ids[: len(last)]) == last
    assert episode.final_text == letters[row.token_ids[-1]]
    said = [message["content"] for message in episode.messages if message["role"] == "assistant"]
    assert said[-1] == episode.final_text
    assert len(said) == (2 if last == [1, 2] else 3 if last == [4] else 1)
    (judged,) = stage.judge.requests
    assert judged.group.episodes[0].main_row == episode.main_row


async def test_a_main_row_that_nobody_sampled_is_the_loops_mistake(at_once: Any) -> None:
    stage = await at_once("await conversation.generate_tokens([1], max_tokens=2); conversation.set_main([8])")
    episode = await stage.episode()
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, "tokens_not_sampled")


async def test_a_deadline_names_what_the_calls_that_still_wait_wait_for() -> None:
    waiting = Waiting()
    with waiting.on(Boundary.USER_CODE):
        tool, engine = waiting.call(Boundary.TOOL), waiting.call(Boundary.ENGINE)
        tool.__enter__()
        engine.__enter__()
        assert waiting.boundary is Boundary.ENGINE
        tool.__exit__(None, None, None)
        assert waiting.boundary is Boundary.ENGINE
        engine.__exit__(None, None, None)
        assert waiting.boundary is Boundary.USER_CODE
        with pytest.raises(asyncio.CancelledError), waiting.call(Boundary.TOOL):
            raise asyncio.CancelledError
        assert waiting.boundary is Boundary.TOOL, "the deadline behind a cancellation reads it"
        with waiting.call(Boundary.ENGINE):
            pass
        assert waiting.boundary is Boundary.USER_CODE
