"""The supervisor of one sandbox that another program has isolated: bubblewrap or gVisor.

That program has made namespaces and mounts; limits, the filter and Landlock are added here as in a zygote's sandbox.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from kestrl_sandbox.inside import frames, landlock, payload, supervisor, watched
from kestrl_sandbox.inside import syscalls as linux
from kestrl_sandbox.inside.confinement import address_space, stand_apart


def main() -> None:
    """Entry point: with the number of the socket to the service and the limits as JSON in argv."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    limits: dict[str, Any] = json.loads(sys.argv[2])
    limits["base_bytes"] = address_space()
    limits["base_anonymous"] = watched.anonymous_memory("self")
    limits["landlock"] = landlock.abi()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    if limits["own_user"]:
        stand_apart()
    payload.open_streams()
    payload.forget_own_modules()
    connection.sendall(frames.encode({"ready": True, "landlock": limits["landlock"]}))
    connection.recv(1)  # by now the service has put this process into its cgroup
    os._exit(supervisor.serve(connection, limits))
