"""How vLLM's registry inspects the class of a model: `python inspection.py FOLDER ANSWER`, in vLLM's interpreter
with the engine's folder of KestRL.

ANSWER gets whether it starts a process for that, and what it reads once `inspect_in_process` was called and no process
may be started.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

from vllm.model_executor.models import registry

from kestrl_inference.inside.vllm_cpu import inspect_in_process

run = subprocess.run


class SecondProcessError(Exception):
    """The registry starts a process that inspects a class."""


def checked(command: Any, **options: Any) -> Any:
    if command == registry._SUBPROCESS_COMMAND:
        raise SecondProcessError
    return run(command, **options)  # importing the model runs other programs


subprocess.run = checked
model = registry.ModelRegistry.models["Qwen3ForCausalLM"]
try:
    model.inspect_model_cls()
except SecondProcessError:
    starts_process = True
else:
    starts_process = False
replaced = inspect_in_process(registry)
architecture = model.inspect_model_cls().architecture
answer = {"starts_process": starts_process, "replaced": replaced, "architecture": architecture}
Path(sys.argv[2]).write_text(json.dumps(answer))
