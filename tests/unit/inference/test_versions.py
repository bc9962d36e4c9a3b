"""Versions of vLLM: what starts them, and what they answer to one and the same request with a seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pydantic
import pytest

from kestrl._app.engines.interpreter import write_engine_folder
from kestrl._shared.engine_failure import VARIABLE, read
from kestrl._shared.spec.inference import is_version
from kestrl.engines.vllm import Vllm
from kestrl_inference.inside.launcher import read_options, restore_policy, server_arguments
from kestrl_inference.inside.versions import doubt, facts_of, matches

TOKENS = [470, 198]
LOGPROBS = [-1.11125119, -0.02296262]
"""Tokens and log-probs are the same in all of them, to the digit."""


def answer(version: tuple[int, int], **changes: Any) -> bytes:
    """The answer of a version to a generation, with the fields that this version has."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(TOKENS, LOGPROBS, strict=True)
    ]
    if version >= (0, 32):
        content = [{**entry, "token_id": token} for entry, token in zip(content, TOKENS, strict=True)]
    document: dict[str, Any] = {
        "request_id": "r",
        "choices": [
            {"index": 0, "logprobs": {"content": content}, "finish_reason": "length", "token_ids": TOKENS, **changes}
        ],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }
    if version > (0, 23):
        document |= {"model": "job.1", "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}}
    if version >= (0, 27):
        document["ec_transfer_params"] = None
    if version >= (0, 30):
        document["choices"][0]["sampling_mask"] = None
    return json.dumps(document).encode()


@pytest.mark.parametrize("version", [(0, 25), (0, 27), (0, 30), (0, 32)], ids=str)
def test_answers_of_several_versions_are_read_alike(version: tuple[int, int]) -> None:
    generated = Vllm().read_generated(answer(version))
    assert (generated.policy, list(generated.token_ids), generated.finish_reason) == ("job.1", TOKENS, "length")
    assert list(generated.logprobs) == LOGPROBS


def test_an_answer_that_names_no_policy_is_not_read() -> None:
    with pytest.raises(ValueError, match="model"):
        Vllm().read_generated(answer((0, 23)))


@pytest.mark.parametrize("token", ["the", "token_id:", "token_id:4.0", "token_id:-1", "id:470"])
def test_a_log_prob_without_the_id_of_its_token_is_not_read(token: str) -> None:
    content = [{"token": token, "logprob": -1.0}]
    with pytest.raises(ValueError, match="names its token neither by token_id nor as token_id:N"):
        Vllm().read_generated(answer((0, 25), logprobs={"content": content}, token_ids=[470]))


def test_log_probs_of_other_tokens_are_not_taken() -> None:
    with pytest.raises(ValueError, match="with those of other tokens"):
        Vllm().read_generated(answer((0, 25), token_ids=[470, 199]))


@pytest.mark.parametrize(
    ("version", "scale_out", "spare_slots", "names_policy"),
    [
        ("0.22.1", False, 1, False),
        ("0.23.0", False, 1, False),
        ("0.23.0.post1", False, 1, False),
        ("0.24.0", False, 1, False),
        ("0.25.1+cu130", False, 1, True),
        ("0.27.1", False, 0, True),
        ("0.30.0rc2", True, 0, True),
        ("0.32.0", True, 0, True),
        ("0.100.0", True, 0, True),
        ("1.0", True, 0, True),
        ("0.1.dev1+g1234567", True, 0, True),
        ("dev", True, 0, True),
        ("", True, 0, True),
    ],
)
def test_facts_of_a_version(version: str, scale_out: bool, spare_slots: int, names_policy: bool) -> None:
    assert facts_of(version) == (scale_out, spare_slots, names_policy)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("0.22.1", "older than what is known: it is started as the oldest"),
        ("0.23.0", ""),
        ("0.32.9+cpu", ""),
        ("0.33.0", "newer than what is known: it is started as the newest"),
        ("1.0.0", "newer than what is known"),
        ("0.1.dev7+gabcdef", "no release number: it is started as the newest"),
        ("nightly", "no release number"),
    ],
)
def test_a_version_that_was_not_tried_is_started_with_a_warning(version: str, why: str) -> None:
    assert (why in doubt("vllm", version)) if why else (doubt("vllm", version) == "")


@pytest.mark.parametrize(
    ("version", "wanted", "same"),
    [
        ("0.32.0", "0.32", True),
        ("0.32.1+cu130", "0.32", True),
        ("0.32.1+cu130", "0.32.1", True),
        ("0.32.1+cu130", "0.32.1+cu130", True),
        ("0.23.0.post1", "0.23.0", True),
        ("0.32.0", "0.3", False),
        ("0.30.0", "0.3", False),
        ("0.32.0", "0.32.1", False),
        ("0.32.1+cu130", "0.32.1+cu128", False),
        ("1.32.0", "0.32", False),
    ],
)
def test_a_wanted_version_stands_for_its_patch_releases(version: str, wanted: str, same: bool) -> None:
    assert matches(version, wanted) is same
    assert is_version(version, wanted) is same


def test_the_launcher_adds_the_flags_of_the_version() -> None:
    options = read_options(["--cpu", "--slots", "4", "--version", "0.23", "--", "--model", "m", "--slots", "7"])
    assert (options.cpu, options.slots, options.version) == (True, 4, "0.23")
    assert options.arguments == ("--model", "m", "--slots", "7")
    base = list(options.arguments)
    assert server_arguments(options, "0.23.0") == [*base, "--max-loras", "5", "--max-cpu-loras", "6"]
    assert server_arguments(options, "0.27.1") == [*base, "--max-loras", "4", "--max-cpu-loras", "5"]
    assert server_arguments(options, "0.32.0")[-1] == "--enable-scale-out"
    assert server_arguments(read_options(["--", "--model", "m"]), "0.32.0") == ["--model", "m"]


class Dropping(pydantic.BaseModel):
    """The answer of vLLM 0.23, whose server passes more than it declares."""

    choices: list[int]


class Naming(pydantic.BaseModel):
    model: str | None = None
    choices: list[int]


@pytest.mark.parametrize("answer", [Dropping, Naming])
def test_an_answer_keeps_the_policy_that_its_server_names(answer: type[Any]) -> None:
    module = ModuleType("protocol")
    assert not restore_policy(module)
    module.GenerateResponse = answer  # type: ignore[attr-defined]
    assert restore_policy(module)
    assert json.loads(answer(model="job.1", choices=[1]).model_dump_json()) == {"model": "job.1", "choices": [1]}


def test_who_names_the_policy() -> None:
    assert facts_of("0.25.1").names_policy
    assert not facts_of("0.23.0").names_policy


@pytest.mark.parametrize("version", [None, "9.9"])
def test_an_engine_that_a_job_cannot_use_does_not_start(tmp_path: Path, version: str | None) -> None:
    """In an interpreter without vLLM, and in one with another version than the job names."""
    record = tmp_path / "failure.json"
    if version is not None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
        (tmp_path / "vllm-0.32.0.dist-info").mkdir()
        (tmp_path / "vllm-0.32.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    write_engine_folder(tmp_path / "engine")
    options = [] if version is None else ["--version", version]
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "kestrl_inference.inside.launcher", *options, "--", "--model", "none"],
        env={"PYTHONPATH": f"{tmp_path / 'engine'}:{tmp_path}", VARIABLE: str(record)},
        capture_output=True,
        text=True,
        check=False,
    )
    field = "spec.inference.python" if version is None else "spec.inference.version: 9.9 is asked for"
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {field}")
    found = read(record)
    assert found is not None
    assert found.lasting
    assert found.message.startswith(field)
