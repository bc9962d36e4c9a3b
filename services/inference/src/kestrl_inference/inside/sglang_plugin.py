"""SGLang plugin, loaded in each of its processes (`sglang.srt.plugins`): records failed starts, and prepares a CPU."""

from __future__ import annotations

import functools
import sys
from typing import Any

from kestrl_inference.inside import failure, sglang_cpu

SCHEDULER = "sglang.srt.managers.scheduler"
loaded = False
"""Whether SGLang has loaded the plugin in this process; it goes on without a plugin that it cannot load."""


def register() -> None:
    """Entry point."""
    global loaded
    failure.install()
    module = sys.modules.get(SCHEDULER)
    if module is not None:
        record_failed_starts(vars(module)["Scheduler"])
    if sglang_cpu.is_used():
        sglang_cpu.prepare()
    loaded = True


def record_failed_starts(scheduler: Any) -> None:
    """Makes a scheduler record why it cannot be made: SGLang logs the reason and ends its parent with a signal."""
    make = scheduler.__init__

    @functools.wraps(make)
    def recorded(self: Any, *arguments: Any, **options: Any) -> None:
        try:
            make(self, *arguments, **options)
        except Exception as error:
            failure.write_down(error)
            raise

    scheduler.__init__ = recorded
