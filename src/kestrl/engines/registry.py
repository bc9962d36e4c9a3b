"""Engine dialects by name."""

from __future__ import annotations

from collections.abc import Mapping

from kestrl.engines import EngineDialect
from kestrl.engines.sglang import Sglang
from kestrl.engines.vllm import Vllm

DIALECTS: Mapping[str, EngineDialect] = {each.name: each for each in (Vllm(), Sglang())}
"""Dialects by their name in `inference.engine`."""
