"""The synthetic mailbox: deterministic, disjoint by construction, and a sound full-text index."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl_email.world import (
    ATTRIBUTES,
    Split,
    Task,
    draw_word,
    make_task,
    make_tasks,
    split_of,
    whole_or_nothing,
    write_database,
)

splits = st.sampled_from(list(Split))
numbers = st.integers(0, 100_000)
seeds = st.integers(0, 2**32)


def names(task: Task) -> set[str]:
    return {word.lower() for mail in task.mails for word in (mail.sender, mail.subject)}


@given(splits, numbers, seeds)
def test_every_name_and_topic_belongs_to_the_tasks_own_split(split: Split, number: int, seed: int):
    task = make_task(split, number, seed)
    assert {split_of(word) for word in names(task)} == {split}
    assert {task.person.lower(), task.topic} <= names(task)


@given(splits, numbers, seeds)
def test_only_one_mail_matches_both_and_the_others_match_one(split: Split, number: int, seed: int):
    task = make_task(split, number, seed)
    right, *others = task.mails
    assert 3 <= len(task.mails) <= 5
    assert (right.sender, right.subject) == (task.person, task.topic)
    assert all((mail.sender, mail.subject) != (task.person, task.topic) for mail in others)
    assert any(mail.sender == task.person for mail in others)
    assert any(mail.subject == task.topic for mail in others)
    assert len({mail.message_id for mail in task.mails}) == len(task.mails)


@given(splits, numbers, seeds)
def test_the_question_names_person_and_topic_and_the_body_every_attribute(split: Split, number: int, seed: int):
    task = make_task(split, number, seed)
    assert task.person in task.question
    assert task.topic in task.question
    assert all(mail.facts[attribute] in mail.body for mail in task.mails for attribute in ATTRIBUTES)
    assert task.answer == task.mails[0].facts[task.attribute]


def test_no_name_of_held_out_questions_occurs_elsewhere():
    seen = {split: set[str]().union(*(names(task) for task in make_tasks(split, 300, 42))) for split in Split}
    assert seen[Split.VALIDATION].isdisjoint(seen[Split.TRAIN] | seen[Split.WARM_UP])
    assert seen[Split.TRAIN].isdisjoint(seen[Split.WARM_UP])
    assert all(len(words) > 1000 for words in seen.values())


def test_a_task_is_a_function_of_its_arguments():
    assert list(make_tasks(Split.TRAIN, 5, 42)) == list(make_tasks(Split.TRAIN, 5, 42))
    assert make_task(Split.TRAIN, 3, 42) == list(make_tasks(Split.TRAIN, 5, 42))[3]
    assert make_task(Split.TRAIN, 3, 42) != make_task(Split.TRAIN, 3, 43)


def test_the_world_is_unchanged_since_the_measurements():
    task = make_task(Split.VALIDATION, 0, 42)
    known = ("On which day is the wiofes meeting of Meflun?", "Friday", "m63")
    assert (task.question, task.answer, task.message_id) == known, "raise EDITION when this changes on purpose"


def test_a_drawn_word_is_taken():
    taken: set[str] = set()
    drawn = [draw_word(random.Random(1), Split.TRAIN, taken) for _ in range(3)]
    assert len(set(drawn)) == 3
    assert taken == set(drawn)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("world") / "mails.db"
    write_database(path, make_tasks(Split.TRAIN, 20, 1))
    return path


def test_the_full_text_index_is_sound(database: Path, tmp_path: Path):
    copy = tmp_path / "copy.db"
    copy.write_bytes(database.read_bytes())
    with closing(sqlite3.connect(copy)) as connection:
        # Raises "database disk image is malformed" when index and content disagree.
        connection.execute("INSERT INTO emails_fts (emails_fts, rank) VALUES ('integrity-check', 1)")
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_every_mail_is_stored_once_with_its_recipient(database: Path):
    mails = sum(len(task.mails) for task in make_tasks(Split.TRAIN, 20, 1))
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM emails").fetchone() == (mails,)
        assert connection.execute("SELECT count(DISTINCT email_id) FROM recipients").fetchone() == (mails,)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")
    with suppress(RuntimeError), whole_or_nothing(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
