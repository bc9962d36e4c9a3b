"""Asking the judges of one prompt: a reply, one repair, then the next judge. Answers are known by their content."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kestrl._shared.plan.settings.judge import JudgeEntry
from kestrl_judge.ruler.budget import MeteredRequest, RunBudget, Usage
from kestrl_judge.ruler.client import JudgeClient, NoScores, NoScoresReason
from kestrl_judge.ruler.completion import JudgeReply
from kestrl_judge.ruler.journal import Graded, Journal
from kestrl_judge.ruler.prompt import JudgePrompt, digest
from kestrl_judge.ruler.reply import Grade, Malformed
from kestrl_judge.ruler.shortening import TooLarge
from kestrl_judge.scoring import JudgeStopped

log = logging.getLogger(__name__)
REPAIR = "Your reply cannot be used: {error}. Reply again with one JSON object only, with {wanted}."
LONGEST_QUOTED = 2000
"""Characters of an invalid reply that the judge is shown again."""
TEMPLATE_TOKENS = 1000
"""Upper bound on the tokens that a model's chat template adds to a message."""
SMALLER = (1.0, 0.75, 0.55, 0.4, 0.3, 0.2)
"""Shares of the prompt's budget that are tried when a server refuses a prompt as too long."""


@dataclass(slots=True)
class JudgeCounts:
    """Counts for metrics."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Requests by model and outcome: ok, malformed, cached, or a `NoScoresReason`."""
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """By model and kind: input or output."""
    cost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """US dollars by model."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    unscored: Counter[str] = field(default_factory=Counter[str])
    """Unscored groups by reason."""
    skipped: int = 0
    """Groups without a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """Valid grades of one order."""

    prompt: JudgePrompt
    model: str
    grades: Mapping[str, Grade]


BuildPrompt = Callable[[int], JudgePrompt]
"""Makes the prompt within a number of tokens; raises `TooLarge`."""


class Asker:
    """Asks the judges of a ruler, or those that decide whether an answer is correct."""

    def __init__(self, ruler: JudgeEntry, journal: Journal, counts: JudgeCounts) -> None:
        self._ruler, self._journal, self.counts = ruler, journal, counts
        self._clients = [
            JudgeClient(judge, concurrency=ruler.concurrency, request_seconds=ruler.request_seconds)
            for judge in ruler.judges
        ]
        self._seconds = ruler.seconds / len(ruler.judges)
        """Time limit of one judge, which leaves time for the next."""
        self._budget = RunBudget(ruler)
        self._budget.spent = journal.spent
        self._running: dict[str, asyncio.Task[Graded]] = {}
        """Requests by content. A caller that gives up does not cancel one: its answer is paid for and will be used."""
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        for task in self._running.values():
            task.cancel()
        if self._running:
            await asyncio.wait(self._running.values())
        for client in self._clients:
            await client.close()

    def late(self, message: str) -> NoScores:
        """The failure of what has no opinion in time."""
        return _late(self._clients[0], message)

    async def opinion(self, build: BuildPrompt, record: list[dict[str, Any]]) -> Opinion:
        """Grades by the first judge that gives valid ones.

        Args:
            build: Makes the prompt.
            record: Gets an entry for each judge asked, for people.

        Raises:
            NoScores: No judge gave valid grades; the reason is the first judge's.
            JudgeStopped: It was closed.
        """
        failures: list[NoScores] = []
        for client in self._clients:
            try:
                return await self._by(client, build, record)
            except NoScores as error:
                failures.append(error)
                log.warning("judge %s: %s: %s", client.judge.model, error.reason, error)
        text = "; ".join(
            f"{client.judge.model}: {error}" for client, error in zip(self._clients, failures, strict=True)
        )
        raise NoScores(failures[0].reason, text)

    async def _by(self, client: JudgeClient, build: BuildPrompt, record: list[dict[str, Any]]) -> Opinion:
        """Grades by one judge, with a smaller prompt if it refuses the prompt as too long."""
        refused: NoScores | None = None
        for share in SMALLER:
            try:
                prompt = build(int(self._ruler.max_prompt_tokens * share))
            except TooLarge as error:
                raise refused or NoScores(NoScoresReason.TOO_LARGE, str(error)) from error
            try:
                graded = await self._shared(client, prompt, record)
            except NoScores as error:
                if error.reason is not NoScoresReason.TOO_LARGE:
                    raise
                refused = error
                continue
            return Opinion(prompt=prompt, model=graded.model, grades=graded.grades)
        raise refused or NoScores(NoScoresReason.TOO_LARGE, "the prompt does not fit")

    async def _shared(self, client: JudgeClient, prompt: JudgePrompt, record: list[dict[str, Any]]) -> Graded:
        """The answer to a prompt: a known one, that of a running request, or a new one."""
        options = self._options(client, prompt)
        question = json.dumps([list(prompt.messages), options], sort_keys=True)
        key = digest(client.judge.model, *client.judge.base_urls, question)
        entry: dict[str, Any] = {
            "model": client.judge.model,
            "seed": prompt.seed,
            "order": [list(prompt.episodes[name]) for name in prompt.ids],
            "ids": list(prompt.ids),
            "shortened": list(prompt.shortened),
            "messages": [dict(message) for message in prompt.messages],
        }
        record.append(entry)
        grade = self._journal.get(key)
        if grade is not None:
            self.counts.calls[client.judge.model, "cached"] += 1
            entry |= {"cached": True, "content": grade.content}
            return grade
        if self._closed:
            raise JudgeStopped(client.judge.model)
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._graded(client, prompt, options, key), name=f"judge-{key[:12]}")
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
            task.add_done_callback(_retrieve)
        started = time.monotonic()
        try:
            graded = await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise JudgeStopped(client.judge.model) from None  # `close` cancelled the request
        except NoScores as error:
            entry |= {"error": f"{error.reason}: {error}", "seconds": time.monotonic() - started}
            raise
        entry |= {"content": graded.content, "seconds": time.monotonic() - started}
        return graded

    async def _graded(self, client: JudgeClient, prompt: JudgePrompt, options: Mapping[str, Any], key: str) -> Graded:
        """Asks, and once more with the error if the reply is not valid.

        Raises:
            NoScores: There is no valid reply.
        """
        try:
            async with asyncio.timeout(self._seconds):
                graded = await self._valid(client, prompt, options)
        except TimeoutError as error:
            self.counts.calls[client.judge.model, NoScoresReason.TIMEOUT] += 1
            raise _late(client, f"no valid reply within {self._seconds:g} s") from error
        self._journal.put(key, graded)
        return graded

    async def _valid(self, client: JudgeClient, prompt: JudgePrompt, options: Mapping[str, Any]) -> Graded:
        messages = list(prompt.messages)
        errors: list[str] = []
        for _ in range(2):
            reply = await self._asked(client, messages, prompt, options)
            try:
                return self._checked(client, reply, prompt)
            except Malformed as error:
                errors.append(str(error))
                repair = REPAIR.format(error=error, wanted=prompt.form.wanted)
                messages = [
                    *prompt.messages,
                    {"role": "assistant", "content": reply.content[:LONGEST_QUOTED] or "(empty)"},
                    {"role": "user", "content": repair},
                ]
        raise NoScores(NoScoresReason.MALFORMED, f"two invalid replies: {errors[0]}; after a repair: {errors[1]}")

    def _checked(self, client: JudgeClient, reply: JudgeReply, prompt: JudgePrompt) -> Graded:
        model = client.judge.model
        try:
            grades = prompt.form.parse(reply.content)
        except Malformed as error:
            self.counts.calls[model, NoScoresReason.MALFORMED] += 1
            if reply.finish_reason == "length":
                raise Malformed(
                    f"it was cut at the limit of {self._ruler.max_reply_tokens} tokens; be brief"
                ) from error
            raise
        self.counts.calls[model, "ok"] += 1
        for name, grade in grades.items():
            log.debug("%s: %s scores %g: %s", model, prompt.episodes[name], grade.score, grade.explanation)
        return Graded(model=model, grades=grades, content=reply.content)

    async def _asked(
        self,
        client: JudgeClient,
        messages: Sequence[Mapping[str, str]],
        prompt: JudgePrompt,
        options: Mapping[str, Any],
    ) -> JudgeReply:
        """One answer, within the budget."""
        judge, started = client.judge, time.monotonic()
        log.debug("%s: messages: %s", judge.model, messages)
        # A token has at least a byte, and every message some of the template's.
        longest_prompt = sum(len(message["content"].encode()) + TEMPLATE_TOKENS for message in messages)

        def request() -> MeteredRequest:
            return MeteredRequest(
                self._budget,
                judge,
                prompt=prompt.tokens,
                longest=max(longest_prompt, prompt.tokens),
                reply=self._ruler.max_reply_tokens,
                spend=partial(self._spend, judge.model),
            )

        try:
            reply = await client.ask(messages, options, request)
        except NoScores as error:
            self.counts.calls[judge.model, error.reason] += 1
            raise
        finally:
            self.counts.seconds[judge.model] += time.monotonic() - started
        log.debug("%s: raw content: %s", judge.model, reply.content)
        return reply

    def _spend(self, model: str, spent: Usage) -> None:
        if spent.calls:
            self._journal.spend(spent)
            self.counts.tokens[model, "input"] += spent.input_tokens
            self.counts.tokens[model, "output"] += spent.output_tokens
            self.counts.cost[model] += spent.cost

    def _options(self, client: JudgeClient, prompt: JudgePrompt) -> dict[str, Any]:
        ruler, judge = self._ruler, client.judge
        options: dict[str, Any] = {"max_completion_tokens": ruler.max_reply_tokens}
        if judge.temperature is not None:
            options["temperature"] = judge.temperature
        if ruler.structured_output == "json_schema":
            schema = prompt.form.schema(strict_tokens=ruler.max_reply_tokens if judge.strict_schema else None)
            options["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "scores", "strict": True, "schema": schema},
            }
        elif ruler.structured_output == "json_object":
            options["response_format"] = {"type": "json_object"}
        return options


def _retrieve(task: asyncio.Task[Graded]) -> None:
    """Reads a failure that no caller waited for, which asyncio would otherwise log."""
    if not task.cancelled():
        task.exception()


def _late(client: JudgeClient, message: str) -> NoScores:
    """The failure of what a judge did not answer in time: its key's, if requests wait for another one."""
    if client.refusal:
        return NoScores(NoScoresReason.UNAUTHORIZED, client.refusal)
    return NoScores(NoScoresReason.TIMEOUT, message)
