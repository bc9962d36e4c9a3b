"""An MCP server on stdio without an SDK, whose list of tools and faults come from a JSON file.

The file has `tools` (as in tools/list) and, if a fault is wanted, `fault`. Calls: `echo` repeats its text, `die` ends
the process, `leak` too, with the variable API_KEY as its last words, `sleep` never answers, `pid` answers with the
process id, `env` with the variables, `key` with the digest of API_KEY, `later` with what is written to a FIFO, `raise`
with a JSON-RPC error, `refuse` with isError, `cancelled` with the number of cancelled requests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

STATE = Path(sys.argv[1])
cancelled: list[Any] = []


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"result": {"content": [{"type": "text", "text": value}], **more}}


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    match name:
        case "die":
            sys.stderr.write("fatal: out of disk\n")
            sys.stderr.flush()
            os._exit(7)
        case "leak":
            sys.stderr.write(f"{os.environ['API_KEY'].split()[1]} is refused\n")
            sys.stderr.flush()
            os._exit(7)
        case "sleep":
            return None
        case "pid":
            return text(str(os.getpid()))
        case "env":
            return text(json.dumps(dict(os.environ)))
        case "key":
            return text(hashlib.sha256(os.environ["API_KEY"].encode()).hexdigest())
        case "later":
            return text(Path(arguments["text"]).read_text())
        case "cancelled":
            return text(json.dumps(len(cancelled)))
        case "raise":
            return {"error": {"code": -32603, "message": "the index is corrupt"}}
        case "refuse":
            return text("there is no such item", isError=True)
        case "structured":
            return text("see the data", structuredContent={"rows": [1, 2]})
        case "huge":
            return text("x" * 40_000_000)
        case _:
            return text(str(arguments.get("text", "")))


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        state = json.loads(STATE.read_text())
        if state.get("fault") == "noise":
            sys.stdout.write("loading model...\n")
        match message["method"]:
            case "initialize":
                answer: dict[str, Any] | None = {
                    "result": {
                        "protocolVersion": "2025-06-18",
                        "capabilities": {"tools": {"listChanged": True}},
                        "serverInfo": {"name": "sample", "version": "1"},
                    }
                }
            case "tools/list":
                answer = {"result": {"tools": state["tools"]}}
            case "tools/call":
                answer = called(message["params"]["name"], message["params"].get("arguments") or {})
            case "notifications/cancelled":
                cancelled.append(message["params"]["requestId"])
                answer = None
            case _:
                answer = None
        if answer is not None and "id" in message:
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}) + "\n")
        if state.get("announce") and message["method"] == "tools/call":
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}) + "\n")
        sys.stdout.flush()


main()
