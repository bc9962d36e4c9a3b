"""`python3 launcher.py SOCKET`: starts hosts of an environment in a container of the user's image.

The tool service, in another container of the pod, sends the descriptors of a host over a Unix socket, and is answered
with the host's exit status. The descriptors are all that the two containers share, so that what runs here is what runs
beside the service elsewhere. Closing the guard's pipe, or the end of the service, kills a host with its descendants.

It needs the standard library alone; a host also imports what `plan.environments.HOST_REQUIREMENTS` lists.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2]
GUARD = PACKAGES / "kestrl" / "_shared" / "processes" / "process_guard.py"
DESCRIPTORS = 4
"""Standard input, guard's pipe, requests, control."""


def variables(inherited: dict[str, str]) -> dict[str, str]:
    """Variables of a host: those of the image, with our packages before its own."""
    path = [str(PACKAGES), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def serve(connection: socket.socket) -> None:
    """Starts the host of a connection, and says how it has ended."""
    with connection, contextlib.suppress(OSError):
        _, fds, _, _ = socket.recv_fds(connection, 1, DESCRIPTORS)
        if len(fds) == DESCRIPTORS:
            connection.sendall(json.dumps({"status": host(*fds)}).encode())


def host(stdin: int, guarded: int, requests: int, control: int) -> int:
    """Runs a host to its end; its exit status."""
    module = ("-m", "kestrl_tools.process.host", "--requests", str(requests), "--control", str(control))
    try:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-I", "-S", str(GUARD), str(guarded), "0", sys.executable, *module],
            stdin=stdin,
            stdout=2,  # output of an environment is its container's log
            pass_fds=(guarded, requests, control),
            env=variables(dict(os.environ)),
            start_new_session=True,
        )
    finally:
        for fd in (stdin, guarded, requests, control):
            os.close(fd)
    return process.wait()


def main() -> None:
    path = Path(sys.argv[1])
    path.unlink(missing_ok=True)  # of this container's predecessor
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
