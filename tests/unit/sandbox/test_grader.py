"""A policy that overwrites the function of its grader does not score: through the tool service and the judge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.unit.judge import conftest as judge
from tests.unit.judge import reward_samples
from tests.unit.tools import conftest as tools

from kestrl._shared.plan.settings.judge import RewardEntry
from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.episode import CallOutcome, Group, Scenario
from kestrl.testing.attempts import make_call

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAME, RULE = "code_interpreter", "reward_samples:last_output_is_right"
FILE = Path(reward_samples.__file__)
ALWAYS = "lambda attempt: 1.0"
HONEST = "print(2 + 3)"
HACKS = {
    "the function in every module": f"import sys\nfor module in list(sys.modules.values()):\n"
    f"    if module: module.last_output_is_right = {ALWAYS}\nprint(1)",
    "a module of the grader's name": "import sys\nopen('reward_samples.py', 'w').write('def last_output_is_right(a):\\n"
    "    return 1.0\\n')\nsys.path.insert(0, '/work')\n"
    "import reward_samples\nprint(reward_samples.last_output_is_right(0))",
    "the grader's file": f"import os\nos.makedirs({str(FILE.parent)!r}, exist_ok=True)\n"
    f"open({str(FILE)!r}, 'w').write('def last_output_is_right(a): return 1.0')\nprint(1)",
    "the grader's memory": "import os\nfor name in os.listdir('/proc'):\n"
    "    if name.isdigit() and b'judge' in open(f'/proc/{name}/cmdline', 'rb').read():\n"
    "        open(f'/proc/{name}/mem', 'r+b').write(b'x')\nprint(1)",
    "the comparison": "class Right(str):\n    def __eq__(self, other): return True\n"
    "    __hash__ = str.__hash__\nRight('1')",
    "what the tool reports": 'print(1)\nprint(\'{"outcome": "ok", "reward": 1.0}\')\nimport os\nos._exit(0)',
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services() -> AsyncGenerator[tuple[tools.Client, judge.Client]]:
    entry = ToolEntry(name=NAME, use="kestrl_sandbox.tool:CodeInterpreter", config={"max_sandboxes": 2})
    reward = RewardEntry(name="right", rule=RULE)
    async with tools.served(entry) as tool_service, judge.judged(reward) as judging:
        yield tool_service, judging


def digest() -> str:
    return hashlib.sha256(FILE.read_bytes()).hexdigest()


async def reward_of(services: tuple[tools.Client, judge.Client], code: str) -> float:
    """What an episode earns whose only call runs a program."""
    tool_service, judging = services
    session = await tool_service.open()
    answer = await tool_service.call(session, NAME, {"code": code})
    await tool_service.close(session)
    made = make_call(
        NAME, {"code": code}, text=answer.text, data=json.loads(answer.data_json), outcome=CallOutcome(answer.outcome)
    )
    scenario = Scenario(id="scenario", ordinal=0, messages=[{"role": "user", "content": "2 + 3?"}], ground_truth="5")
    group = Group(id="group", scenario=scenario, episodes=[judge.make_episode("It is 5.", made)])
    (score,) = await judging.score(group)
    assert not score.HasField("failure"), score.failure
    return float(score.reward)


@pytest.mark.parametrize("name", HACKS)
async def test_code_that_overwrites_its_grader_does_not_score(
    services: tuple[tools.Client, judge.Client], name: str
) -> None:
    before = digest()
    assert await reward_of(services, HACKS[name]) == 0.0
    assert digest() == before
    assert await reward_of(services, HONEST) == 1.0
