"""YAML is measured before anything is built from it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from kestrl._shared.safe_yaml import YamlRefused, read, read_all
from kestrl._shared.spec.load import read_job
from kestrl.errors import UserInputError
from kestrl_tools.http.document import DocumentInvalid, parsed

QUICK_SECONDS = 5.0
"""Far below what each of these takes where it is built."""


def laughs(levels: int, form: str = "[{}]") -> str:
    named = (f"x{level}: &x{level} " + form.format(", ".join([f"*x{level - 1}"] * 10)) for level in range(1, levels))
    return "\n".join(["x0: &x0 {a: 1}", *named]) + "\n"


BOMBS = {
    "aliases": (laughs(30), "repeat more than"),
    "merge keys": (laughs(9, "{{<<: [{}]}}"), "repeat more than"),
    "an alias within itself": ("config: &c {a: *c}\n", "within what it names"),
    "a list within itself": ("a: &c [[*c]]\n", "within what it names"),
    "many levels": ("a: " + "[" * 100_000, "more than 200 levels"),
    "a number in base 60": ("a: " + "1:" * 100_000 + "1\n", "number of more than"),
    "a number in base 60 by its tag": ('a: !!int "' + "1:" * 100_000 + '1"\n', "number of more than"),
    "digits": ("a: " + "9" * 1_000_000 + "\n", "number of more than"),
    "aliases in several documents": ("---\n".join([laughs(5)] * 20), "repeat more than"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_explodes_is_refused_at_once_wherever_yaml_is_read(name: str, tmp_path: Path) -> None:
    text, reason = BOMBS[name]
    began = time.process_time()
    with pytest.raises(YamlRefused, match=reason):
        read_all(text)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(text)
    with pytest.raises(UserInputError, match=reason):
        read_job(manifest)
    with pytest.raises(DocumentInvalid, match=reason):
        parsed(b"openapi: 3.1.0\n" + text.encode())
    assert time.process_time() - began < QUICK_SECONDS


def test_ordinary_aliases_and_merge_keys_are_read() -> None:
    text = "base: &b {a: 1, list: [x, y]}\njobs: [{<<: *b, c: 2}, *b]\n"
    assert read(text)["jobs"] == [{"a": 1, "list": ["x", "y"], "c": 2}, {"a": 1, "list": ["x", "y"]}]
    assert read("") is None
    assert read_all("a: 1\n---\nb: 2\n") == [{"a": 1}, {"b": 2}]
    with pytest.raises(yaml.YAMLError, match="undefined alias"):
        read("a: *nothing\n")
