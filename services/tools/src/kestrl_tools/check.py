"""`python -m kestrl_tools.check`: whether the job's tools can be loaded, and what they are."""

from __future__ import annotations

import sys
from typing import Any

from kestrl.checking import run_check
from kestrl.plan.settings import ToolsSettings
from kestrl_tools.catalogue import load_tools
from kestrl_tools.lanes import Lanes


def check(settings: ToolsSettings) -> dict[str, Any]:
    """The tools' definitions.

    Raises:
        UserInputError: Some cannot be loaded.
    """
    sys.path[:0] = settings.python_path
    tools = load_tools(settings.tools, Lanes())
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
