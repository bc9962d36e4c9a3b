"""The rollout worker's `main`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager, closing
from datetime import datetime

from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.service import collect_rarely
from kestrl._shared.user_tasks import contain_user_tasks
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.engines.registry import DIALECTS
from kestrl_rollout.conversation.tool_calls import ToolLimits
from kestrl_rollout.conversation.tool_session import SERVICE as TOOL_SERVICE
from kestrl_rollout.conversation.tool_session import Toolbox
from kestrl_rollout.engine.client import EngineClient
from kestrl_rollout.gateway.server import Gateway
from kestrl_rollout.groups.episodes import EpisodeRunner
from kestrl_rollout.groups.group_runner import GroupRunner
from kestrl_rollout.groups.scoring import SERVICE as JUDGE_SERVICE
from kestrl_rollout.groups.scoring import Judge
from kestrl_rollout.hosts.opening import with_outside
from kestrl_rollout.loading import load_chat_model, load_job_loops
from kestrl_rollout.servicer import RolloutServicer


@asynccontextmanager
async def group_runner(settings: RolloutSettings) -> AsyncGenerator[GroupRunner]:
    """Builds the worker's group runner from its settings.

    Raises:
        UserInputError: Model, template or agent cannot be used.
    """
    loops = load_job_loops(settings)
    # In a thread: reading a large tokenizer takes seconds, and signals must be handled meanwhile.
    chat_model = await asyncio.to_thread(load_chat_model, settings, loops, started=datetime.now().astimezone())
    with closing(chat_model):
        async with (
            with_outside(loops, settings) as loops,
            EngineClient(Secret.ENGINE_KEY.here(), DIALECTS[settings.engine]) as client,
            rpc.channel(settings.tools_address) as to_tools,
            rpc.Bundle(to_tools, TOOL_SERVICE, peer="tools", token=Secret.ROLLOUT_TO_TOOLS.here()) as tools,
            rpc.channel(settings.judge_address) as to_judge,
            rpc.Bundle(to_judge, JUDGE_SERVICE, peer="judge", token=Secret.ROLLOUT_TO_JUDGE.here()) as judge,
            Gateway(chat_model, settings.gateway_listen, refused=settings.refused_fields) as gateway,
        ):
            episodes = EpisodeRunner(
                component=settings.component,
                chat_model=chat_model,
                loops=loops,
                client=client,
                toolbox=Toolbox(tools, chat_model.chat, seconds=settings.call_seconds),
                tool_limits=ToolLimits(
                    max_parallel_calls=settings.max_parallel_calls, max_tool_tokens=settings.max_tool_tokens
                ),
                gateway=gateway,
                concurrency=settings.concurrency,
                describes_tools=settings.describes_tools,
            )
            yield GroupRunner(
                episodes=episodes,
                judge=Judge(judge, component=settings.component),
                concurrency=settings.concurrency,
                drain_seconds=settings.drain_seconds,
            )


async def run_rollout(settings: RolloutSettings, *, until: Awaitable[object] | None = None) -> None:
    """Loads the model's chat format and the job's agent loops, then serves until SIGTERM (or until `until` is done).

    Raises:
        UserInputError: Model, template or agent cannot be used, or the port is taken.
    """
    contain_user_tasks()
    async with group_runner(settings) as groups:
        collect_rarely()
        servicer = RolloutServicer(groups, context_length=settings.context_length)
        await rpc.serve(
            settings.component,
            settings.listen,
            lambda server: stubs.add_RolloutServiceServicer_to_server(servicer, server),
            drain=groups.drain,
            until=until,
        )
