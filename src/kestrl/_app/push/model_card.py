"""What a model or adapter on the Hub says of itself: its card, and its base model. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

import yaml

from kestrl._app.push.numbers import numbers_of
from kestrl.storage.summary import RunSummary
from kestrl.terminal import safe_line

HUB = "hf://"
PATHS = {"adapter_config.json": "base_model_name_or_path", "config.json": "_name_or_path"}
"""Files of an export and their field that has the folder of the base model on this machine."""
CURVES = ("reward", "answer_correct")
"""Means of the held-out data that the card's curve shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What is uploaded, and where it came from."""

    name: str
    """Name of the policy or model."""
    base: str
    """Model below it, as the manifest names it."""
    data: Sequence[str]
    """Data sets, as the manifest names them."""
    adapter: bool
    """Whether it is an adapter, and not a whole model."""
    version: str
    """Version of KestRL that exported it."""
    summary: RunSummary | None
    """How the run ended; None if it has not."""


def public_name(uri: str) -> str:
    """An address without what a machine or an account would give away: of a path, the last part."""
    address = urlparse(uri)
    if address.scheme in {"hf", "demo"}:
        return uri
    return address.path.rstrip("/").rpartition("/")[2] or address.netloc


def public_config(name: str, text: str, base: str) -> str:
    """A file of `PATHS`, in which the base model is what others know it by, and not a folder of this machine."""
    config = json.loads(text)
    if PATHS[name] in config:
        config[PATHS[name]] = base.removeprefix(HUB) if base.startswith(HUB) else public_name(base)
    return json.dumps(config, indent=2)


def model_card(exported: Exported, repository: str) -> str:
    """The text of README.md."""
    head: dict[str, Any] = {
        "library_name": "peft" if exported.adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["kestrl", "reinforcement-learning", "agent", "tool-use"],
    }
    if exported.base.startswith(HUB):
        head["base_model"] = exported.base.removeprefix(HUB)
    lines = [
        f"# {repository.rpartition('/')[2]}",
        "",
        f"`{safe_line(exported.name)}`, {'an adapter' if exported.adapter else 'a model'} trained with KestRL "
        f"{exported.version}.",
        "",
        f"* Base model: `{safe_line(public_name(exported.base))}`",
        *(f"* Data: `{safe_line(public_name(uri))}`" for uri in exported.data),
        "",
        *_curve(exported.summary),
        "## Loading",
        "",
        "```python",
        *_loading(exported, repository),
        "```",
    ]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n".join(lines) + "\n"


def _curve(summary: RunSummary | None) -> Iterator[str]:
    """Means of the held-out data at each evaluation."""
    evaluations = () if summary is None else summary.evaluations
    points = [(evaluation.get("step", 0), dict(numbers_of(evaluation))) for evaluation in evaluations]
    names = [name for name in CURVES if any(name in means for _, means in points)]
    if summary is None or not names:
        return
    yield from (f"## Held-out data, over {summary.steps} steps", "")
    yield f"| step | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for step, means in points:
        cells = [f"{means[name]:.4g}" if name in means else "" for name in names]
        yield f"| {step:.0f} | {' | '.join(cells)} |"
    yield ""


def _loading(exported: Exported, repository: str) -> Iterator[str]:
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if not exported.adapter:
        yield from ("", f'model = AutoModelForCausalLM.from_pretrained("{repository}")')
        yield f'tokenizer = AutoTokenizer.from_pretrained("{repository}")'
        return
    on_hub = exported.base.startswith(HUB)
    base = exported.base.removeprefix(HUB) if on_hub else "FOLDER_OF_THE_BASE_MODEL"
    yield from ("from peft import PeftModel", "", f'base = AutoModelForCausalLM.from_pretrained("{base}")')
    yield f'model = PeftModel.from_pretrained(base, "{repository}")'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{base}")'
