"""Secrets of one machine: `NAME.env` beside the manifest, read strictly, given to those that it is for."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.s3 import S3Server

from kestrl._app.local.processes import Launcher
from kestrl._app.local.secrets import Secrets, open_storage, read_env
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.spec import AgentRLJob, parse_job
from kestrl.errors import UserInputError


def job(**spec: Any) -> AgentRLJob:
    return parse_job(
        {
            "apiVersion": "kestrl.dev/v1alpha1",
            "kind": "AgentRLJob",
            "metadata": {"name": "job"},
            "spec": {
                "model": {"base": "m"},
                "data": {"train": {"uri": "train.jsonl"}},
                "rewards": [{"rule": "exact_answer"}],
                **spec,
            },
        }
    )


def written(folder: Path, text: str, name: str = "keys") -> Path:
    path = folder / f"{name}.env"
    path.write_text(text, encoding="utf-8")
    return path


def patch(role: str, **container: Any) -> dict[str, Any]:
    name = container.pop("name", role)
    return {"role": role, "template": {"spec": {"containers": [{"name": name, **container}]}}}


def test_the_syntax_of_a_secrets_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "\ufeff# a comment\n"
        "A=plain value # with a comment\n"
        "export B='single # $A \\n'\n"
        'C = "double \\"quoted\\" \\\\ \\n$A" # a comment\n'
        "\n"
        "D=\n"
        "E=a#b=c\n"
        "F=ümlaut\n",
    )
    assert read_env(path, "field") == {
        "A": "plain value",
        "B": "single # $A \\n",
        "C": 'double "quoted" \\ \n$A',
        "D": "",
        "E": "a#b=c",
        "F": "ümlaut",
    }


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\u2028\u2029\x85")))
def test_every_value_can_be_written_in_double_quotes(value: str) -> None:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"{uuid.uuid4().hex}.env"
    try:
        path.write_text(f'A="{escaped}"\n', encoding="utf-8")
        assert read_env(path, "field") == {"A": value}
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"A=1\nhunter2", r"keys\.env:2: is not NAME=VALUE"),
        (b"1A=hunter2", r"keys\.env:1: is not NAME=VALUE"),
        (b"A='hunter2", r"keys\.env:1: the quotes of A do not enclose"),
        (b'A="hunter2" hunter2', r"keys\.env:1: the quotes of A do not enclose"),
        (b"A=hunter2\nA=hunter2", r"keys\.env:2: A is set twice"),
        (b"A=hunter2\0", "contains a NUL"),
        (b"A=hunter2\xff", r"keys\.env is not UTF-8"),
        (b"A=" + b"hunter2" * 200_000, "is longer than 1048576 bytes"),
    ],
)
def test_a_malformed_file_is_one_error_without_its_values(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "keys.env"
    path.write_bytes(content)
    with pytest.raises(UserInputError, match=problem) as caught:
        read_env(path, "spec.storage.secretRef")
    assert "hunter2" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_one_error_that_names_it(tmp_path: Path) -> None:
    secrets = Secrets(job(storage={"secretRef": {"name": "keys"}}), tmp_path)
    with pytest.raises(UserInputError, match=r"spec\.storage\.secretRef: .*keys\.env does not exist"):
        secrets.by_role()


def test_each_component_gets_its_own_and_no_others(tmp_path: Path) -> None:
    written(tmp_path, "AWS_ACCESS_KEY_ID=storage")
    written(tmp_path, "key=search\nother=unused", name="search")
    written(tmp_path, "JUDGE_KEY=judge", name="judge")
    reference = {"name": "SEARCH_KEY", "valueFrom": {"secretKeyRef": {"name": "search", "key": "key"}}}
    wanted = job(
        storage={"secretRef": {"name": "keys"}},
        patches=[
            patch("tools", env=[reference, {"name": "PLAIN", "value": "x"}]),
            patch(
                "judge", envFrom=[{"secretRef": {"name": "judge"}, "prefix": "MY_"}, {"configMapRef": {"name": "c"}}]
            ),
            patch("judge", name="sidecar", envFrom=[{"secretRef": {"name": "nowhere"}}]),
        ],
    )
    granted = Secrets(wanted, tmp_path).by_role()
    assert granted == {
        Role.LEARNER: {"AWS_ACCESS_KEY_ID": "storage"},
        Role.INFERENCE: {"AWS_ACCESS_KEY_ID": "storage"},
        Role.TOOLS: {"SEARCH_KEY": "search"},
        Role.JUDGE: {"MY_JUDGE_KEY": "judge"},
    }

    launcher = Launcher(
        folder=tmp_path, secrets={secret.value: "s" for secret in Secret}, granted=granted, environment={"SHELL": "x"}
    )
    for role in Role:
        environment = launcher._environment(Component(name=f"{role}-0", role=role, module="m"))
        named = {"AWS_ACCESS_KEY_ID", "SEARCH_KEY", "MY_JUDGE_KEY", "other", "PLAIN"} & environment.keys()
        assert named == granted.get(role, {}).keys()


@pytest.mark.parametrize(
    ("container", "problem"),
    [
        ({"envFrom": [{"secretRef": {}}]}, "no usable `name`: None"),
        ({"envFrom": [{"secretRef": {"name": "../keys"}}]}, "no usable `name`"),
        ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "keys"}}}]}, "no usable `key`"),
        ({"env": [{"valueFrom": {"secretKeyRef": {"name": "keys", "key": "A"}}}]}, "no usable `name`"),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "B"}}}]},
            r"keys\.env holds no B",
        ),
    ],
)
def test_a_reference_that_cannot_be_followed_is_refused(
    tmp_path: Path, container: dict[str, Any], problem: str
) -> None:
    written(tmp_path, "A=hunter2")
    with pytest.raises(UserInputError, match=problem) as caught:
        Secrets(job(patches=[patch("tools", **container)]), tmp_path).by_role()
    assert "spec.patches[0]" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_storage_credentials_are_not_left_in_the_environment(tmp_path: Path) -> None:
    written(tmp_path, "AWS_ACCESS_KEY_ID=storage")
    before = dict(os.environ)
    open_storage(job(storage={"secretRef": {"name": "keys"}}), tmp_path, str(tmp_path / "store"))
    assert dict(os.environ) == before


@pytest.mark.servers
def test_commands_read_a_storage_whose_credentials_are_in_a_file(s3: S3Server, tmp_path: Path) -> None:
    """Through `kestrl doctor`, which writes where a run would, without any credential in the shell."""
    written(tmp_path, "".join(f"{name}='{value}'\n" for name, value in s3.environment().items()))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    spec = job(storage={"uri": f"s3://runs/{uuid.uuid4().hex}", "secretRef": {"name": "keys"}})
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(spec.model_dump(by_alias=True, mode="json", exclude_unset=True)))
    bare = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {"COLUMNS": "300"}

    def doctor() -> str:
        command = [sys.executable, "-m", "kestrl._app.cli.main", "doctor", str(manifest)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=bare, cwd=tmp_path, check=False)
        return done.stdout + done.stderr

    assert "written and read back" in doctor()
    written(tmp_path, "AWS_ACCESS_KEY_ID 'x'")
    assert "keys.env:1: is not NAME=VALUE" in doctor()


def test_a_judge_gets_its_keys_and_no_other_role_does(tmp_path: Path) -> None:
    written(tmp_path, "OPENAI_API_KEY=first\nOTHER=x\n", "one")
    written(tmp_path, "TOKEN=second\n", "two")
    ruler = {
        "baseUrl": "https://judge/v1",
        "model": "m",
        "secretRef": {"name": "one"},
        "second": {"baseUrl": "https://b/v1", "model": "n", "secretRef": {"name": "two"}, "secretKey": "TOKEN"},
    }
    given = Secrets(job(rewards=[{"ruler": ruler}]), tmp_path).by_role()
    assert given[Role.JUDGE] == {"KESTRL_JUDGE_KEY_0": "first", "KESTRL_JUDGE_KEY_1": "second"}
    assert all(not given.get(role) for role in Role if role is not Role.JUDGE)
    written(tmp_path, "X=1\n", "one")
    with pytest.raises(UserInputError, match=r"rewards\[0\].ruler.secretRef: .*one.env holds no OPENAI_API_KEY"):
        Secrets(job(rewards=[{"ruler": ruler}]), tmp_path).by_role()
