"""Data sets: both forms, both file types, and errors that name file, line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kestrl.data import load_scenarios, locate_data
from kestrl.data.locate import locate_model
from kestrl.errors import UserInputError

VERL = {
    "data_source": "openai/gsm8k",
    "agent_name": "tool_agent",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {
        "index": 7,
        "split": "train",
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}}},
    },
}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def problems(path: Path, **kwargs: Any) -> list[str]:
    with pytest.raises(UserInputError) as caught:
        load_scenarios(path, **kwargs)
    return str(caught.value).splitlines()


def test_the_plain_form(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"id": "a", "question": "Who?", "ground_truth": {"answer": "Ann"}, "metadata": {"level": 1}},
        "",
        {"id": 2, "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "tools": ["calc"]},
        {"id": "c", "prompt": "P", "tools": {"calc": {"create_kwargs": {"x": 1}}}},
    )
    first, second, third = load_scenarios(path)
    assert first.messages == [{"role": "user", "content": "Who?"}]
    assert (first.tools, first.ground_truth, first.metadata) == (None, {"answer": "Ann"}, {"level": 1})
    assert (second.id, second.tools, [message["role"] for message in second.messages]) == (
        "2",
        ["calc"],
        ["system", "user"],
    )
    assert third.tools_kwargs["calc"]["create_kwargs"] == {"x": 1}
    assert [scenario.ordinal for scenario in (first, second, third)] == [0, 1, 2]


def test_verls_form_from_jsonl_and_parquet_is_the_same(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", VERL)
    table = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([VERL]), table)
    assert load_scenarios(lines) == load_scenarios(table)
    (scenario,) = load_scenarios(lines)
    assert scenario.id == "openai/gsm8k/7"
    assert scenario.ground_truth == "4"
    assert scenario.tools_kwargs["calc"] == {"create_kwargs": {"ground_truth": "4"}, "execute_kwargs": {}}
    assert scenario.metadata["split"] == "train"


def test_parquet_members_that_are_null_were_never_there(tmp_path: Path) -> None:
    other = {**VERL, "extra_info": {"index": 8, "tools_kwargs": {"search": {"create_kwargs": {"inbox": "a"}}}}}
    table = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([VERL, other]), table)
    first, second = load_scenarios(table)
    assert set(first.tools_kwargs) == {"calc"}
    assert set(second.tools_kwargs) == {"search"}


def test_every_bad_row_is_told_with_line_and_field(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"id": "a", "question": "ok"},
        {"id": "b", "question": "x", "prompt": "y"},
        {"question": "no id"},
        {"id": "c", "question": "x", "oops": 1},
        ["not", "an", "object"],
        {**VERL, "prompt": [{"role": "assistant", "content": "x"}]},
        {"id": "a", "question": "again"},
    )
    found = problems(path)
    assert [line.removeprefix(str(path))[1:2] for line in found] == ["2", "3", "4", "5", "6", "7"]
    assert "prompt: give either `prompt` or `question`" in found[0]
    assert "id: Field required" in found[1]
    assert "oops: Extra inputs are not permitted" in found[2]
    assert "row: must be an object, is list" in found[3]
    assert "prompt.0.role" in found[4]
    assert "id: 'a' is already the id of line 1" in found[5]


def test_a_file_of_the_wrong_shape_does_not_flood(tmp_path: Path) -> None:
    found = problems(write(tmp_path / "a.jsonl", *({"text": str(number)} for number in range(500))))
    assert len(found) <= 42
    assert found[-1].startswith("... and perhaps more")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"id": 1, "question": "x"}\n{oops\n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b"\n", "holds no rows"),
        ("a.csv", b"id,question\n", "a data set is a .jsonl or .parquet file"),
        ("a.parquet", b"not parquet at all", "not readable as Parquet"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert message in problems(path)[0]


def test_a_missing_file_and_too_few_rows(tmp_path: Path) -> None:
    assert "cannot be read" in problems(tmp_path / "none.jsonl")[0]
    path = write(tmp_path / "a.jsonl", {"id": 1, "question": "x"})
    assert "holds 1 rows, the manifest asks for size 2" in problems(path, size=2)[0]


def test_size_takes_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"id": number, "question": "x"} for number in range(5)))
    assert [scenario.id for scenario in load_scenarios(path, size=2)] == ["0", "1"]


def test_addresses_of_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"id": 1, "question": "x"})

    def where(uri: str) -> Path:
        return locate_data(
            uri, size=1, base=tmp_path, seed=1, cache_dir=tmp_path / "cache", field="spec.data.train.uri"
        )

    assert where("a.jsonl") == where(str(path)) == where(path.as_uri()) == path.resolve()
    for uri, message in [
        ("b.jsonl", "does not exist"),
        ("http://x/a.jsonl", "scheme http://"),
        ("demo://nobody/train", "no installed package offers demo://nobody"),
    ]:
        with pytest.raises(UserInputError, match=f"spec.data.train.uri: .*{message}"):
            where(uri)


def test_addresses_of_models(tmp_path: Path) -> None:
    assert locate_model("hf://org/name", base=tmp_path) == "org/name"
    (tmp_path / "model").mkdir()
    with pytest.raises(UserInputError, match=r"config\.json is missing"):
        locate_model("model", base=tmp_path)
    (tmp_path / "model" / "config.json").write_text("{}")
    assert locate_model("model", base=tmp_path) == str((tmp_path / "model").resolve())
    for uri in ("nowhere", "ftp://x", "demo://nobody"):
        with pytest.raises(UserInputError, match=r"spec\.model\.base"):
            locate_model(uri, base=tmp_path)
