"""What users and components of another version rely on: public API, CRD, protocol, fields of the manifest."""

from __future__ import annotations

import ast
import copy
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.contract import record
from tests.contract.crd_schema import fields_of, narrowed
from tests.contract.public_api import differences, public_api, read, written

import kestrl
from kestrl._shared.spec.job import JobSpec

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("check", [record.api_differences, record.crd_differences], ids=["api", "crd"])
def test_the_recorded_contracts_hold(check: Callable[[], list[str]]) -> None:
    found = check()
    assert not found, "\n".join([*found, record.INTENDED])


def test_a_snapshot_of_the_api_reads_as_it_was_written() -> None:
    assert read(written(public_api())) == public_api()


def test_differences_of_the_api_are_readable() -> None:
    before = {
        "k.f": ": function -> int",
        "k.f(x)": ": 0 int",
        "k.f(y)": ": str",
        "k.gone": ": class",
        "k.same": ": str",
    }
    after = {
        "k.f": ": function -> int",
        "k.f(x)": ": 0 str",
        "k.f(y)": ": str = ''",
        "k.f(free)": ": int = 0",
        "k.f(needed)": ": int",
        "k.same": ": str",
        "k.new": ": function -> None",
        "k.new(z)": ": 0 int",
    }
    assert differences(before, after) == [
        "removed: k.gone: class",
        "changed: k.f(x): 0 int is now k.f(x): 0 str",
        "new parameter without a default: k.f(needed): int",
    ]


def test_additions_are_recorded_and_breaking_changes_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"k.f": ": function -> int", "k.g": ": function -> int"}
    monkeypatch.setattr(record, "API", tmp_path / "api.txt")
    monkeypatch.setattr(record, "CRD", tmp_path / "crd.json")
    monkeypatch.setattr(record, "PROTO", tmp_path / "protocol.binpb")
    monkeypatch.setattr(record, "public_api", lambda: found)
    monkeypatch.setattr(record, "run_buf", lambda *_: subprocess.CompletedProcess[str](_, 0, "", ""))
    record.record()
    found["k.h"] = ": class"
    assert record.main(["--additions"]) == 0
    assert read(record.API.read_text()) == found
    del found["k.g"]
    assert record.main(["--additions"]) == record.main(["--check"]) == 1
    assert "public API: removed: k.g: function -> int" in capsys.readouterr().err
    assert "k.g" in read(record.API.read_text())
    assert record.main([]) == 0
    assert read(record.API.read_text()) == found


def field(**constraints: Any) -> dict[str, Any]:
    return {"properties": {"spec": {"type": "object", "properties": {"x": constraints}}}}


INTEGER, WORDS = {"type": "integer"}, {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (INTEGER, {"type": "string"}, ["spec.x: type was 'integer', is 'string'"]),
        (INTEGER | {"minimum": 1}, INTEGER | {"minimum": 2}, ["spec.x: minimum was 1, is 2"]),
        (INTEGER | {"minimum": 2}, INTEGER | {"minimum": 1}, []),
        (INTEGER, INTEGER | {"maximum": 9}, ["spec.x: maximum was None, is 9"]),
        (INTEGER | {"maximum": 9}, INTEGER, []),
        (INTEGER | {"default": 1}, INTEGER | {"default": 2}, ["spec.x: default was 1, is 2"]),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}, ["spec.x: enum lost a"]),
        ({"enum": ["a"]}, {"enum": ["a", "b"]}, []),
        ({"enum": ["a"]}, {}, []),
        ({}, {"enum": ["a"]}, ["spec.x: only a are allowed now"]),
        ({"pattern": "^a$"}, {"pattern": "^b$"}, ["spec.x: pattern was '^a$', is '^b$'"]),
        ({"pattern": "^a$"}, {}, []),
        ({"type": "integer"}, {}, []),
        ({}, {"required": ["y"]}, ["spec.x: y is required now"]),
        ({"required": ["y"]}, {}, []),
        ({}, {"x-kubernetes-validations": [{"rule": "self > 1"}]}, ["spec.x: has the new rule self > 1"]),
        (WORDS, {"type": "array", "items": {"type": "integer"}}, ["spec.x[]: type was 'string', is 'integer'"]),
        ({"additionalProperties": INTEGER}, {"additionalProperties": {}}, []),
        (
            {"additionalProperties": INTEGER},
            {"additionalProperties": WORDS},
            ["spec.x{}: type was 'integer', is 'array'"],
        ),
        ({"default": {"y": 1}}, {"default": {"y": 1, "z": 2}}, []),
    ],
)
def test_a_narrower_field_is_reported_and_a_wider_one_is_not(
    before: dict[str, Any], after: dict[str, Any], expected: list[str]
) -> None:
    assert narrowed(dict(fields_of(field(**before))), dict(fields_of(field(**after)))) == expected


def test_a_removed_field_is_reported_and_an_added_one_is_not() -> None:
    fields = dict(record.crd_fields())
    fewer = copy.copy(fields)
    del fewer["spec.agent.maxTurns"]
    assert narrowed(fields, fewer) == ["spec.agent.maxTurns: removed"]
    assert narrowed(fewer, fields) == []


def names_of(model: type[BaseModel], done: set[type[BaseModel]]) -> Iterator[str]:
    """The fields of a model and of those within."""
    done.add(model)
    for name, info in model.model_fields.items():
        yield name
        for inner in models_in(info.annotation):
            if inner not in done:
                yield from names_of(inner, done)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models_in(inner)


def attributes_read() -> set[str]:
    """Names of all attributes that code outside the specification reads."""
    files = [path for folder in ("src", "services", "operator") for path in (ROOT / folder).rglob("*.py")]
    skipped = (ROOT / "src/kestrl/_shared/spec", ROOT / "src/kestrl/api")
    return {
        node.attr
        for path in files
        if not any(path.is_relative_to(folder) for folder in skipped)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_field_of_the_manifest_is_read_somewhere() -> None:
    fields, found = set(names_of(JobSpec, set())), attributes_read()
    assert len(fields) > 90
    assert fields - found == set()


def test_the_package_exports_what_it_lists_and_loads_it_on_use() -> None:
    assert {type(getattr(kestrl, name)).__name__ for name in kestrl.__all__} <= {"type", "EnumType", "_ProtocolMeta"}
    assert set(kestrl.__all__) <= set(dir(kestrl))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        kestrl.Nothing  # noqa: B018
    probe = (
        "import sys, kestrl; assert 'kestrl.tools' not in sys.modules; from kestrl import ToolError; print(ToolError)"
    )
    done = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "<class 'kestrl.tools.ToolError'>"
