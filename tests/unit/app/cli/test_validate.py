"""`kestrl validate`: what can be known without an engine, and a start that never reaches one for a job that cannot
run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.program import run_program, whole_text

from kestrl._shared import checking
from kestrl._shared.plan.settings.tools import ToolEntry, ToolsSettings

pytestmark = pytest.mark.share

CODE = """\
import sys
print("noise of the user's module")

def add(a: int, b: int) -> int:
    '''Adds.

    Args:
        a: One.
        b: Other.
    '''
    return a + b

def reward(attempt) -> float:
    return 1.0

async def loop(conversation) -> None:
    await conversation.generate()
"""
GEMMA = """\
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Project:
    """A folder as a user has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "mine.py").write_text(CODE)
        self.rows: list[dict[str, Any]] = [
            {"id": number, "question": f"{number}?", "ground_truth": str(number)} for number in range(8)
        ]
        self.spec: dict[str, Any] = {
            "model": {"base": "demo://tiny"},
            "data": {"train": {"uri": "train.jsonl"}},
            "tools": [{"name": "add", "use": "mine:add"}],
            "rewards": [{"rule": "exact_answer"}],
        }

    def kestrl(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        manifest = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": {"name": "job"}}
        (self.folder / "job.yaml").write_text(yaml.safe_dump({**manifest, "spec": self.spec}))
        return run_program(command, "job.yaml", *arguments, cwd=self.folder)

    def refused(self, *arguments: str) -> str:
        ended = self.kestrl("validate", *arguments)
        assert ended.returncode == 2, ended.stdout + ended.stderr
        assert "noise" not in ended.stdout + ended.stderr
        return whole_text(ended.stderr)

    def valid(self, *arguments: str) -> str:
        ended = self.kestrl("validate", *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_job_whose_parts_all_load_is_valid(project: Project) -> None:
    project.spec |= {"rewards": [{"rule": "mine:reward"}], "agent": {"loop": "mine:loop"}}
    assert project.valid() == "job.yaml: valid, 8 train scenarios\n"


def test_the_tools_of_an_mcp_server_are_listed_and_their_rows_checked(project: Project) -> None:
    sample = Path(__file__).parents[2] / "tools" / "mcp_sample.py"
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("env", "echo")]
    (project.folder / "state.json").write_text(json.dumps({"tools": tools}))
    secret = {"KEY": {"secretRef": {"name": "tracker"}, "secretKey": "TOKEN"}}
    server = {"command": [sys.executable, str(sample), "state.json"], "secretEnv": secret}
    project.spec["tools"] = [{"name": "things", "mcp": server}]
    printed = project.refused()
    assert "spec.tools[0].mcp.secretEnv.KEY.secretRef:" in printed
    assert "tracker.env does not exist" in printed
    (project.folder / "tracker.env").write_text("TOKEN=abc\n")
    assert project.valid() == "job.yaml: valid, 8 train scenarios, things offers echo, env\n"
    project.rows[3]["tools"] = ["ecko"]
    project.rows[4]["tools"] = {"things": {"create_kwargs": {"x": 1}}}
    printed = project.refused()
    assert "the job has no tool 'ecko' (it has: echo, env, things)" in printed
    assert "an MCP server takes none" in printed


@pytest.mark.parametrize(
    ("server", "field"),
    [
        ({"mcp": {"url": "http://search.nowhere-here.svc:8080/mcp"}}, "mcp.url"),
        ({"http": {"openapi": "http://search.nowhere-here.svc/openapi.json"}}, "http.openapi"),
    ],
)
def test_a_server_of_a_cluster_is_a_warning_here(project: Project, server: dict[str, Any], field: str) -> None:
    project.spec["tools"].append({"name": "search", **server})
    project.rows[3]["tools"] = ["search"]
    printed = project.valid()
    assert f"spec.tools[1].{field}: search.nowhere-here.svc is a name of a cluster, which does not resolve" in printed
    project.spec["tools"][0] = {"name": "b", "use": "mine:nosuch"}
    assert "spec.tools[0].use: module 'mine' has no 'nosuch'" in project.refused()


def test_operations_of_an_openapi_document_are_listed_and_their_rows_checked(project: Project) -> None:
    look = {"operationId": "look", "parameters": [{"name": "word", "in": "query", "schema": {"type": "string"}}]}
    document = {
        "openapi": "3.1.0",
        "paths": {"/look": {"get": look}, "/up": {"post": {"requestBody": {"content": {}}}}},
    }
    (project.folder / "shop.yaml").write_text(yaml.safe_dump(document))
    server = {"openapi": "shop.yaml", "baseUrl": "http://shop.nowhere-here.svc/v1"}
    project.spec["tools"] = [{"name": "shop", "http": server}]
    printed = project.refused()
    assert "spec.tools[0].http.openapi: the operation (POST /up) is not supported: its body is of no type" in printed
    project.spec["tools"][0]["tools"] = ["look"]
    assert project.valid() == "job.yaml: valid, 8 train scenarios, shop offers look\n"
    project.rows[3]["tools"] = {"look": {"execute_kwargs": {"words": "a"}}}
    project.rows[4]["tools"] = {"shop": {"create_kwargs": {"x": 1}}}
    printed = project.refused()
    assert "look: the row's execute_kwargs do not fit: it has no parameter words" in printed
    assert "an HTTP server takes none" in printed


MAILBOX = """
class Mailbox:
    'Reads mail.'
    def __init__(self, *, database: str): ...
    def __call__(self, word: str) -> str:
        'Reads.'
        return word
    @staticmethod
    def check_row(*, database: str) -> None:
        if database == "gone.db":
            raise ValueError("gone.db does not exist")
        if database == "odd.db":
            raise RuntimeError("a mistake")
"""


def test_a_tool_s_own_check_reads_each_distinct_row_once(project: Project) -> None:
    (project.folder / "mine.py").write_text(CODE + MAILBOX)
    project.spec["tools"] = [{"name": "mail", "use": "mine:Mailbox"}]
    for number, row in enumerate(project.rows):
        row["tools"] = {"mail": {"create_kwargs": {"database": "here.db" if number < 5 else "gone.db"}}}
    project.rows[7]["tools"]["mail"]["create_kwargs"]["database"] = "odd.db"
    printed = project.refused()
    assert "train.jsonl:6: mail: create_kwargs: gone.db does not exist" in printed
    assert "train.jsonl:7: " not in printed, "equal arguments are reported at the first row"
    assert "train.jsonl:8: mail: create_kwargs: RuntimeError: a mistake" in printed
    (project.folder / "mine.py").write_text(CODE + MAILBOX.replace("@staticmethod", "").replace("(*,", "(self, *,"))
    assert "Mailbox.check_row is called without an instance: make it a staticmethod" in project.refused()


def test_everything_that_a_job_names_and_does_not_exist(project: Project) -> None:
    project.spec |= {
        "tools": [{"name": "add", "use": "nosuch:f"}, {"name": "b", "use": "mine:nosuch"}],
        "rewards": [{"rule": "nosuch:f"}],
        "model": {"base": "/nope"},
    }
    printed = project.refused()
    assert "spec.model.base: /nope does not exist" in printed
    assert "spec.tools[0].use: cannot import 'nosuch'" in printed
    assert "spec.tools[1].use: module 'mine' has no 'nosuch'" in printed
    assert "spec.rewards[0].rule: cannot import 'nosuch'" in printed


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def reward(attempt): pass", "mine:reward: its value is None (NoneType); return a float or a Score"),
        ("def reward(attempt): return {'reward': 1.0}", "its value is {'reward': 1.0} (dict); return a float"),
        ("def reward(attempt): return True", "its value is True (bool); return a float"),
        ("async def reward(attempt): return '1'", "its value is '1' (str); return a float"),
        ("def reward(attempt): return [1.0, 2.0]", "it returned 2 turn rewards for an episode of 1 turns"),
        (
            "from kestrl.rewards import Score\ndef reward(attempt): return Score(value=1.0, metrics={'step': 1.0})",
            "mine:reward: the metric 'step' is reserved by the learner; use another name; in a run it is left out",
        ),
        (
            "from kestrl.rewards import Score\ndef reward(attempt): return Score(value=1.0, metrics={'a\\nb': 1.0})",
            "mine:reward: the metric 'a\\nb' has a name that is not a printable string; in a run it is left out",
        ),
        ("def reward(completions, **kwargs): ...", "mine:reward(completions, **kwargs) has the signature of TRL"),
        (
            "def reward(prompts, completions, **kwargs): ...",
            "has the signature of TRL; a reward here is called with one",
        ),
        ("def reward(data_source, solution_str, ground_truth): ...", "has the signature of verl"),
    ],
)
def test_a_reward_that_is_none_is_refused(project: Project, code: str, problem: str) -> None:
    (project.folder / "mine.py").write_text(CODE.replace("def reward", "def other") + code + "\n")
    project.spec["rewards"] = [{"rule": "exact_answer"}, {"rule": "mine:reward"}]
    printed = project.refused()
    assert "spec.rewards[1].rule: " in printed
    assert problem in printed


def test_a_reward_is_tried_at_the_first_row(project: Project) -> None:
    code = "def reward(attempt):\n    return float(attempt.scenario.ground_truth) + attempt.max_turns\n"
    (project.folder / "mine.py").write_text(CODE.replace("def reward", "def other") + code)
    project.spec["rewards"] = [{"rule": "mine:reward"}]
    assert project.valid() == "job.yaml: valid, 8 train scenarios\n"
    project.rows[0]["ground_truth"] = "none"
    assert "warning: spec.rewards[0].rule: mine:reward: ValueError: could not convert" in project.valid()
    assert "train.jsonl:1 that calls no tool); an episode for which it raises has no reward" in project.valid()


def test_a_tool_without_a_docstring_is_a_warning(project: Project) -> None:
    (project.folder / "mine.py").write_text(CODE + "\ndef bare(a: int) -> int:\n    return a\n")
    project.spec["tools"].append({"name": "bare", "use": "mine:bare"})
    printed = project.valid()
    assert "warning: spec.tools: bare has no description, so that the model learns only its name; add a" in printed
    assert "add has no" not in printed


def test_every_secret_without_its_file_is_named(project: Project) -> None:
    ruler = {"baseUrl": "https://judge.example/v1", "model": "m", "secretRef": {"name": "judge"}, "secretKey": "KEY"}
    project.spec["rewards"].append({"ruler": ruler})
    project.spec["storage"] = {"uri": "file:///tmp/none", "secretRef": {"name": "store"}}
    container = {"name": "tools", "envFrom": [{"secretRef": {"name": "patched"}}]}
    project.spec["patches"] = [{"role": "tools", "template": {"spec": {"containers": [container]}}}]
    printed = project.refused()
    for field, name in (
        ("spec.storage.secretRef", "store"),
        ("spec.rewards[1].ruler.secretRef", "judge"),
        ("spec.patches[0].template.spec.containers", "patched"),
    ):
        assert f"{field}: {project.folder}/{name}.env does not exist; create it with the secret's entries" in printed
    for name in ("store", "judge", "patched"):
        (project.folder / f"{name}.env").write_text("KEY=abc\n")
    assert "abc" not in project.valid()


def test_loops_that_cannot_be_loaded(project: Project) -> None:
    project.spec["agent"] = {"loop": "nosuch:L", "loops": {"mine": "mine:nosuch"}}
    printed = project.refused()
    assert "agent.loop: cannot import 'nosuch'" in printed
    assert "agent.loops.mine: module 'mine' has no 'nosuch'" in printed


def test_rows_that_do_not_fit_the_job(project: Project) -> None:
    project.rows[1]["tools"] = ["add", "subtract"]
    project.rows[2]["ground_truth"] = None
    project.rows[3]["agent_name"] = "other"
    printed = project.refused()
    assert "train.jsonl:2: tools: the job has no tool 'subtract' (it has: add)" in printed
    assert "train.jsonl:3: ground_truth: is null or missing, and the reward exact_answer compares with it" in printed
    assert "train.jsonl:4: agent_name: the job has no agent loop 'other'" in printed


def test_a_row_may_name_an_environment(project: Project) -> None:
    """`tools` by the environment's name offers its tools, which the template renders."""
    code = "class Shop:\n    def reset(self, stock): ...\n    def search(self, word: str) -> str: 'Searches.'\n"
    (project.folder / "shop.py").write_text(code)
    project.spec["tools"] = [{"use": "shop:Shop"}]
    for row in project.rows:
        row["tools"] = {"Shop": {"create_kwargs": {"stock": {}}}}
    assert project.valid() == "job.yaml: valid, 8 train scenarios\n"
    project.rows[0]["tools"] = ["Market"]
    assert "tools: the job has no tool 'Market' (it has: search, Shop)" in project.refused()


NOTES = """
class Notes:
    def __init__(self, owner: str, limit: int = 1) -> None: ...
    def __call__(self, query: str) -> str: ...

class Shop:
    def __init__(self, currency: str = "EUR") -> None: ...
    def reset(self, stock: dict[str, int]) -> None: ...
    def search(self, word: str) -> str: ...
"""


GUESS = """

class Guess:
    def reset(self, secret="lamp") -> str:
        self.reward = 0.0
        return "Guess."

    def guess(self, word: str) -> str:
        'Guesses.'
        self.reward = 1.0
        return word

    def get_reward(self):
        return self.reward
"""


def test_an_environment_as_trl_has_it_is_begun_and_rewarded_once(project: Project) -> None:
    project.spec["tools"] = [{"use": "mine:Guess"}]
    project.spec["rewards"] = [{"rule": "environment_reward"}]
    (project.folder / "mine.py").write_text(CODE + GUESS)
    assert "warning" not in project.valid()
    project.spec["rewards"] = [{"rule": "exact_answer"}]
    assert "nothing takes the reward of Guess; add `rule: environment_reward`" in project.valid()
    project.spec["tools"] = []
    project.spec["rewards"] = [{"rule": "environment_reward"}]
    assert "spec.rewards[0].rule: no environment of spec.tools has a method get_reward()" in project.refused()
    project.spec["tools"] = [{"use": "mine:Guess"}]
    (project.folder / "mine.py").write_text(CODE + GUESS.replace('return "Guess."', "return [1]"))
    assert "train.jsonl:1: Guess: reset() returned a list: return text" in project.refused()
    (project.folder / "mine.py").write_text(CODE + GUESS.replace("return self.reward", "return None"))
    assert "Guess: get_reward() returned a NoneType: return a finite number" in project.refused()
    (project.folder / "mine.py").write_text(CODE + GUESS.replace("self.reward = 0.0", "self.reward = self.no"))
    assert "warning: spec.tools: " in project.valid()


def test_what_rows_set_for_tools_is_tried_against_their_signatures(project: Project) -> None:
    (project.folder / "notes.py").write_text(NOTES)
    project.spec["tools"] = [
        {"name": "notes", "use": "notes:Notes", "config": {"limit": 3}},
        {"use": "notes:Shop"},
        {"name": "add", "use": "mine:add"},
    ]
    fits: dict[str, Any] = {
        "notes": {"create_kwargs": {"owner": "ann"}},
        "Shop": {"create_kwargs": {"stock": {"lamp": 1}}},
        "add": {"execute_kwargs": {"a": 1}},
    }
    for row, changes in zip(
        project.rows,
        (
            {},
            {"notes": {"create_kwargs": {"owned": "ann"}}},
            {"notes": {}},
            {"notes": {"create_kwargs": {"owner": "ann", "limit": 4}}},
            {"Shop": {"create_kwargs": {"shelf": 1}}},
            {"add": {"create_kwargs": {"a": 1}}},
            {"add": {"execute_kwargs": {"c": 1}}},
            {"search": {"create_kwargs": {"stock": {}}}},
        ),
        strict=True,
    ):
        row["tools"] = {**fits, **changes}
    printed = project.refused()
    assert "train.jsonl:1:" not in printed
    for line, problem in (
        (2, "notes: the row's create_kwargs do not fit: Notes: missing a required argument: 'owner'"),
        (3, "notes: the row's create_kwargs do not fit: Notes: missing a required argument: 'owner'"),
        (4, "notes: the row's create_kwargs do not fit: the manifest's config sets limit for every episode"),
        (5, "Shop: the row's create_kwargs do not fit: Shop.reset: missing a required argument: 'stock'"),
        (6, "add: the row's create_kwargs do not fit: it is a function"),
        (7, "add: the row's execute_kwargs do not fit: it has no parameter c"),
        (8, "search: create_kwargs belong under the name of its environment, 'Shop'"),
    ):
        assert f"train.jsonl:{line}: {problem}" in printed
    project.spec["agent"] = {"loop": "single_turn"}
    assert "create_kwargs" not in project.valid()  # its episodes make no tools
    project.spec["agent"] = {"loop": "mine:loop"}
    assert "warning: " in project.valid()
    assert "'Shop'; the episode fails if mine:loop calls a tool" in project.valid()


def test_a_row_may_select_its_loop(project: Project) -> None:
    project.spec["agent"] = {"loops": {"mine": "mine:loop"}}
    project.rows[0]["agent_name"], project.rows[1]["agent_name"] = "mine", "single_turn_agent"
    project.valid()


def test_a_row_leaves_an_agent_outside_only_for_a_loop_that_the_manifest_names(project: Project) -> None:
    (project.folder / "mine.py").write_text(CODE + "\ndef agent(row, base_url, key, deadline): ...\n")
    project.spec["agent"] = {"run": "mine:agent"}
    project.rows[1]["agent_name"] = "tool_agent"
    printed = project.refused()
    assert "train.jsonl:2: agent_name: 'tool_agent' is a loop of the worker" in printed
    assert "run by agent.run; remove the column, or list the loop in spec.agent.loops, such as" in printed
    project.spec["agent"]["loops"] = {"tool_agent": "tool_agent"}
    project.valid()


def test_overlong_rows_are_counted_and_a_set_of_nothing_else_refused(project: Project) -> None:
    project.rows[2]["question"] = "word " * 400_000
    project.spec["algorithm"] = {"groupsPerStep": 4}
    printed = project.valid()
    assert (
        "warning: spec.data.train: 1 of 8 train rows do not fit inference.contextLength (2048), the first at" in printed
    )
    assert "train.jsonl:3 with" in printed
    assert "valid, 7 train scenarios" in printed
    project.spec["algorithm"] = {"groupsPerStep": 8}
    assert "7 usable rows x 1 epochs do not fill one step of 8 groups" in project.refused()
    project.rows = project.rows[2:3]
    project.spec["algorithm"] = {"groupsPerStep": 1}
    assert "1 of 1 train rows do not fit" in project.refused()


def test_a_task_that_is_trained_on_and_held_out_is_a_warning(project: Project) -> None:
    held_out = [{"id": f"held-{number}", "question": f"{number}?", "ground_truth": str(number)} for number in (9, 6, 7)]
    (project.folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    project.spec["data"]["validation"] = {"uri": "held.jsonl"}
    printed = whole_text(project.valid())
    assert "warning: spec.data.validation: 2 of 3 rows have a task of data.train, such as" in printed
    assert re.search(r"such as \S+/held.jsonl:2, which is that of \S+/train.jsonl:7; .* seeds", printed)
    (project.folder / "held.jsonl").write_text(json.dumps(held_out[0]))
    assert "warning" not in project.valid()
    project.spec["data"]["validation"] = {"uri": "train.jsonl"}
    assert "warning" not in project.valid(), "the manifest names one data set for both"


def test_tools_that_the_template_does_not_render_are_refused(project: Project) -> None:
    (project.folder / "plain.jinja").write_text(GEMMA)
    project.spec["agent"] = {"template": {"uri": "plain.jinja"}, "toolCallFormat": "hermes"}
    assert "spec.tools: the chat template does not render add, so the model would never call it" in project.refused()
    for row in project.rows:
        row["question"] += " Call add for sums."
    project.valid()


def test_a_template_is_proven_with_the_roles_of_the_data(project: Project) -> None:
    (project.folder / "plain.jinja").write_text(GEMMA)
    project.spec |= {"agent": {"template": {"uri": "plain.jinja"}}, "tools": []}
    project.valid()
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    project.rows[4] = {"id": "s", "prompt": said, "ground_truth": "x"}
    printed = project.refused()
    assert "train.jsonl:5: the chat template refuses the conversation: System role not supported" in printed


def test_addresses_of_a_cluster_are_reported_as_unchecked(project: Project) -> None:
    project.spec["model"] = {"base": "s3://bucket/model"}
    assert "warning: spec.model.base: s3://bucket/model is not on this machine; not checked" in project.valid()


def test_no_engine_starts_for_a_job_that_cannot_run(project: Project) -> None:
    project.spec["rewards"] = [{"rule": "nosuch:f"}]
    ended = project.kestrl("run", "--runs", "runs")
    assert ended.returncode == 2, ended.stderr
    assert "spec.rewards[0].rule: cannot import 'nosuch'" in ended.stderr
    assert not list(project.folder.glob("runs/**/engine-0*"))


def settings_for(folder: Path, code: str) -> checking.ToolsCheck:
    (folder / "odd.py").write_text(code)
    tools = ToolsSettings(
        component="tools-0",
        job="j",
        run="r",
        listen="",
        python_path=(str(folder),),
        tools=(ToolEntry(name="x", use="odd:x"),),
        call_seconds=1.0,
    )
    return checking.ToolsCheck(tools=tools, data={})


@pytest.mark.parametrize(
    ("code", "seconds", "problem"),
    [
        (
            "print('on it', flush=True)\nimport time\nwhile True: time.sleep(1)",
            10,
            "not loaded within 10 s; its last output: on it",
        ),
        (
            "import os\nprint('bye', flush=True)\nos._exit(7)",
            50,
            "ended the process (exit code 7); its last output: bye",
        ),
        ("import os\nos.kill(os.getpid(), 11)", 50, "ended the process (signal SIGSEGV)"),
    ],
    ids=["hangs", "exits", "crashes"],
)
def test_a_module_that_hangs_or_ends_the_process_is_one_problem(
    tmp_path: Path, code: str, seconds: float, problem: str
) -> None:
    settings = settings_for(tmp_path, code)
    report = checking.ask("kestrl_tools.check", settings, subject="spec.tools", seconds=seconds)
    (found,) = report.problems
    assert found.startswith("spec.tools: ")
    assert problem in found


def test_what_a_module_starts_ends_with_its_check(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
import os, pathlib, subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path({str(pid)!r}).write_text(str(child.pid))
os._exit(7)
"""
    report = checking.ask("kestrl_tools.check", settings_for(tmp_path, code), subject="spec.tools", seconds=50)
    assert "ended the process (exit code 7)" in report.problems[0]
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_a_part_that_is_not_installed_is_reported(tmp_path: Path) -> None:
    report = checking.ask("kestrl_nowhere.check", settings_for(tmp_path, ""), subject="spec.tools", seconds=3)
    assert (report.missing, report.problems) == ("kestrl-nowhere", ())
