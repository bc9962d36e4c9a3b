"""The code on the pages of docs/ and in the README: executed, page by page, as a reader who types it in would.

Of each page, in order:

* a block whose preceding line ends with a file's name in backticks and a colon is written to that file, in a folder of
  the page's own, which is the working directory and is on `sys.path`; a Python file is imported;
* any other Python block is executed, all in one namespace (`await` works at the top level); with `>>>` it is a doctest;
* a JSONL block is read as a data set;
* a YAML block with `kind: AgentRLJob` is validated by `kestrl validate`;
* the tools, rewards and agent loop that a YAML block with `spec` names by import path are loaded from the page's own
  files.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tests.program import run_program

from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl._shared.plan.tools import tool_entries
from kestrl._shared.spec.load import parse_job
from kestrl.compat.verl import imports
from kestrl.data.rows import read_rows
from kestrl.errors import UserInputError
from kestrl.rewards.resolving import resolve
from kestrl_rollout.agents.loading import load_loop
from kestrl_tools.lifecycle import loaded
from kestrl_tools.tool_threads import ToolThreads

ROOT = Path(__file__).parents[3]
QUICKSTART: dict[str, Any] = yaml.safe_load((ROOT / "examples/email-search/quickstart.yaml").read_text())
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"`([\w-]+(?:/[\w-]+)*\.\w+)`:\s*\Z")
MODULE = re.compile(r"^[\w.]+(?=:)")


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    text: str
    file: str | None


def blocks(path: Path) -> Iterator[Block]:
    page = path.read_text(encoding="utf-8")
    for found in BLOCK.finditer(page):
        named = FILE_NAME.search(page[: found.start()])
        line = page.count("\n", 0, found.start()) + 2
        yield Block(line, found[1], found[2], named[1] if named else None)


def pages() -> Iterator[Any]:
    for path in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]:
        if any(block.language == "python" for block in blocks(path)):
            yield pytest.param(path, id=path.name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's own folder; modules imported meanwhile are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "gsm8k"))  # whose page says how its tools are called
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # an example's, which has the name that pages use
    imports.install()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if (file and Path(file).is_relative_to(tmp_path)) or name.partition(".")[0] == "verl":
            del sys.modules[name]


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The quickstart's manifest with a page's piece of one; a list is replaced."""
    made = dict(base)
    for name, value in changes.items():
        inner = made.get(name)
        made[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return made


class Page:
    """One page, while its blocks are carried out."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._namespace: dict[str, Any] = {"__name__": "__page__"}

    def carry_out(self, block: Block) -> None:
        if block.file is not None:
            file = self._folder / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        if block.language == "python":
            self._python(block)
        elif block.language == "yaml":
            self._yaml(block)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "jsonl":
            file = self._folder / f"line-{block.line}.jsonl"
            file.write_text(block.text, encoding="utf-8")
            read_rows(file)

    def _python(self, block: Block) -> None:
        where = f"{self._path.name}:{block.line}"
        if block.file is not None:
            importlib.invalidate_caches()
            importlib.import_module(block.file.removesuffix(".py").replace("/", "."))
        elif block.text.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block.text, self._namespace, where, str(self._path), block.line)
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)
            assert result.failed == 0, where
        else:
            code = compile(
                "\n" * (block.line - 1) + block.text,
                str(self._path),
                "exec",
                ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                dont_inherit=True,
            )
            running = eval(code, self._namespace)
            if inspect.iscoroutine(running):
                asyncio.run(running)

    def _yaml(self, block: Block) -> None:
        loaded: Any = yaml.safe_load(block.text)
        content: dict[str, Any] = loaded if isinstance(loaded, dict) else {}
        if content.get("kind") == "AgentRLJob":
            manifest = self._folder / (block.file or f"line-{block.line}.yaml")
            manifest.write_text(block.text, encoding="utf-8")
            done = run_program("validate", manifest.name, cwd=self._folder, env={**os.environ, "COLUMNS": "200"})
            assert done.returncode == 0, done.stdout + done.stderr
        if "spec" in content:
            self._load(content["spec"])

    def _load(self, spec: dict[str, Any]) -> None:
        """Loads what the specification names, as each component does when it starts."""
        job = parse_job(merged(QUICKSTART, {"spec": spec})).spec
        own = job.model_copy(update={"tools": [tool for tool in job.tools if tool.use and self._has(tool.use)]})
        asyncio.run(self._list(tool_entries(own)))
        if self._has(job.agent.loop):
            load_loop(job.agent.loop, job.agent.config)
        for index, reward in enumerate(job.rewards):
            if self._has(str(reward.rule)):
                resolve(str(reward.rule), field=f"spec.rewards[{index}].rule", config=reward.config)

    async def _list(self, entries: Sequence[ToolEntry]) -> None:
        async with loaded(entries, ToolThreads(), folder=str(self._folder)):
            pass

    def _has(self, path: str) -> bool:
        """Whether this is an import path, and not the quickstart's own."""
        module = MODULE.match(path)
        return module is not None and not module[0].startswith("kestrl_email")


@pytest.mark.parametrize("path", list(pages()))
def test_the_code_of_a_page_runs_in_the_order_it_is_read(path: Path, folder: Path) -> None:
    page = Page(path, folder)
    for block in blocks(path):
        page.carry_out(block)


def carried_out(folder: Path, text: str) -> None:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    page = Page(path, folder)
    for block in blocks(path):
        page.carry_out(block)


FILE_BLOCK = "`mine.py`:\n\n```python\ndef add(a: int) -> int:\n    return a + 1\n```\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nassert False\n```\n", AssertionError),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", AssertionError),
        ("```python\nimport asyncio\nawait asyncio.sleep(0)\nassert False\n```\n", AssertionError),
        ("```python\n>>> 1 + 1\n3\n```\n", AssertionError),
        ("```json\n{]\n```\n", ValueError),
        ('```jsonl\n{"id": "a"}\n```\n', UserInputError),
        (FILE_BLOCK + "```python\nfrom mine import add\nassert add(1) == 3\n```\n", AssertionError),
        (FILE_BLOCK + '```yaml\nspec: {tools: [{name: sub, use: "mine:sub"}]}\n```\n', UserInputError),
        (FILE_BLOCK + '```yaml\nspec: {tools: [{name: add, use: "mine:add", config: {b: 2}}]}\n```\n', UserInputError),
        ('```yaml\nspec: {agent: {loop: "mine:Loop"}}\n```\n', UserInputError),
        ('```yaml\nspec: {rewards: [{rule: "mine:reward"}]}\n```\n', UserInputError),
        ("```yaml\nspec: {agents: {}}\n```\n", UserInputError),
        (
            "```yaml\nkind: AgentRLJob\napiVersion: kestrl.dev/v1alpha1\nmetadata: {name: a}\nspec: {}\n```\n",
            AssertionError,
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_mistake_on_a_page_is_found(folder: Path, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        carried_out(folder, text)


def test_a_page_without_mistakes_passes(folder: Path) -> None:
    carried_out(
        folder,
        FILE_BLOCK
        + "```python\nfrom mine import add\nassert add(1) == 2\n```\n"
        + '```yaml\nspec: {tools: [{name: add, use: "mine:add"}]}\n```\n'
        + "```python\n>>> add(1)\n2\n```\n",
    )
