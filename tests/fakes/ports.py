"""Ports for servers in tests that no other process takes before the server listens."""

from __future__ import annotations

import itertools
import os
import socket

# Below what Linux gives to outgoing connections (32,768) and to Kubernetes' node ports (30,000): a port that the system
# chose by itself would be of that range, and any connection of another test may take it before the server listens.
_FIRST, _COUNT = 12_000, 18_000
# Processes start at distant ports, so that concurrent ones do not collide.
_turns = itertools.count(os.getpid() * 977)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` without a listener, never returned twice by this process.

    Raises:
        OSError: All ports are taken.
    """
    for turn in itertools.islice(_turns, _COUNT):
        port = _FIRST + turn % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"every port of {host} from {_FIRST} to {_FIRST + _COUNT - 1} is taken")
