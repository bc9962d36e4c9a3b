"""The interpreter of an agent that runs in a process of its own."""

from __future__ import annotations

from kestrl._app.interpreters.requirements import environment_python, say
from kestrl._shared.spec.agent import Agent

FIELD = "spec.agent.python.requirements"


def agent_python(agent: Agent) -> str | None:
    """Interpreter with the requirements of an agent, which is made if it is not there; None for that of the job.

    Raises:
        UserInputError: It cannot be made.
    """
    if agent.python is None:
        return None
    return str(environment_python(agent.python.requirements, python=None, field=FIELD, say=say))
