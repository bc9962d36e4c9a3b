"""The page of a run with 100,000 episodes in a real Chromium: first paint of each page, and the server's memory.

Two hundred steps hold the same 500 episodes with some dozen tokens, so that the size on disk measures nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Row, main
from tests.browser import Browser, chromium
from tests.fakes.stored_runs import make_group, make_run

from kestrl._app.page.addresses import digest
from kestrl.episode import Purpose
from kestrl.storage import layout, open_store
from kestrl.storage.episodes import EpisodeBatch, ObjectEpisodeStore, StoredGroup

STEPS, GROUPS = 200, 250
FIRST_PAINT, FILTER, MEMORY = 1_000, 300, 300
"""Limits in milliseconds and MB."""
VISITS = 5
STEP = "/runs/run-1/train/150"
PAGES = {
    "run": ("/runs/run-1", FIRST_PAINT),
    "step": (STEP, FIRST_PAINT),
    "filter": (f"{STEP}/only/failed", FILTER),
    "filter_by_gap": (f"{STEP}/only/gap", FILTER),
    "episode": (f"{STEP}/episode/{digest('g7/1')}", FIRST_PAINT),
    "tokens": (f"{STEP}/episode/{digest('g7/0')}/tokens", FIRST_PAINT),
}


def group_of(number: int) -> StoredGroup:
    """A group of two episodes, one of which failed, with a scenario of its own."""
    stored = make_group(f"g{number}")
    scenario = replace(stored.group.scenario, id=f"scenario-{number}")
    episodes = [replace(episode, scenario_id=scenario.id) for episode in stored.group.episodes]
    return replace(stored, group=replace(stored.group, scenario=scenario, episodes=episodes))


def store_run(folder: Path, steps: int, groups: int) -> None:
    """Stores a run whose steps have equal episodes."""
    run = open_store(str(make_run(folder)))
    batch = EpisodeBatch(purpose=Purpose.TRAIN, step=1, stored=[group_of(number) for number in range(groups)])
    ObjectEpisodeStore(run, folder.name).append(batch)
    content = run.get(layout.episode_batch(Purpose.TRAIN, 1))
    for step in range(2, steps + 1):
        run.put(layout.episode_batch(Purpose.TRAIN, step), content)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """The printed address of `kestrl ui`, and its process id."""
    command = [sys.executable, "-m", "kestrl._app.cli.main", "ui", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), server.pid
        finally:
            server.terminate()


def first_paint(browser: Browser, address: str) -> float:
    """Milliseconds from the navigation to the first text."""
    browser.open(address)
    return browser.run(
        "new Promise((done) => new PerformanceObserver((list) => { const paint = "
        "list.getEntriesByName('first-contentful-paint')[0]; if (paint) done(paint.startTime); })"
        ".observe({type: 'paint', buffered: true}))"
    )


def largest_memory(pid: int) -> float:
    """Largest resident size of a process so far, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def cpu(pid: int) -> float:
    """CPU time of a process so far in milliseconds, which the load of the machine changes little."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1_000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(steps: int = STEPS, groups: int = GROUPS) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        store_run(folder / "run-1", steps, groups)
        browser = Browser(chromium(), Path(name) / "profile")
        try:
            with serving(folder) as (printed, pid):
                browser.open(printed)
                site = printed.partition("/?")[0]
                for page, (address, limit) in PAGES.items():
                    begin = cpu(pid)
                    paints = [first_paint(browser, site + address)]
                    first = cpu(pid)
                    paints += [first_paint(browser, site + address) for _ in range(VISITS - 1)]
                    yield _row(f"page/{page}/first_visit", paints[0], limit)
                    yield _row(f"page/{page}/first_visit/server_cpu", first - begin, limit)
                    yield _row(f"page/{page}", statistics.median(paints[1:]), limit)
                    yield _row(f"page/{page}/server_cpu", (cpu(pid) - first) / (VISITS - 1), limit)
                yield _row("page/memory", largest_memory(pid), MEMORY, unit="MB")
        finally:
            browser.close()


def _row(name: str, figure: float, limit: float, unit: str = "ms") -> Row:
    return Row(name=name, value=figure, unit=unit, reference=limit, against="limit")


def quick() -> Iterator[Row]:
    return measure(steps=151, groups=10)


if __name__ == "__main__":
    main(__doc__, measure, quick)
