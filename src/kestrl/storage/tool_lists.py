"""`tools.json`: SHA-256 of what each tool server listed at the start of a run, by the server's name."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kestrl.errors import StorageError
from kestrl.storage.layout import TOOLS
from kestrl.storage.objects import ObjectStore

ToolLists = Mapping[str, str]


def read_tool_lists(store: ObjectStore) -> ToolLists:
    """The record of a run; empty where no server has listed tools yet, or the job has none.

    Raises:
        StorageError: The storage cannot be read.
    """
    try:
        tool_lists: ToolLists = json.loads(store.get(TOOLS))
    except StorageError as error:
        if error.code == "not_found":
            return {}
        raise
    return tool_lists


def write_tool_lists(store: ObjectStore, lists: ToolLists) -> None:
    """Records what the servers listed.

    Raises:
        StorageError: The storage cannot be written.
    """
    store.put(TOOLS, json.dumps(dict(lists), indent=2).encode())


def changed_servers(recorded: ToolLists, found: ToolLists) -> list[str]:
    """Names of servers that list other tools than recorded, or are in one of the two only."""
    return sorted(name for name in {*recorded, *found} if recorded.get(name) != found.get(name))
