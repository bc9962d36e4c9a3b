"""An adapter with random weights for a model of Qwen's or Llama's layout, written without torch."""

from __future__ import annotations

import array
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

RANK = 4
SCALE = 0.1
"""Standard deviation of the weights of B: large enough that the adapter changes what is sampled."""


class Matrix(NamedTuple):
    """A matrix of 32-bit numbers."""

    name: str
    rows: int
    columns: int
    values: bytes


def write_random_adapter(config: Mapping[str, Any], folder: Path, *, seed: int, rank: int = RANK) -> None:
    """Writes an adapter of the query and value projections.

    Args:
        config: `config.json` of the model.
        folder: Folder to write to.
        seed: Seed of the weights.
        rank: Rank of the adapter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    header: dict[str, Any] = {}
    content = b""
    for matrix in _matrices(config, rank, random.Random(seed)):  # noqa: S311 - weights, not secrets
        span = [len(content), len(content) + len(matrix.values)]
        header[matrix.name] = {"dtype": "F32", "shape": [matrix.rows, matrix.columns], "data_offsets": span}
        content += matrix.values
    described = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(described).to_bytes(8, "little") + described + content)


def _matrices(config: Mapping[str, Any], rank: int, source: random.Random) -> Iterator[Matrix]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * width, "v_proj": (config.get("num_key_value_heads") or heads) * width}
    for layer in range(config["num_hidden_layers"]):
        for projection, output in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            yield _matrix(source, f"{name}.lora_A.weight", rank, hidden, 1 / math.sqrt(hidden))
            yield _matrix(source, f"{name}.lora_B.weight", output, rank, SCALE)


def _matrix(source: random.Random, name: str, rows: int, columns: int, scale: float) -> Matrix:
    values = array.array("f", (source.gauss(0, scale) for _ in range(rows * columns)))
    if sys.byteorder == "big":
        values.byteswap()
    return Matrix(name, rows, columns, values.tobytes())
