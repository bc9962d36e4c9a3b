"""The tool service's `main`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable

from kestrl._shared.plan.settings.tools import ToolsSettings
from kestrl._shared.rpc import serve
from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl._shared.user_tasks import contain_user_tasks
from kestrl.api.tools.v1 import tools_pb2_grpc as stubs
from kestrl_tools.catalogue import unavailable
from kestrl_tools.lifecycle import loaded, start_all
from kestrl_tools.servicer import ToolServicer
from kestrl_tools.sessions import Sessions
from kestrl_tools.tool_threads import ToolThreads


async def run_tools(settings: ToolsSettings, *, until: Awaitable[object] | None = None) -> None:
    """Loads the job's tools, then serves until SIGTERM (or until `until` is done).

    Raises:
        UserInputError: A tool cannot be loaded or started, or the port is taken.
    """
    contain_user_tasks()
    threads = ToolThreads()
    async with loaded(settings.tools, threads, folder=next(iter(settings.python_path), None)) as tools:
        sessions = Sessions(
            tools,
            threads,
            call_seconds=settings.call_seconds,
            max_sessions=settings.max_sessions,
            files=settings.files,
        )
        observe(Metric.SESSIONS, lambda: len(sessions))
        observe(Metric.TOOL_SERVERS_UNAVAILABLE, lambda: unavailable(tools))
        observe(Metric.HANGING, lambda: Counter(threads.hanging()))
        await start_all(tools)
        servicer = ToolServicer(tools, sessions)
        await serve(
            settings.component,
            settings.listen,
            lambda server: stubs.add_ToolServiceServicer_to_server(servicer, server),
            drain=sessions.drain,
            until=until,
            bundles=True,
        )
