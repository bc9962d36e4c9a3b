"""The addresses behind a name: of a headless Service, one for each of its pods."""

from __future__ import annotations

import asyncio
import logging
import socket

log = logging.getLogger(__name__)


async def resolved(name: str) -> set[str] | None:
    """The present addresses of `host:port`; None if the lookup fails."""
    host, _, port = name.rpartition(":")
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("%s cannot be looked up: %s", host, error)
        return None
    return {f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}" for family, *_, (ip, *_) in addresses}
