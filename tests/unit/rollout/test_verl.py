"""Loops written for verl run unchanged, and train only on what was sampled."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from tests.wheels import unpacked

from kestrl.compat.verl import imports, names, tool_names
from kestrl.episode import StopReason
from kestrl.errors import Boundary, UserCodeError, UserInputError
from kestrl_rollout.agents.loading import load_loop

VERSIONS = ("0.8.0", "0.9.1")
MakeFile = Callable[[str, str], str]

TOOL_LOOP = """
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer


@register("my_tools")
class MyLoop(AgentLoopBase):
    def __init__(self, *args, tools=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.tools = {tool.name: tool for tool in tools.tools}
        self.schemas = [tool.tool_schema.model_dump(exclude_none=True) for tool in tools.tools]
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages, metrics, mask = list(kwargs["raw_prompt"]), {}, []
        assert kwargs["reward_model"]["ground_truth"] == "42"
        assert kwargs["tools_kwargs"]["search"]["create_kwargs"] == {"inbox": "a"}
        assert kwargs["data_source"] == "mails" and kwargs["extra_info"] == {"split": "train"}
        ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(
                messages, tools=self.schemas, add_generation_prompt=True, tokenize=True
            ),
        )
        request = uuid4().hex
        for turn in range(self.rollout_config.multi_turn.max_assistant_turns):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request, prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 100}
                )
            ids = ids + output.token_ids
            mask += [1] * len(output.token_ids)
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            if "search" not in text:
                break
            before = messages + [{"role": "assistant", "content": text}]
            response, _, _ = await self.tools["search"].execute("id", {"word": "a"}, agent_data=None)
            messages = before + [{"role": "tool", "content": response.text}]
            merged, mask, _ = await self.ct_merge_context_msg(before, messages, ids, mask, tools=self.schemas)
            ids = merged.token_ids
        score, facts, turns = 0.5, {"right": True}, turn + 2
        {at_end}
        return AgentLoopOutput(
            prompt_ids=ids[: -len(mask)], response_ids=ids[-len(mask) :], response_mask=mask,
            num_turns=turns, metrics=metrics, reward_score=score,
            extra_fields={"reward_extra_info": facts},
        )
"""


def scenario() -> Any:
    from kestrl.episode import Scenario

    return Scenario(
        id="s",
        ordinal=4,
        messages=[{"role": "user", "content": "Find it."}],
        tools_kwargs={"search": {"create_kwargs": {"inbox": "a"}}},
        ground_truth="42",
        metadata={"data_source": "mails", "extra_info": {"split": "train"}},
    )


@pytest.fixture
def tool_loop(make_file: MakeFile) -> Callable[[str], str]:
    """The loop with a line of mischief before it returns."""
    return lambda at_end="": make_file("my_loop", TOOL_LOOP.replace("{at_end}", at_end)) + ":MyLoop"


def verls_own(version: str, name: str) -> str:
    folder = unpacked(f"verl=={version}") / "verl" / "experimental" / "agent_loop"
    return (folder / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", VERSIONS)
async def test_verls_own_single_turn_loop_runs_unchanged(make_stage: Any, make_file: MakeFile, version: str) -> None:
    name = make_file("single_turn_agent_loop", verls_own(version, "single_turn_agent_loop"))
    stage = await make_stage(agent=f"{name}:SingleTurnAgentLoop")
    stage.says("A small falcon.")
    episode = await stage.episode()
    assert episode.failure is None
    (row,) = episode.rows
    assert episode.final_text == "A small falcon."
    assert list(row.mask[episode.turns[0].start :]) == [1] * len(stage.ids("A small falcon.<|im_end|>"))
    assert episode.metrics["verl.num_turns"] == 2
    assert episode.reward == 0.0


@pytest.fixture
def without_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch and PIL are not installed, as in the image of a rollout worker."""
    find = PathFinder.find_spec

    def found(fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname in imports.MEDIA else find(fullname, path, target)

    monkeypatch.setattr(PathFinder, "find_spec", found)
    for name in imports.MEDIA:
        monkeypatch.delitem(sys.modules, name, raising=False)


async def check_tool_agent(stage: Any) -> None:
    """Two calls at once, one that nobody can read, one of an unknown tool, then the answer."""
    call = '<tool_call>\n{"name": "search", "arguments": {"word": "%s"}}\n</tool_call>'
    stage.says(
        call % "a" + call % "b",
        '<tool_call>{"name": "search", "arguments": {</tool_call>',
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        "A small falcon.",
    )
    episode = await stage.episode(scenario=scenario())
    assert episode.failure is None
    assert episode.final_text == "A small falcon."
    assert sorted(call.text for call in episode.tool_calls) == ["found a", "found b"]
    (row,) = episode.rows
    text = stage.chat_model.vocabulary.decode(row.token_ids)
    assert (
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nfound a\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nfound b\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ) in text
    assert text.count("Unknown function") == 2
    assert text.count("Tools, one JSON object a line") == 1
    sampled = sum(turn.end - turn.start for turn in episode.turns)
    assert (len(episode.turns), sum(row.mask)) == (4, sampled)
    assert await stage.closed() == ["g-1/0"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.usefixtures("without_media")
async def test_verls_own_tool_agent_loop_runs_unchanged(make_stage: Any, make_file: MakeFile, version: str) -> None:
    name = make_file("tool_agent_loop", verls_own(version, "tool_agent_loop"))
    await check_tool_agent(await make_stage(agent=f"{name}:ToolAgentLoop"))
    assert not imports.MEDIA & set(sys.modules)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.usefixtures("without_media")
async def test_an_installed_verl_is_neither_started_nor_in_the_way(
    make_stage: Any, tmp_path: Path, make_file: MakeFile, version: str
) -> None:
    folder = tmp_path / "verl" / "experimental" / "agent_loop"
    folder.mkdir(parents=True)
    (folder / "tool_agent_loop.py").write_text(verls_own(version, "tool_agent_loop"), encoding="utf-8")
    for package in (tmp_path / "verl", folder.parent, folder):
        (package / "__init__.py").write_text("raise ImportError('this would start ray')\n", encoding="utf-8")
    make_file("unrelated", "")
    await check_tool_agent(await make_stage(agent="verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop"))


@pytest.mark.usefixtures("without_media")
async def test_verls_tool_agent_reads_the_models_own_format(make_stage: Any, make_file: MakeFile) -> None:
    name = make_file("tool_agent_loop", verls_own("0.9.1", "tool_agent_loop"))
    stage = await make_stage(agent=f"{name}:ToolAgentLoop", tool_call_format="qwen_xml")
    stage.says(
        "<think>I search.</think><tool_call>\n<function=search>\n<parameter=word>\n"
        "a\n</parameter>\n</function>\n</tool_call>",
        "A small falcon.",
    )
    assert [call.text for call in (await stage.episode(scenario=scenario())).tool_calls] == ["found a"]


async def test_a_loop_with_tools(make_stage: Any, tool_loop: Callable[..., str]) -> None:
    stage = await make_stage(agent=tool_loop())
    stage.says("I search.", "A small falcon.")
    episode = await stage.episode(scenario=scenario())
    assert episode.failure is None
    (row,) = episode.rows
    sampled = stage.ids("I search.<|im_end|>") + stage.ids("A small falcon.<|im_end|>")
    assert [token for token, on in zip(row.token_ids, row.mask, strict=True) if on] == sampled
    assert [call.text for call in episode.tool_calls] == ["found a"]
    assert "\n<tool_response>\nfound a\n</tool_response>" in stage.chat_model.vocabulary.decode(row.token_ids)
    assert episode.loop_reward == 0.5
    assert episode.metrics["right"] == 1.0
    assert await stage.closed() == ["g-1/0"]


async def test_a_verl_loop_is_given_how_an_evaluation_samples(make_stage: Any, tool_loop: Callable[..., str]) -> None:
    stage = await make_stage(
        agent=tool_loop("assert (sampling_params['top_p'], sampling_params['top_k']) == (0.6, 20)")
    )
    stage.says("Done.")
    episode = await stage.episode(scenario=scenario(), sampling={"top_p": 0.6, "top_k": 20}, purpose="evaluation")
    assert episode.failure is None
    assert stage.engine.prompts[-1].sampling["top_p"] == 0.6


@pytest.mark.parametrize(
    ("at_end", "code"),
    [
        ("mask[-1] = 1; ids = ids[:-1] + [7]", "tokens_not_sampled"),
        ("mask = [1] * (len(ids) - 3)", "mask_not_sampled"),
        ("ids, mask = ids + [5], mask + [1]", "mask_not_sampled"),
        ("sampling_params['temperature'] = 2; await self.server_manager.generate('r', prompt_ids=ids, "
         "sampling_params=sampling_params)", "sampling_changed"),
        ("await self.server_manager.generate('r', prompt_ids=ids, sampling_params={'top_p': 0.9})", "sampling_changed"),
        ("await self.server_manager.generate('r', prompt_ids=ids, sampling_params={'stop': 'x'})", "sampling_changed"),
        ("await self.server_manager.generate('r', prompt_ids=ids, sampling_params={}, image_data=[1])",
         "unsupported_content"),
        ("return None", "bad_output"),
        ("score = float('nan')", "loop_reward_invalid"),
        ("score = 1e300", "loop_reward_invalid"),
        ("facts = 5", "bad_output"),
        ("self.tokenizer.apply_chat_template(messages)", "unsupported_template_option"),
        ("self.config.trainer.nnodes", "agent_raised"),
        ("self._assert_mm_supported(True)", "unsupported_content"),
        ("self.tokenizer.extend_chat([], messages, ids)", "bad_extension"),
        ("self.tokenizer.apply_chat_template([{'role': 'user', 'content': [1]}], add_generation_prompt=True)",
         "unsupported_content"),
    ],
)  # fmt: skip
async def test_what_cannot_be_trained_on_is_the_loops_failure(
    make_stage: Any, tool_loop: Callable[..., str], at_end: str, code: str
) -> None:
    stage = await make_stage(agent=tool_loop(at_end))
    stage.says("Done.")
    episode = await stage.episode(scenario=scenario())
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.code) == (Boundary.USER_CODE, code)
    assert episode.reward is None


@pytest.mark.parametrize("facts", ["{'reward': 1.0}", "{'right': float('inf')}", "{'right': 'yes'}"])
async def test_facts_that_can_be_no_metric_are_left_out(
    make_stage: Any, tool_loop: Callable[..., str], facts: str
) -> None:
    stage = await make_stage(agent=tool_loop(f"facts = {facts}"))
    stage.says("Done.")
    episode = await stage.episode(scenario=scenario())
    assert episode.failure is None
    assert episode.metrics["metrics_left_out"] == 1.0
    assert "right" not in episode.metrics


async def test_a_mask_may_leave_sampled_tokens_out(make_stage: Any, tool_loop: Callable[..., str]) -> None:
    stage = await make_stage(agent=tool_loop("mask = [0] + mask[1:]"))
    stage.says("Done.")
    episode = await stage.episode(scenario=scenario())
    assert episode.failure is None
    assert episode.sampled_tokens == len(stage.ids("Done.<|im_end|>")) - 1


async def test_a_limit_ends_the_episode_with_what_it_has(make_stage: Any, tool_loop: Callable[..., str]) -> None:
    stage = await make_stage(agent=tool_loop())
    stage.says("I search.")
    episode = await stage.episode(scenario=scenario(), sampling={"max_tokens": 15})
    assert episode.failure is None
    assert episode.stop_reason is StopReason.MAX_TOKENS
    assert episode.sampled_tokens == 15


def test_the_tokenizer_speaks_transformers_names(chat_model: Any) -> None:
    from kestrl_rollout.conversation.transformers_tokenizer import TransformersTokenizer

    view = TransformersTokenizer(chat_model)
    assert view.encode("a<|im_end|>") == [*view.encode("a"), view.eos_token_id]
    assert view.decode(view.encode("é<|im_end|>"), skip_special_tokens=True) == "é"
    assert (view.convert_tokens_to_ids("<|im_end|>"), view.convert_tokens_to_ids("x")) == (258, None)
    assert (view.pad_token_id, len(view)) == (256, 265)
    said = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    ids = view.apply_chat_template(said, add_generation_prompt=True)
    assert view.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    both = view.apply_chat_template(said, add_generation_prompt=True, return_dict=True)
    assert both == {"input_ids": ids, "attention_mask": [1] * len(ids)}


def test_history_that_the_template_rewrites_cannot_be_extended(
    load: Callable[..., Any], forgetful_template: str
) -> None:
    from kestrl_rollout.conversation.transformers_tokenizer import TransformersTokenizer

    template = forgetful_template.replace(
        "{%- else %}{{- message.content }}", "{%- else %}{{- 'x' + message.content }}"
    )
    view = TransformersTokenizer(
        load(template=template.replace("message.role == 'tool'", "message.role == 'none'"), tools=False)
    )
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert view.extend_chat(said, [*said, {"role": "user", "content": "c"}], [1])
    rewriting = TransformersTokenizer(
        load(
            template="{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>", tools=False
        )
    )
    with pytest.raises(UserInputError) as refused:
        rewriting.extend_chat(said, [*said, {"role": "user", "content": "c"}], [1])
    assert refused.value.code == "template_rewrites_history"


async def test_stand_ins_appear_only_when_a_file_asks_for_verl(make_file: MakeFile) -> None:
    load_loop(make_file("plain", "async def agent(conversation): pass\n") + ":agent")
    assert "verl" not in sys.modules
    with pytest.raises(UserInputError, match=r"verl\.trainer"):
        load_loop(make_file("deep", "from verl.trainer import main_ppo\n") + ":Loop")


async def test_a_second_system_prompt_is_not_written_mid_row(make_stage: Any, make_file: MakeFile) -> None:
    source = TOOL_LOOP.replace("{at_end}", "").replace(
        """merged, mask, _ = await self.ct_merge_context_msg(before, messages, ids, mask, tools=self.schemas)
            ids = merged.token_ids
""",
        """new = await self.apply_chat_template(messages[-1:], tools=self.schemas, remove_system_prompt=True)
            ids, mask = ids + new, mask + [0] * len(new)
""",
    )
    stage = await make_stage(agent=make_file("my_loop", source) + ":MyLoop")
    stage.says("I search.", "A small falcon.")
    episode = await stage.episode(scenario=scenario())
    assert episode.failure is None
    text = stage.chat_model.vocabulary.decode(episode.rows[0].token_ids)
    assert text.count("Tools, one JSON object a line") == 1
    assert "I search.<|im_end|>\n<|im_start|>user\n<tool_response>\nfound a\n</tool_response>" in text


async def test_built_in_rewards_see_the_answer_alone(make_stage: Any, make_file: MakeFile) -> None:
    from kestrl.rewards import Attempt
    from kestrl.rewards.builtin import exact_answer

    name = make_file("single_turn_agent_loop", verls_own("0.9.1", "single_turn_agent_loop"))
    stage = await make_stage(agent=f"{name}:SingleTurnAgentLoop")
    stage.says("42")
    attempt = Attempt(scenario=scenario(), episode=await stage.episode(scenario=scenario()), max_turns=1)
    assert exact_answer(attempt).value == 1.0


@pytest.mark.usefixtures("without_media")
async def test_a_parser_that_a_file_registers_goes_first(make_stage: Any, make_file: MakeFile) -> None:
    source = (
        verls_own("0.9.1", "tool_agent_loop")
        + """

@ToolParser.register("hermes")
class Mine(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        return text, [FunctionCall(name="search", arguments='{"word": "z"}')] if "go" in text else []
"""
    )
    stage = await make_stage(agent=make_file("tool_agent_loop", source) + ":ToolAgentLoop")
    stage.says("go", "A small falcon.")
    try:
        assert [call.text for call in (await stage.episode(scenario=scenario())).tool_calls] == ["found z"]
    finally:
        names.ToolParser._registry.clear()


@pytest.mark.usefixtures("without_media")
def test_a_module_that_a_file_of_ones_own_needs_is_still_missed(make_file: MakeFile) -> None:
    with pytest.raises(UserInputError, match="torch"):
        load_loop(make_file("needs", "import torch\n\nasync def agent(conversation): pass\n") + ":agent")
    assert "torch" not in sys.modules


def test_what_is_taken_from_a_missing_module_fails_when_used() -> None:
    finder = imports._Media()
    spec = finder.find_spec("torch", None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    finder.exec_module(module)
    assert "Tensor" in str(tuple[module.Tensor, dict])
    with pytest.raises(UserCodeError, match="torch is not installed"):
        module.Tensor()


def test_every_stand_in_holds_what_it_promises() -> None:
    for exported in imports.MODULES.values():
        for name in exported:
            assert hasattr(names, name) or hasattr(tool_names, name), name


def test_a_loop_is_a_subclass_of_the_stand_in() -> None:
    assert not imports.is_loop(object)
    assert not imports.is_loop(names.AgentLoopBase)
    assert imports.is_loop(type("Mine", (names.AgentLoopBase,), {}))
