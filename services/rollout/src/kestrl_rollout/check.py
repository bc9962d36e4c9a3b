"""`python -m kestrl_rollout.check`: checks loops, tokenizer, chat template and prompt lengths."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from kestrl._shared.checking import RolloutCheck, run_check
from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.text.chat import Chat, Message
from kestrl._shared.text.chat_model import verify_start
from kestrl._shared.text.toolset import NO_TOOLS, ToolSet
from kestrl.data.rows import DataRow, read_rows
from kestrl.errors import SeveralProblems, UserInputError
from kestrl.tools import ToolSchema
from kestrl_rollout.agents.loading import LoadedLoop, Loops
from kestrl_rollout.conversation.tool_session import expanded, unrendered
from kestrl_rollout.hosts.inside.verifiers_host import row_problem
from kestrl_rollout.hosts.opening import with_outside
from kestrl_rollout.loading import load_chat_model, load_job_loops

MOST_PROBLEMS = 20
FORKS = (
    "agent.template: the chat template writes a turn anew once a tool's result follows it, so that every turn begins a "
    "row of its own: an episode of N turns is computed and trained on as N conversations, each with all that was said "
    "before; a template that keeps the model's turns as they were sampled avoids it"
)


@dataclass(slots=True)
class _Seen:
    """Findings in the rows so far."""

    problems: list[str] = field(default_factory=list[str])
    warnings: dict[str, None] = field(default_factory=dict[str, None])
    starts: set[Any] = field(default_factory=set[Any])
    """Combinations of roles and tools that were checked, so that each is reported once."""


class RowCheck:
    """Checks rows as the worker would begin their episodes."""

    def __init__(
        self,
        chat: Chat,
        loops: Loops,
        tools: Sequence[ToolSchema],
        environments: Mapping[str, Sequence[str]],
        context_length: int,
    ) -> None:
        self._chat, self._loops, self._context_length = chat, loops, context_length
        self._environments = environments
        self._tools = {tool.name: tool for tool in tools}
        self._toolsets: dict[tuple[str, ...], ToolSet] = {(): NO_TOOLS}
        self.seen = _Seen()

    def overlong(self, rows: Sequence[DataRow]) -> Iterator[tuple[int, int]]:
        """Ordinal and token count of each row whose prompt leaves no room in the context."""
        for row in rows:
            try:
                tokens = self._tokens(row)
            except UserInputError as error:
                self.seen.problems.append(f"{row.place}: {error}")
                if len(self.seen.problems) >= MOST_PROBLEMS:
                    return
                continue
            if tokens >= self._context_length:
                yield row.scenario.ordinal, tokens

    def _tokens(self, row: DataRow) -> int:
        """Number of tokens of a row's prompt, or an upper bound below the context length. Raises UserInputError."""
        scenario = row.scenario
        loop = self._loops.of(scenario.agent)
        if loop.environment and (problem := row_problem(scenario.metadata)) is not None:
            raise UserInputError(problem[1])
        rendered = loop.uses_tools and not loop.writes_prompts
        offered = (scenario.tools if scenario.tools is not None else tuple(self._tools)) if rendered else ()
        names = tuple(name for name in expanded(offered, self._environments) if name in self._tools)
        toolset = self._toolset(names)
        messages = [
            Message(role=prompt_message["role"], text=prompt_message["content"]) for prompt_message in scenario.messages
        ]
        messages = messages or [Message(role="user", text="")]  # the environment gives it, in text not known here
        start = (tuple(message.role for message in messages), names, loop.name)
        if start not in self.seen.starts:
            self.seen.starts.add(start)
            texts = [Message(role=message.role, text="Some text.") for message in messages]
            if verify_start(self._chat, texts, toolset).forks:
                self.seen.warnings[FORKS] = None
        text = self._chat.text(messages, toolset)
        self._check_names(loop, names, text, row)
        # A token has at least one byte: short texts need not be encoded.
        size = len(text.encode())
        return size if size < self._context_length else len(self._chat.prompt(messages, toolset))

    def _toolset(self, names: tuple[str, ...]) -> ToolSet:
        if names not in self._toolsets:
            self._toolsets[names] = self._chat.toolset([self._tools[name].to_openai() for name in names])
        return self._toolsets[names]

    def _check_names(self, loop: LoadedLoop, names: Sequence[str], text: str, row: DataRow) -> None:
        problem = unrendered(text, names)
        if problem is None:
            return
        key = (loop.name, problem)
        if key in self.seen.starts:
            return
        self.seen.starts.add(key)
        if loop.built_in:
            raise UserInputError(problem)
        # A user's loop may write its prompts itself.
        self.seen.warnings[f"{row.place}: {problem}"] = None


async def _loops(rollout: RolloutSettings) -> Loops:
    """The job's loops, of which an agent outside of the worker was started once."""
    async with with_outside(load_job_loops(rollout), rollout) as loops:
        return loops


def check(settings: RolloutCheck) -> dict[str, Any]:
    """Overlong rows by data set, as ordinal and token count, and warnings.

    Raises:
        UserInputError: A loop, the tokenizer or the template cannot be used, or not with the roles, loops and tools of
            the rows.
    """
    rollout = settings.rollout
    sys.path[:0] = rollout.python_path
    loops = asyncio.run(_loops(rollout))
    chat_model = load_chat_model(rollout, loops, started=datetime.now().astimezone())
    tools: list[ToolSchema] = []
    environments: dict[str, list[str]] = {}
    for tool in settings.tools:
        tools.append(ToolSchema(name=tool["name"], description=tool["description"], parameters=tool["parameters"]))
        if tool["environment"]:
            environments.setdefault(tool["environment"], []).append(tool["name"])
    rows = RowCheck(chat_model.chat, loops, tools, environments, rollout.context_length)
    overlong = {
        name: list(rows.overlong(read_rows(Path(file.path), size=file.size, promptless=file.promptless)))
        for name, file in settings.data.items()
    }
    if rows.seen.problems:
        raise SeveralProblems(rows.seen.problems)
    return {"overlong": overlong, "warnings": list(rows.seen.warnings)}


if __name__ == "__main__":
    run_check(RolloutCheck, check)
