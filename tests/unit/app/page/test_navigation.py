"""`kestrl ui`: from the runs to why an episode failed, filters, tokens, and places without episodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.fakes.stored_runs import make_group, make_run, make_stored_run, store_step

from kestrl._app.episodes.places import find_place
from kestrl._app.episodes.reading import Batch
from kestrl._app.local.rundir import RECORD
from kestrl._app.local.runner_record import RunnerRecord
from kestrl._app.page import step_page
from kestrl._app.page.addresses import digest, file_of
from kestrl._app.page.export import export_pages
from kestrl._app.page.library import RunsFolder, SingleRun
from kestrl._app.page.server import page_app
from kestrl._app.page.steps import Points
from kestrl.episode import PolicyVersion, Purpose
from kestrl.errors import UserInputError
from kestrl.runstate.events import HistoryRestored, MismatchMeasured, RunEvent, StepFinished
from kestrl.runstate.history import History, IdleTime, LastStep, Mismatch, StepCounts
from kestrl.runstate.log import Entry
from kestrl.runstate.segments import Segment, SegmentHeader
from kestrl.runstate.state import EngineBuild, EngineFleet, RunState
from kestrl.storage import ObjectStore, open_store
from kestrl.storage.episodes import GroupOutcome, StoredGroup
from kestrl.storage.layout import episode_batch

Read = Callable[[str], str]
Click = Callable[[str, str], str]
STEP = "/runs/job-1/train/2"


def page_of(episode: str) -> str:
    return f"{STEP}/episode/{digest(episode)}"


def test_three_clicks_from_the_runs_to_why_an_episode_failed(read: Read, click: Click) -> None:
    run = click(read("/"), "job-1")
    step = click(read(run), "step 2: tool 1")
    assert step == STEP
    failed = click(read(step), "g/1: reward -, tool/tool_raised")
    page = read(failed)
    assert "a tool failed: tool raised" in page
    assert "the shelf is locked\\x1b[31m" in page
    assert 'See <a href="#turn-1">turn 2</a>: the failure came after this turn' in page
    assert re.search(r'<details class="turn differs" open id="turn-1">', page)
    assert re.search(r'<details class="turn" id="turn-0">', page)
    assert "the best other episode of its group" in page
    assert page.index("Again.") < page.index("seven")


def test_a_verdict_names_parts_weights_the_call_and_the_judges_reason(read: Read) -> None:
    page = read(page_of("g/2"))
    assert "reward <strong>-1</strong>" in page
    assert "= exact -1 \u00d7 1" in page
    assert "turn 1</a>: a call&#39;s arguments violate the tool&#39;s schema" in page
    assert re.search(r'<details class="turn differs" open id="turn-0">', page)
    assert "seven was expected" in page
    assert "shelf is no number" in page
    assert "two</dd>" in page, "the expected answer"


def test_an_episode_stands_beside_the_same_scenario_of_a_step_before(read: Read) -> None:
    page = read(f"{page_of('g/2')}/earlier")
    assert "the same scenario 1 steps before" in page
    assert f"/runs/job-1/train/1/episode/{digest('even/0')}" in page


def test_groups_are_ordered_by_spread_then_by_failures(read: Read) -> None:
    groups = re.findall(r"<small>group ([^<]+)</small>", read(STEP))
    assert groups == [
        "g, shrunk, spread 2, failed 1/4",
        "w, retried, without episodes",
        "even2, trained, spread 0, failed 0/1",
    ]
    assert "no episodes: infrastructure/step_deadline" in read(STEP)


@pytest.mark.parametrize(
    ("name", "episodes"),
    [
        ("failed", ["g/1"]),
        ("failed-tool", ["g/1"]),
        ("failed-judge", []),
        ("no-tool-call", ["even2/0", "g/3"]),
        ("truncated", ["g/3"]),
        ("not-trained", []),
        ("gap", ["g/0"]),
        ("gap?above=0.9", []),
        ("judge-disagreed", ["g/3"]),
        ("judge-disagreed?above=0.75", []),
        ("judge-disagreed?above=0.2", ["g/0", "g/3"]),
    ],
)
def test_a_saved_filter_selects(read: Read, name: str, episodes: list[str]) -> None:
    page = read(f"{STEP}/only/{name}")
    assert re.findall(r'<a class="item"[^>]*>([^<]+)</a>', page) == episodes


def test_a_step_that_is_written_again_with_the_same_size_is_shown_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "job-1")
    store, points, batch = open_store(str(run)), Points(), Batch(Purpose.TRAIN, 1)
    path, stored = episode_batch(*batch), make_group("g")
    sizes = dict[int, float]()
    size, reward = 0, 0.0
    for reward in (number / 32 for number in range(32)):
        right, failed = stored.group.episodes
        group = replace(stored.group, episodes=[replace(right, reward=reward), failed])
        store_step(run, 1, [replace(stored, group=group)], {})
        if (size := store.size(path)) in sizes:
            break
        sizes[size] = reward
        assert points.of(store, [batch])[0].reward == reward
    assert size in sizes
    assert points.of(store, [batch])[0].reward == reward


def test_a_filter_with_many_episodes_has_further_pages_with_its_bound(
    read: Read, click: Click, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_page, "SHOWN_ROWS", 1)
    address = f"{STEP}/only/judge-disagreed?above=0.2"
    first = read(address)
    assert "2 of 6 rows of the step; 1 to 1 are shown" in first
    assert 'name="above"' in first
    last = read(click(first, "further episodes"))
    assert re.findall(r'<a class="item"[^>]*>([^<]+)</a>', last) == ["g/3"]
    assert "further episodes" not in last


@pytest.mark.parametrize(
    "address",
    [
        "/runs/nothing", "/runs/..%2Fjob-1", "/runs/job-1/train/9", f"{STEP}/only/reward%20%3C%200",
        f"{STEP}/only/judge-disagreed?above=inf", f"{STEP}/only/gap?above=nan", f"{STEP}/only/gap/from/1",
        f"{STEP}/only/gap?above=1;drop", f"{STEP}/episode/{'0' * 16}",
        f"{page_of('g/0')}/tokens?row=7", f"{page_of('g/0')}/tokens?from=-1", "/page.py", "/../job.json",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_a_page_that_says_so(browser: TestClient, address: str) -> None:
    answer = browser.get(address)
    assert (answer.status_code, "There is no such page." in answer.text) == (404, True)


def test_tokens_are_shown_with_what_training_computed(read: Read) -> None:
    page = read(f"{page_of('g/0')}/tokens")
    sampled = re.findall(r'<tr class="sampled">(.*?)</tr>', page, re.DOTALL)
    assert sampled
    assert all("<td>-0.75</td>" in row and "<td>0.5</td>" in row for row in sampled)
    assert "Tokens are shown without text" in page
    assert "Engines of the run" not in page, "no engine of this run proved anything"
    assert "learner" not in read(f"{page_of('g/3')}/tokens").split("<tbody>")[1]


def test_tokens_name_the_engines_that_proved_the_policies(read: Read, runs: Path) -> None:
    builds = (EngineBuild(engine="vllm", version="0.32.0", witness="engine"),)
    record = RunnerRecord(state=RunState(engines=EngineFleet(builds=builds)))
    (runs / "job-1" / RECORD).write_text(record.text())
    page = read(f"{page_of('g/0')}/tokens")
    assert "Engines of the run: vllm 0.32.0, policies named by its engine" in page


def test_metrics_of_an_episode_are_folded_and_the_scale_of_the_dots_is_named(read: Read, runs: Path) -> None:
    stored = make_group("m")
    episodes = [replace(episode, metrics={"mails_read": 2.0}) for episode in stored.group.episodes]
    store_step(runs / "job-1", 3, [replace(stored, group=replace(stored.group, episodes=episodes))], {})
    page = read(f"/runs/job-1/train/3/episode/{digest(episodes[0].id)}")
    metrics = page.partition("<summary>1 metrics</summary>")[2].partition("</details>")[0]
    assert "<dt>mails_read</dt><dd>2</dd>" in metrics
    assert "from -1 at the left to 1 at the right" in read(STEP)


def test_a_run_shows_its_curves_and_what_is_held_out(read: Read) -> None:
    page = read("/runs/job-1")
    assert "step 1: 0.5" in page
    assert "step 2: infrastructure 1" in page
    assert 'href="/runs/job-1/eval/0"' in page
    assert "e/0" in read("/runs/job-1/eval/0")


def test_a_run_shows_how_much_of_its_steps_stood_idle(read: Read, runs: Path) -> None:
    assert "idle" not in read("/runs/job-1"), "runs of earlier versions have no events"
    counts = StepCounts(groups=1, idle_groups=0, tool_calls=0, gradient=1.0)
    idle = IdleTime(seconds=20, learner={"groups": 8}, engine_seconds=40, engines={"tools": 22})
    finished = StepFinished(step=1, counts=counts, took=LastStep(idle=idle), message="")
    segment = Segment(1, 1, SegmentHeader(), ()).with_entries([Entry(number=1, at=0.0, event=finished)])
    open_store(str(runs / "job-1")).put(segment.path, segment.content)
    page = read("/runs/job-1")
    assert "Learner idle, % of the step" in page
    assert "step 1: 40" in page
    assert "Engines idle, % of the step" in page
    assert "step 1: 55" in page


def test_a_run_shows_the_staleness_of_what_it_trained_on(read: Read, runs: Path) -> None:
    run = runs / "job-1"
    assert "Staleness" not in read("/runs/job-1"), "its episodes name no policy"
    stored = make_group("g")
    ages = {3: 1, 4: 0, 5: 2}
    for step, age in ages.items():
        policy = PolicyVersion(job="job", step=step - 1 - age, sha256="0" * 64)
        episodes = [replace(episode, policy=policy) for episode in stored.group.episodes]
        older = replace(policy, step=0)
        stale = replace(stored.group, id="h", episodes=[replace(each, policy=older) for each in episodes])
        trained = replace(stored, outcome=GroupOutcome.TRAINED, group=replace(stored.group, episodes=episodes))
        store_step(run, step, [trained, replace(stored, outcome=GroupOutcome.STALE, group=stale, tokens={})], {})
    figure = read("/runs/job-1").partition("Staleness: age of the oldest policy, in steps")[2].partition("</figure>")[0]
    assert re.findall(r"<title>step (\d): (\d)</title>", figure) == [
        (str(step), str(age)) for step, age in ages.items()
    ]


def test_a_run_shows_the_log_prob_gap_of_the_steps_that_count(read: Read, runs: Path) -> None:
    counts = StepCounts(groups=1, idle_groups=0, tool_calls=0, gradient=1.0)
    happened: list[RunEvent] = []
    for step, gap in ((1, 0.125), (2, 0.5)):
        finished = StepFinished(step=step, counts=counts, took=LastStep(), message="")
        happened += [MismatchMeasured(gap=Mismatch(mean=gap, tokens=1)), finished]
    resumed = [HistoryRestored(step=1, history=History()), MismatchMeasured(gap=Mismatch(mean=0.25, tokens=1))]
    store_events(runs / "job-1", [*happened, *resumed])
    assert gaps_of(read("/runs/job-1")) == [("1", "0.125")], "step 2 is done again"
    store_events(runs / "job-1", [*happened, *resumed, happened[-1]])
    assert gaps_of(read("/runs/job-1")) == [("1", "0.125"), ("2", "0.25")]


def store_events(run: Path, happened: Sequence[RunEvent]) -> None:
    entries = [
        Entry.model_validate({"number": number, "at": 0.0, "event": event}) for number, event in enumerate(happened, 1)
    ]
    segment = Segment(1, 1, SegmentHeader(), ()).with_entries(entries)
    open_store(str(run)).put(segment.path, segment.content)


def gaps_of(page: str) -> list[tuple[str, str]]:
    figure = page.partition("Log-prob gap, learner to engine, nats a token")[2].partition("</figure>")[0]
    return re.findall(r"<title>step (\d): ([\d.]+)</title>", figure)


def test_failures_have_a_legend_with_their_counts(read: Read) -> None:
    beside_bars = read("/runs/job-1").partition('<div class="explained">')[2].partition("</ul>")[0]
    assert "Failures by boundary" in beside_bars
    legend = beside_bars.partition('class="legend"')[2]
    assert re.findall(r"</svg> ([a-z]+ \d)</li>", legend) == ["infrastructure 1", "tool 1"]


def test_a_run_shows_held_out_means_before_and_after_it(tmp_path: Path) -> None:
    make_stored_run(tmp_path / "runs" / "job-1")
    with TestClient(page_app(RunsFolder(tmp_path / "runs"), "t", labels=False), base_url="http://127.0.0.1") as client:
        for page in ("/?token=t", "/runs/job-1"):
            assert "reward 0.125 -&gt; 0.500" in client.get(page).text


def test_a_run_without_episodes_says_so(read: Read) -> None:
    assert "empty-1" in read("/")
    assert "No episode is stored yet." in read("/runs/empty-1")


def test_a_damaged_step_is_a_point_with_its_problem_and_hides_nothing(
    read: Read, runs: Path, browser: TestClient
) -> None:
    (runs / "job-1" / "episodes" / "train" / "step=000001.parquet").write_bytes(b"PAR1")
    assert "is damaged" in read("/runs/job-1")
    assert "step 2: tool 1" in read("/runs/job-1")
    answer = browser.get("/runs/job-1/train/1")
    assert (answer.status_code, "is damaged" in answer.text) == (500, True)
    (runs / "empty-1" / "run.json").write_text("[")
    assert "is damaged" in read("/")


def test_a_page_shows_the_next_step_of_a_running_run(read: Read, runs: Path) -> None:
    files = runs / "job-1" / "episodes" / "train"
    assert 'href="/runs/job-1/train/3"' not in read("/runs/job-1")
    (files / "step=000003.parquet").write_bytes((files / "step=000002.parquet").read_bytes())
    assert 'href="/runs/job-1/train/3"' in read("/runs/job-1")


def test_an_address_is_shown_without_the_runs_folder(runs: Path) -> None:
    library = SingleRun("job-1", find_place(runs, (runs / "job-1").as_uri()))
    assert export_pages(library, runs.parent / "out") > 5


def test_an_export_opens_a_file_for_each_group_and_not_for_each_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "runs" / "job-1")
    for step in (1, 2):
        store_step(run, step, [group_of_eight(f"g{step}-{number}", f"s{number}") for number in range(3)], {})
    opened, size = list[str](), ObjectStore.size
    monkeypatch.setattr(ObjectStore, "size", lambda store, path: (opened.append(path), size(store, path))[1])
    pages = export_pages(RunsFolder(tmp_path / "runs"), tmp_path / "out")
    assert pages > 2 * 3 * 8
    assert len(opened) < pages, "six groups, three of them again beside later attempts, and what the steps need"


def group_of_eight(name: str, scenario: str) -> StoredGroup:
    made = make_group(name)
    first = made.group.episodes[0]
    episodes = [replace(first, id=f"{name}/{index}", index=index, scenario_id=scenario) for index in range(8)]
    group = replace(made.group, scenario=replace(made.group.scenario, id=scenario), episodes=episodes)
    return replace(made, group=group, tokens={})


def test_exported_pages_link_to_each_other_and_write_nothing(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    count = export_pages(RunsFolder(runs), folder)
    pages = list(folder.rglob("*.html"))
    assert len(pages) == count
    for page in pages:
        text = page.read_text()
        for target in re.findall(r'(?:href|src)="([^"#]+)"', text):
            assert (page.parent / target).resolve().is_file(), (page, target)
            assert (page.parent / target).resolve().is_relative_to(folder)
        assert "<form" not in text
        assert "default-src 'none'" in text, "no server of files sends the header"
    assert "a tool failed" in (folder / file_of(page_of("g/1"))).read_text()
    with pytest.raises(UserInputError, match="is not empty"):
        export_pages(RunsFolder(runs), folder)
