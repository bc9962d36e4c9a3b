"""Models of random weights in the shapes of Qwen3, for figures that do not depend on weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3Config

QWEN3: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 64, "inner": 128, "layers": 2, "heads": 4, "keys": 2, "width": 16, "vocabulary": 512},
    "0.6B": {"hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, "keys": 8},
    "1.7B": {"hidden": 2048, "inner": 6144, "layers": 28, "heads": 16, "keys": 8},
    "4B": {"hidden": 2560, "inner": 9728, "layers": 36, "heads": 32, "keys": 8},
    "8B": {"hidden": 4096, "inner": 12288, "layers": 36, "heads": 32, "keys": 8, "tied": False},
    "14B": {"hidden": 5120, "inner": 17408, "layers": 40, "heads": 40, "keys": 8, "tied": False},
    "32B": {"hidden": 5120, "inner": 25600, "layers": 64, "heads": 64, "keys": 8, "tied": False},
}
"""Sizes by the name of the published model. Heads are 128 wide and the vocabulary has 151,936 tokens by default."""


def shape(name: str) -> Qwen3Config:
    """The config of a size of `QWEN3`."""
    from transformers import Qwen3Config

    size = QWEN3[name]
    return Qwen3Config(
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["keys"],
        head_dim=size.get("width", 128),
        vocab_size=size.get("vocabulary", 151_936),
        tie_word_embeddings=size.get("tied", True),
        max_position_embeddings=40_960,
        dtype="float32" if name == "tiny" else "bfloat16",
    )


def make(name: str, folder: Path, device: str) -> Path:
    """Writes a model, with weights in bfloat16 but for the tiny one, and returns its folder.

    Args:
        name: Of `QWEN3`.
        folder: Parent of the folder.
        device: Where the weights are drawn: seconds on a GPU.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    path = folder / name
    if (path / "config.json").exists():
        return path
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if name == "tiny" else torch.bfloat16)
    try:
        with torch.device(device):
            Qwen3ForCausalLM(shape(name)).save_pretrained(path)
    finally:
        torch.set_default_dtype(before)
    return path


def parameters(path: Path) -> int:
    """Weights of a model, without its embedding where the head has its own."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
