"""What `kestrl serve` takes of a run's job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kestrl._app.serving.endpoint import _component
from kestrl._app.serving.jobs import job_of_run


def job(model: str = "demo://tiny", **agent: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"base": model},
            "data": {"train": {"uri": "train.jsonl"}},
            "rewards": [{"rule": "format"}],
            "agent": agent,
        },
    }


def parser(document: dict[str, Any], base: Path, *overrides: str) -> str | None:
    """Parser of tool calls that the engine is started with."""
    arguments = _component(job_of_run(document, overrides, base), None, "127.0.0.1", 1, base).args
    return arguments[arguments.index("--tool-call-parser") + 1] if "--tool-call-parser" in arguments else None


def test_the_parser_is_that_of_the_chat_templates_own_format(tmp_path: Path) -> None:
    assert parser(job(), tmp_path) == "hermes"


@pytest.mark.parametrize(
    ("engine", "name", "expected"),
    [
        ("vllm", "qwen_xml", "qwen3_coder"),
        ("vllm", "llama3_json", "llama3_json"),
        ("sglang", "llama3_json", "llama3"),
        ("sglang", "harmony", "gpt-oss"),
        ("vllm", "mine:Format", None),
    ],
)
def test_the_parser_is_that_of_the_format_that_the_job_names(
    engine: str, name: str, expected: str | None, tmp_path: Path
) -> None:
    assert parser(job(toolCallFormat=name), tmp_path, f"inference.engine={engine}") == expected


def test_a_template_that_writes_no_calls_leaves_them_as_text(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert parser(job(template={"uri": str(template)}), tmp_path) is None
