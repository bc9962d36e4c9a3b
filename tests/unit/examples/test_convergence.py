"""Data, rewards and the agent loop of examples/convergence."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kestrl._app.tasks.text_tasks import alphabet_sort, letters, letters_transcripts, reverse_text
from kestrl.data import load_scenarios, locate_data
from kestrl.data.conversations import read_conversations
from kestrl.errors import UserInputError
from kestrl.testing.attempts import make_attempt

FOLDER = Path(__file__).parents[3] / "examples" / "convergence"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("convergence")


@pytest.mark.parametrize("generate", [reverse_text, letters])
def test_the_expected_text_is_the_reversed_one(generate: Any) -> None:
    for row in generate("train", seed=3, size=100):
        assert row["ground_truth"][::-1] == row["prompt"][1]["content"]


@pytest.mark.parametrize("generate", [reverse_text, letters, alphabet_sort])
def test_splits_of_all_seeds_share_no_prompt(generate: Any) -> None:
    def prompts(split: str, seed: int) -> set[str]:
        return {row["prompt"][-1]["content"] for row in generate(split, seed=seed, size=200)}

    assert len(prompts("train", 1)) == 200
    assert not (prompts("train", 1) | prompts("train", 2)) & (prompts("validation", 1) | prompts("validation", 3))
    with pytest.raises(UserInputError, match="not one of train, validation"):
        generate("test", seed=1, size=1)


def test_more_texts_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrl._app.tasks.text_tasks.LETTERS", "ABCDE")
    with pytest.raises(UserInputError, match="there are not 1000 different texts"):
        letters("train", seed=1, size=1000)


def test_letters_transcripts_err_as_often_as_asked() -> None:
    rows = letters_transcripts(seed=1, size=400, mistakes=0.3)
    wrong = [row for row in rows if row["messages"][1]["content"][::-1] != row["messages"][2]["content"]]
    assert 0.22 < len(wrong) / 400 < 0.38
    assert all(
        sorted(row["messages"][1]["content"].split()) == sorted(row["messages"][2]["content"].split()) for row in wrong
    )


def test_manifests_name_the_generated_rows(tmp_path: Path) -> None:
    def located(uri: str) -> Path:
        return locate_data(uri, size=8, base=tmp_path, seed=1, cache_dir=tmp_path, field="spec.data.train.uri")

    for path in ("reverse-text/train", "reverse-text/letters/validation", "alphabet-sort/train"):
        assert len(load_scenarios(located(f"demo://{path}"))) == 8
    assert len(read_conversations(located("demo://reverse-text/transcripts/30"))) == 8
    for path in ("letters", "letters/test", "transcripts/101", "train/1"):
        with pytest.raises(UserInputError, match="give SPLIT, letters/SPLIT or transcripts/PERCENT"):
            located(f"demo://reverse-text/{path}")


def test_reversed_text_is_similarity_within_the_tags(example: Any) -> None:
    def score(answer: str, **config: Any) -> Any:
        return example.reversed_text(make_attempt(answer, ground_truth="cba"), **config)

    assert score("It is <reversed_text>\ncba\n</reversed_text>.").value == 1.0
    assert score("<reversed_text>cba</reversed_text>").metrics == {"answer_correct": 1.0}
    assert score("<reversed_text>ca</reversed_text>").value == pytest.approx(0.8)
    assert score("cba").value == 0.0
    assert score("cba", tags=False).value == 1.0


def test_sorted_names_are_scored_turn_by_turn(example: Any) -> None:
    (row,) = alphabet_sort("train", seed=1, size=1)
    first, *rest = row["ground_truth"]
    turns = [f"<alphabetical_sorted>\n{first}\n</alphabetical_sorted>"]
    turns += [f"<combined_alphabetical_sorted>\n{text}\n</combined_alphabetical_sorted>" for text in rest]
    whole = example.sorted_names(make_attempt(*turns, ground_truth=row["ground_truth"]))
    assert whole.value == 1.0
    assert whole.metrics == {"answer_correct": 1.0}
    begun = example.sorted_names(make_attempt(turns[0], ground_truth=row["ground_truth"]))
    assert begun.value == pytest.approx(1 / len(turns))
    assert begun.metrics == {"answer_correct": 0.0}
    unmarked = [re.sub(" // new name!", "", turn) for turn in turns]
    assert 0 < example.sorted_names(make_attempt(*unmarked, ground_truth=row["ground_truth"])).value < 0.9


def test_every_list_is_sorted_and_marks_the_new_names() -> None:
    for row in alphabet_sort("train", seed=2, size=50):
        known: set[str] = set()
        asked = [row["prompt"][0]["content"], *row["metadata"]["follow_ups"]]
        for number, (question, expected) in enumerate(zip(asked, row["ground_truth"], strict=True)):
            new = set(question.split("FIRST name: ")[1].split("\n")[0].split(", "))
            lines = expected.split("\n")
            names = [line.removesuffix(" // new name!") for line in lines]
            assert names == sorted(known | new)
            marked = {name for name, line in zip(names, lines, strict=True) if line != name}
            assert marked == (new if number else set())
            known |= new


class Scripted:
    """A conversation of a model that answers a number of times."""

    def __init__(self, answers: int) -> None:
        self.scenario = SimpleNamespace(metadata={"follow_ups": ["second", "third"]})
        self.left, self.said, self.reason = answers, [], None

    async def generate(self) -> object | None:
        self.left -= 1
        return object() if self.left >= 0 else None

    def append_user(self, text: str) -> None:
        self.said.append(text)

    def stop(self, reason: str) -> None:
        self.reason = reason


@pytest.mark.parametrize(
    ("answers", "said", "reason"),
    [(0, [], None), (1, ["second"], None), (2, ["second", "third"], None), (3, ["second", "third"], "answered")],
)
async def test_follow_ups_are_asked_until_a_limit(example: Any, answers: int, said: list[str], reason: Any) -> None:
    conversation = Scripted(answers)
    await example.follow_ups(conversation)
    assert (conversation.said, conversation.reason) == (said, reason)
