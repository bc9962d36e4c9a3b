"""Loops written for verl run unchanged, and train only on what was sampled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kestrl.agents import verl
from kestrl.episode import StopReason
from kestrl.errors import Boundary, UserInputError
from kestrl_rollout.agents.loading import load_loop

VERLS_OWN = Path(__file__).parents[2] / "data" / "verl" / "single_turn_agent_loop.py.txt"
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
        {at_end}
        return AgentLoopOutput(
            prompt_ids=ids[: -len(mask)], response_ids=ids[-len(mask) :], response_mask=mask,
            num_turns=turn + 2, metrics=metrics, reward_score=0.5,
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


async def test_verls_own_single_turn_loop_runs_unchanged(make_stage: Any, make_file: MakeFile) -> None:
    name = make_file("single_turn_agent_loop", VERLS_OWN.read_text(encoding="utf-8"))
    stage = await make_stage(agent=f"{name}:SingleTurnAgentLoop")
    stage.says("A small falcon.")
    episode = await stage.episode()
    assert episode.failure is None
    (row,) = episode.rows
    assert [turn.text for turn in episode.turns] == ["A small falcon.<|im_end|>"]
    assert list(row.mask[episode.turns[0].start :]) == [1] * len(stage.ids("A small falcon.<|im_end|>"))
    assert episode.metrics["verl.num_turns"] == 2
    assert episode.reward == 0.0


async def test_a_loop_with_tools(make_stage: Any, tool_loop: Callable[..., str]) -> None:
    stage = await make_stage(agent=tool_loop())
    stage.says("I search.", "A small falcon.")
    episode = await stage.episode(scenario=scenario())
    assert episode.failure is None
    (row,) = episode.rows
    sampled = stage.ids("I search.<|im_end|>") + stage.ids("A small falcon.<|im_end|>")
    assert [token for token, on in zip(row.token_ids, row.mask, strict=True) if on] == sampled
    assert [call.text for call in episode.tool_calls] == ["found a"]
    assert "\n<tool_response>\nfound a\n</tool_response>" in stage.face.vocabulary.decode(row.token_ids)
    assert episode.metrics["verl.reward_score"] == 0.5
    assert await stage.closed() == ["g-1/0"]


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


def test_the_tokenizer_speaks_transformers_names(face: Any) -> None:
    from kestrl_rollout.huggingface import TokenizerView

    view = TokenizerView(face)
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
    from kestrl_rollout.huggingface import TokenizerView

    template = forgetful_template.replace(
        "{%- else %}{{- message.content }}", "{%- else %}{{- 'x' + message.content }}"
    )
    view = TokenizerView(
        load(template=template.replace("message.role == 'tool'", "message.role == 'none'"), tools=False)
    )
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert view.extend_chat(said, [*said, {"role": "user", "content": "c"}], [1])
    rewriting = TokenizerView(
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


def test_only_a_missing_verl_is_stood_in_for() -> None:
    assert verl.is_missing(ModuleNotFoundError("x", name="verl.utils"))
    assert not verl.is_missing(ModuleNotFoundError("x", name="verlibre"))
    assert not verl.is_missing(ImportError("x", name="verl"))
    assert not verl.is_loop(object)
    real = type("AgentLoopBase", (), {"__module__": "verl.experimental.agent_loop.agent_loop"})
    assert verl.is_loop(type("Mine", (real,), {}))
