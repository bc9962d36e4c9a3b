"""`python -m kestrl_sandbox.report`: the back-end that code runs in on this node, as JSON, for `kestrl doctor`."""

from __future__ import annotations

import asyncio
import json
import sys

from kestrl.errors import UserInputError
from kestrl_sandbox.backends import open_sandbox
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Isolation


async def report(least: Isolation) -> dict[str, str]:
    """The back-end for a job that asks for this isolation; `problem` if there is none."""
    try:
        opened = await open_sandbox(PoolConfig(max_sandboxes=1), least=least)
    except UserInputError as error:
        return {"problem": str(error)}
    capabilities = opened.capabilities
    await opened.close()
    memory, landlock = capabilities.mechanisms.get("memory", "-"), capabilities.mechanisms.get("landlock", "-")
    return {
        "status": f"{capabilities.backend}, isolates by {capabilities.isolation}; memory: {memory}; "
        f"Landlock: {landlock}"
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(report(Isolation(sys.argv[1])))))
