"""Tools that crash, hang and take too much memory, for processes of their own."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import time
from typing import Any, ClassVar

from kestrl.tools import ToolError, ToolResult


class Machine:
    """An environment that can do harm."""

    index: ClassVar[list[str]] = []

    def __init__(self, owner: str = "") -> None:
        self.owner, self.count = owner, 0

    @classmethod
    def start_service(cls, owner: str = "") -> None:
        del owner
        cls.index.append("started")

    def add(self, by: int) -> int:
        """Adds to a counter."""
        self.count += by
        return self.count

    def day_of(self, day: datetime.date) -> str:
        """Names the day of the week."""
        return day.strftime("%A")

    def finish(self) -> ToolResult:
        """Ends the task."""
        return ToolResult(text="done", final=True, data={"owner": self.owner, "index": self.index})

    def refuse(self) -> None:
        """Refuses."""
        raise ToolError("not today")

    def fail(self) -> None:
        """Raises."""
        raise KeyError("no such key")

    def leave(self) -> None:
        """Ends the process."""
        os._exit(3)

    def crash(self) -> None:
        """Ends the process by a signal."""
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(self) -> None:
        """Never returns."""
        while True:
            time.sleep(60)

    def eat(self) -> int:
        """Takes 512 MiB."""
        return len(bytearray(512 * 1024 * 1024))

    def pids(self) -> list[int]:
        """Starts a program, and names it and the process."""
        child = subprocess.Popen(["sleep", "600"])
        return [os.getpid(), child.pid]

    def detach(self) -> int:
        """Starts a daemon, in a session and a group of its own: its process id."""
        command = ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"]
        return int(subprocess.run(command, check=True, capture_output=True, start_new_session=True).stdout)

    def environment(self) -> dict[str, str]:
        """The variables of the process."""
        return dict(os.environ)

    def state(self) -> dict[str, Any]:
        """The counter."""
        return {"count": self.count}
