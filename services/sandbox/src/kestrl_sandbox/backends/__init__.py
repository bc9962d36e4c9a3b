"""Chooses a back-end by what this node offers. Nothing falls back to less isolation than was asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kestrl.errors import UserInputError
from kestrl_sandbox.backends.bwrap import Bubblewrap
from kestrl_sandbox.backends.runsc import Runsc
from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import STRENGTH, Capabilities, Isolation, SandboxFailure
from kestrl_sandbox.pool.sandbox_pool import Backend, SandboxPool

Start = Callable[[PoolConfig], Awaitable[Backend[Any]]]
BACKENDS: Mapping[str, tuple[Start, Isolation]] = {
    "zygote": (Zygote.start, Isolation.NAMESPACES),
    "bwrap": (Bubblewrap.start, Isolation.NAMESPACES),
    "runsc": (Runsc.start, Isolation.KERNEL),
}
"""Back-ends in the order of choice: the fastest first."""
AUTO = "auto"


async def open_sandbox(
    config: PoolConfig | None = None, *, least: Isolation = Isolation.NAMESPACES, backend: str = AUTO
) -> SandboxPool:
    """Starts the first back-end that works here.

    Args:
        config: Size and limits.
        least: Least isolation that is accepted.
        backend: Name of a back-end, or `auto`.

    Raises:
        UserInputError: No back-end works here with this isolation; the message has each one's reason.
    """
    if backend not in {AUTO, *BACKENDS}:
        raise UserInputError(f"backend: there is no {backend!r}; there are {', '.join([AUTO, *BACKENDS])}")
    names = list(BACKENDS) if backend == AUTO else [backend]
    reasons: list[str] = []
    for name in names:
        start, isolation = BACKENDS[name]
        if STRENGTH[isolation] < STRENGTH[least]:
            reasons.append(f"{name}: isolates by {isolation}, and at least {least} is asked for")
            continue
        try:
            return await SandboxPool.start(start, config)
        except SandboxFailure as error:
            reasons.append(f"{name}: {error}")
    raise UserInputError(
        "no code sandbox works on this node:\n"
        + "\n".join(f"  {reason}" for reason in reasons)
        + "\ndocs/sandbox.md says what a node or a pod has to offer."
    )


async def available(config: PoolConfig | None = None) -> dict[str, Capabilities | str]:
    """What each back-end isolates here, or why it does not work."""
    answers: dict[str, Capabilities | str] = {}
    for name, (start, _) in BACKENDS.items():
        try:
            backend = await start(config or PoolConfig(max_sandboxes=1))
        except SandboxFailure as error:
            answers[name] = str(error)
            continue
        answers[name] = backend.capabilities
        await backend.close()
    return answers
