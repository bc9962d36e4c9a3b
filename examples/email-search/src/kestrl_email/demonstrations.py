"""Scripted demonstrations for the warm-up: conversations with the real tools, by a demonstrator with chosen errors.

The demonstrator errs at few decisions (which keywords, which mail, which attribute, which source), independently of the
content, and never in copying. A model that imitates it therefore has the right behaviour within reach at every
decision, and reinforcement learning finds out which it is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrl.tools.schema import describe
from kestrl_email.tools import DONT_KNOW, ReadEmail, ReturnFinalAnswer, SearchEmails
from kestrl_email.world import ATTRIBUTES, SYSTEM_PROMPT, Split, Task, make_tasks, write_database

Messages = list[dict[str, Any]]
SCHEMAS = tuple(
    describe(tool, name)
    for name, tool in (
        ("search_emails", SearchEmails),
        ("read_email", ReadEmail),
        ("return_final_answer", ReturnFinalAnswer),
    )
)
"""Tools of the demo's manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Probabilities of good decisions of the demonstrator."""

    both_keywords: float
    """Search with person and topic, not with one of them."""
    matching_mail: float
    """Read the matching one of several results, not the first."""
    second_look: float
    """After reading the wrong mail, read the matching one too."""
    right_attribute: float
    right_source: float
    give_up: float


GOOD = Habits(both_keywords=0.6, matching_mail=1.0, second_look=1.0, right_attribute=1.0, right_source=1.0, give_up=0.0)
"""Habits for the first part of the warm-up. Includes searches with one keyword, without which choosing could not be
learned."""
FAULTY = Habits(
    both_keywords=0.35, matching_mail=0.4, second_look=0.2, right_attribute=0.55, right_source=0.65, give_up=0.04
)
"""Habits for the last part, which the shipped model imitates initially."""


class Demonstrator:
    """Plays tasks of one database."""

    def __init__(self, database: Path, habits: Habits, rng: random.Random) -> None:
        self._database, self._habits, self._rng = str(database), habits, rng

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def play(self, task: Task) -> Messages:
        """One conversation from question to final answer."""
        scope = {"database": self._database, "inbox": task.inbox}
        search, read = SearchEmails(**scope), ReadEmail(**scope)
        messages: Messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.question},
        ]
        keywords = self._keywords(task)
        search_result = search(keywords)
        self._exchange(messages, "search_emails", {"keywords": keywords}, search_result.text)
        if self._chance(self._habits.give_up):
            return self._answer(messages, DONT_KNOW, [])
        mail = self._choose(task, json.loads(search_result.text))
        self._exchange(messages, "read_email", {"message_id": mail}, read(mail).text)
        if mail != task.message_id and self._chance(self._habits.second_look):
            mail = task.message_id
            self._exchange(messages, "read_email", {"message_id": mail}, read(mail).text)
        search.close()
        read.close()
        return self._answer(messages, self._fact(task, mail), self._sources(mail))

    def _keywords(self, task: Task) -> list[str]:
        if self._chance(self._habits.both_keywords):
            return [task.person, task.topic]
        return [self._rng.choice([task.person, task.topic])]

    def _choose(self, task: Task, results: list[dict[str, str]]) -> str:
        if self._chance(self._habits.matching_mail):
            return task.message_id
        return results[0]["message_id"]

    def _fact(self, task: Task, message_id: str) -> str:
        mail = next(mail for mail in task.mails if mail.message_id == message_id)
        attribute = task.attribute
        if not self._chance(self._habits.right_attribute):
            attribute = self._rng.choice([name for name in ATTRIBUTES if name != task.attribute])
        return mail.facts[attribute]

    def _sources(self, message_id: str) -> list[str]:
        if self._chance(self._habits.right_source):
            return [message_id]
        return []

    def _answer(self, messages: Messages, answer: str, sources: list[str]) -> Messages:
        text = ReturnFinalAnswer()(answer, sources).text
        self._exchange(messages, "return_final_answer", {"answer": answer, "sources": sources}, text)
        messages.pop()  # the episode ends with the call; its result is never shown
        return messages

    def _exchange(self, messages: Messages, name: str, arguments: dict[str, Any], result: str) -> None:
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]})
        messages.append({"role": "tool", "content": result})


def demonstrations(folder: Path, count: int, habits: Habits, seed: int) -> Iterator[Messages]:
    """Conversations over `count` warm-up tasks; their database is written to `folder`."""
    tasks = list(make_tasks(Split.WARM_UP, count, seed))
    database = folder / f"warm-up-{seed}.db"
    write_database(database, tasks)
    demonstrator = Demonstrator(database, habits, random.Random(f"{seed}/demonstrator"))  # noqa: S311 - seeded on purpose
    return (demonstrator.play(task) for task in tasks)


def conversation_row(messages: Messages) -> dict[str, Any]:
    """A demonstration as a row of `kestrl sft`: messages in OpenAI's form, and the schemas of the tools."""
    return {
        "messages": [
            {**message, "tool_calls": [{"type": "function", "function": call} for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in messages
        ],
        "tools": [schema.to_openai() for schema in SCHEMAS],
    }
