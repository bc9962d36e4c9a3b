"""Models of Qwen's and Llama's layout."""

from __future__ import annotations

import importlib

MODELS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EntryClass = [getattr(importlib.import_module(f"sglang.srt.models.{module}"), name) for module, name in MODELS.items()]
"""The name is SGLang's."""
