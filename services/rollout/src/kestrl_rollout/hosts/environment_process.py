"""The process of an environment that runs its episodes itself, beside a worker or in a pod of its own.

It is imported with the standard library alone, since the user's image may have nothing else.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kestrl_rollout.hosts.inside import host_program
from kestrl_rollout.hosts.inside.verifiers_host import remove_unused, work_root
from kestrl_rollout.hosts.process import ProcessHost

FIELD = "environment.verifiers"


@asynccontextmanager
async def environment_process(
    environment: Mapping[str, Any], python_path: Sequence[str], *, inherited: Mapping[str, str] | None = None
) -> AsyncGenerator[ProcessHost]:
    """The host of an environment, while the context is open.

    Args:
        environment: `OutsideEnvironment` as a mapping; without `python` it runs in this interpreter.
        python_path: Folders with the user's code, that of the manifest first.
        inherited: Environment variables that it has; None for those without a credential.

    Raises:
        UserInputError: The environment cannot be loaded.
    """
    python = Path(environment["python"] or sys.executable)
    host = ProcessHost(
        "verifiers_host:VerifiersHost",
        python=str(python),
        config={"environment": environment["config"], "sessions": environment["sessions"]},
        variables={"PATH": os.pathsep.join((str(python.parent), os.environ.get("PATH", os.defpath)))},
        python_path=(*python_path, str(Path(host_program.__file__).parent)),
        folder=python_path[0] if python_path else None,
        field=FIELD,
        starts=True,
        start_seconds=environment["start_seconds"],
        inherited=inherited,
    )
    try:
        await host.start()
        yield host
    finally:
        await host.close()
        await asyncio.to_thread(remove_unused, work_root())  # the host was killed, and left its own
