"""Ports of this machine, reserved until a server listens there."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager

LOOPBACK = "127.0.0.1"


@contextmanager
def reserved_port(host: str = LOOPBACK, port: int = 0, *, reuse: bool = False) -> Generator[int]:
    """A port of an address of this machine, which no other program gets while the context is open.

    A server listens seconds or minutes after its port was chosen, or again after its process has ended; until then any
    connection of this machine could have got the same port for its own end. A socket that is bound and does not listen
    prevents that. SO_REUSEADDR, which every server sets, lets the server listen beside it.

    Args:
        host: The address.
        port: The wanted port; 0 for a free one, which the kernel chooses.
        reuse: Whether a wanted port may be one that others have reserved, or have just left.

    Raises:
        OSError: The port is taken, or the address is not this machine's.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        if reuse:
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((host, port))
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind, which fails beside others
        yield reservation.getsockname()[1]
