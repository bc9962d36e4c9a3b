"""A peer: verl's own ToolAgentLoop with the same requests to the same engine.

`python benchmarks/verl_loop.py ENGINE_PORT CONCURRENCY EPISODES TOKENIZER`, in an environment with verl[verl-core]
0.9.1, torch, transformers and uvloop; it imports nothing of KestRL. The tool is a function of the same process and
nothing is scored; KestRL's worker calls tool and judge over gRPC in the same run. Ray's actors, padding and verl's
batches are left out.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from typing import Any

import aiohttp
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

TURNS = 4
MESSAGES = [{"role": "system", "content": "You look words up."}, {"role": "user", "content": "What is a kestrel?"}]
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
FUNCTION = {"name": "look_up", "description": "Looks a word up.", "parameters": PARAMETERS}
MULTI_TURN = {
    "format": "hermes",
    "max_user_turns": TURNS + 1,
    "max_assistant_turns": TURNS + 1,
    "max_parallel_calls": 1,
    "max_tool_response_length": 2_000,
    "tool_response_truncate_side": "middle",
}
ROLLOUT = {"multi_turn": MULTI_TURN, "prompt_length": 2_048, "response_length": 2_048, "full_determinism": False}


class Engine:
    """The server manager of the loop: aiohttp with token ids."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self._turns: dict[str, int] = {}

    async def generate(
        self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        turn = self._turns[request_id] = self._turns.get(request_id, -1) + 1
        body = {
            "request_id": f"{request_id}/{turn}/0",
            "model": "bench",
            "token_ids": list(prompt_ids),
            "sampling_params": {**sampling_params, "logprobs": 0},
        }
        async with self._session.post(self._url, json=body) as response:
            choice = json.loads(await response.read())["choices"][0]
        if turn == TURNS - 1:
            del self._turns[request_id]
        logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
        return TokenOutput(token_ids=choice["token_ids"], log_probs=logprobs, stop_reason="completed")


async def look_up(word: str) -> str:
    return json.dumps({"meaning": f"{word}: a small falcon"})


async def run(port: int, concurrency: int, episodes: int, path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": ROLLOUT}}))
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": FUNCTION})
    tools = ToolListWrap([FunctionTool(name="look_up", fn=look_up, tool_schema=schema, is_async=True)])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        engine = Engine(f"http://127.0.0.1:{port}/inference/v1/generate", session)

        async def episode() -> None:
            loop = ToolAgentLoop(
                trainer_config=config,
                server_manager=engine,
                tokenizer=tokenizer,
                processor=None,
                dataset_cls=RLHFDataset,
                data_config=DictConfigWrap(OmegaConf.create({})),
                hf_model_type="qwen3",
                tools=tools,
            )
            sampling = {"temperature": 1.0, "max_tokens": 512, "seed": 1}
            output = await loop.run(sampling, raw_prompt=MESSAGES, tools_kwargs={})
            assert output.num_turns == 2 * TURNS, output.num_turns

        async def load(count: int) -> None:
            left = [count]

            async def many() -> None:
                while left[0] > 0:
                    left[0] -= 1
                    await episode()

            await asyncio.gather(*(many() for _ in range(concurrency)))

        await load(concurrency)
        began, cpu = time.perf_counter(), time.process_time()
        await load(episodes)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    measured = {
        "episodes_per_second": episodes / seconds,
        "cpu_ms_per_turn": 1000 * cpu / (episodes * TURNS),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(run(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
