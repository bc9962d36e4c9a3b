"""A chat without a program of its own."""

import asyncio
import os
import signal

import httpx
import verifiers.v1 as vf


class WordHarnessConfig(vf.HarnessConfig):
    pass


class WordHarness(vf.Harness[WordHarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=None) as client:  # the deadline of the episode ends it
            for _ in range(data.turns):
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages, "temperature": 0.0},
                    headers={"authorization": f"Bearer {secret}"},
                )
                if answer.status_code != 200:
                    break
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Again."}]
                if data.trick == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if data.trick == "hangs":
                    await asyncio.create_subprocess_exec("sleep", "1000")
                    await asyncio.Event().wait()
                if data.trick == "repeats":
                    trace.calls.append(trace.calls[-1])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
