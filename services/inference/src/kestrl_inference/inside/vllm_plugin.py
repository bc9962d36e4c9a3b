"""vLLM plugin, loaded in each of its processes (`vllm.general_plugins`): records failed starts, and uses `lora_cpu` on
a CPU.
"""

from __future__ import annotations

import importlib
from typing import Any

from kestrl_inference.inside import failure
from kestrl_inference.inside.vllm_cpu import MEMORY, use_pageable_memory


def register() -> None:
    """Entry point: records failed starts; on a CPU, installs the faster LoRA."""
    failure.install()
    current: Any = importlib.import_module("vllm.platforms").current_platform
    if current.is_cpu():
        use_pageable_memory(importlib.import_module(MEMORY))
        from kestrl_inference.inside.vllm_lora import wrapper

        platform: Any = current.__class__
        platform.get_punica_wrapper = staticmethod(wrapper)
