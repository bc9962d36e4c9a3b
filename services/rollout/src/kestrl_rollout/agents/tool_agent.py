"""The tool-using agent: calls tools until it answers without one."""

from __future__ import annotations

from kestrl.agents import Conversation


async def tool_agent(conversation: Conversation) -> None:
    """Turn by turn: the calls of a turn run at once, their results are the next prompt; a turn without calls is an
    action of the job's environment, or the answer.
    """
    while reply := await conversation.generate():
        if reply.calls:
            await conversation.call_tools(reply.calls)
        elif not await conversation.act(reply.content):
            return
