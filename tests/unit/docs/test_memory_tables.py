"""The tables of memory in the pages, and the estimates that they are made of."""

from __future__ import annotations

import pytest
from benchmarks.memory_tables import (
    DOCS,
    STEPS,
    WITHOUT_CHECKPOINTING,
    Step,
    estimated,
    kept_estimates,
    pages,
    split_table,
    with_table,
)

from kestrl._shared.plan.memory import GIB, MARGIN, MemoryPart


def test_the_pages_have_the_tables_of_the_plan() -> None:
    """`python -m benchmarks.memory_tables` writes them."""
    assert {path.name: path.read_text() for path in pages()} == {path.name: text for path, text in pages().items()}


def test_figures_between_the_tables_are_those_of_the_estimates() -> None:
    estimates = kept_estimates()
    uncheckpointed = estimates[WITHOUT_CHECKPOINTING]
    activations = uncheckpointed.parts[MemoryPart.ACTIVATIONS] / GIB
    words = f"rows of 4k takes {uncheckpointed.total / GIB:.0f} GiB, of which activations are {activations:.0f}."
    assert words in " ".join((DOCS / "scaling-the-learner.md").read_text().split())
    update = estimates[Step("32B")].total * (1 + MARGIN) / GIB
    assert f"must hold an update in any case, {update:.0f} GiB for 32B" in (DOCS / "gpus.md").read_text()


def test_a_table_is_replaced_where_it_stands() -> None:
    lines = split_table(kept_estimates())
    page = "\n".join(["before", "", lines[0], "|---|", "| old |", "", "after", ""])
    assert with_table(page, lines) == "\n".join(["before", "", *lines, "", "after", ""])


@pytest.mark.timeout(300)
@pytest.mark.share(2)
def test_the_kept_estimates_are_those_of_the_learner() -> None:
    """The smallest; the others take a minute each."""
    assert set(kept_estimates()) == set(STEPS)
    assert estimated(STEPS[0]) == kept_estimates()[STEPS[0]]
