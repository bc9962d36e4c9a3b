"""`python -m kestrl_tools.check`: checks that the job's tools can be loaded, and reports their definitions."""

from __future__ import annotations

import sys
from typing import Any

from kestrl.checking import run_check
from kestrl.plan.settings import ToolsSettings
from kestrl_tools.catalogue import load_tools
from kestrl_tools.tool_threads import ToolThreads


def check(settings: ToolsSettings) -> dict[str, Any]:
    """Returns the definitions of the tools.

    Raises:
        UserInputError: Tools cannot be loaded.
    """
    sys.path[:0] = settings.python_path
    tools = load_tools(settings.tools, ToolThreads())
    return {
        "tools": [
            {
                "name": tool.schema.name,
                "description": tool.schema.description,
                "parameters": dict(tool.schema.parameters),
                "environment": tool.origin.name if tool.origin.environment else "",
            }
            for tool in tools.values()
        ]
    }


if __name__ == "__main__":
    run_check(ToolsSettings, check)
