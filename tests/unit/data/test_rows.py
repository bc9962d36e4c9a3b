"""Data sets: both forms, both file types, and errors that name file, line and field."""

from __future__ import annotations

import io
import json
import resource
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings

from kestrl.data import load_scenarios, locate_data, parquet_reader
from kestrl.data.forms import BadRow, scenario
from kestrl.data.locate import locate_model
from kestrl.data.values import columns_as_json, exceeds_values
from kestrl.episode.codec import scenario_from_proto, scenario_to_proto
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


def test_null_members_of_parquet_are_absent(tmp_path: Path) -> None:
    other = {**VERL, "extra_info": {"index": 8, "tools_kwargs": {"search": {"create_kwargs": {"inbox": "a"}}}}}
    table = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([VERL, other]), table)
    first, second = load_scenarios(table)
    assert set(first.tools_kwargs) == {"calc"}
    assert set(second.tools_kwargs) == {"search"}


def test_every_bad_row_is_reported_with_line_and_field(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"id": "a", "question": "ok"},
        {"id": "b", "question": "x", "prompt": "y"},
        {"question": "no id"},
        {"id": "c", "question": "x", "metdata": {}},
        ["not", "an", "object"],
        {**VERL, "prompt": [{"role": "developer", "content": "x"}]},
        {"id": "a", "question": "again"},
    )
    found = problems(path)
    assert [line.removeprefix(str(path))[1:2] for line in found] == ["2", "4", "5", "6", "7"]
    assert "prompt: give either `prompt` or `question`" in found[0]
    assert "metdata: unknown field; did you mean metadata?" in found[1]
    assert "row: must be an object, is list" in found[2]
    assert "prompt.0.role" in found[3]
    assert "id: 'a' is already the id of line 1" in found[4]


def test_rows_of_other_libraries_need_no_id(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"question": "How many?", "answer": "Six.\n#### 6"},  # GSM8K, verifiers
        {"prompt": [{"role": "user", "content": "Why?"}], "solution": "So."},  # TRL
        {**VERL, "extra_info": None},
        {**VERL, "extra_info": {"index": 7}},
        {**VERL, "extra_info": {"index": 7}},
        {**VERL, "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "x"}]},
    )
    scenarios = load_scenarios(path)
    source = VERL["data_source"]
    assert [item.id for item in scenarios[:2]] == ["row-0", "row-1"]
    assert [item.id for item in scenarios[2:5]] == [f"{source}/2", f"{source}/7", f"{source}/7#4"]
    assert (scenarios[0].ground_truth, scenarios[0].metadata["answer"]) == ("Six.\n#### 6", "Six.\n#### 6")
    assert [message["role"] for message in scenarios[5].messages] == ["user"]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": ""}, "content is empty"),
        ({"role": "user", "content": "x", "name": "Ann"}, "would not reach the model"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, "would not reach the model"),
    ],
)
def test_what_would_not_reach_the_model_is_refused(message: dict[str, Any], problem: str, tmp_path: Path) -> None:
    prompt = [message, {"role": "user", "content": "?"}]
    assert problem in problems(write(tmp_path / "a.jsonl", {"id": 1, "prompt": prompt}))[0]


def test_maps_of_parquet_are_objects_and_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = pa.array(["x"])
    facts = pa.array([[("a", 1), ("b", 2)]], type=pa.map_(pa.string(), pa.int64()))
    parquet.write_table(pa.table({"question": names, "facts": facts}), tmp_path / "a.parquet")
    (row,) = load_scenarios(tmp_path / "a.parquet")
    assert row.metadata["facts"] == {"a": 1, "b": 2}
    parquet.write_table(pa.Table.from_arrays([names, names], names=["question"] * 2), tmp_path / "b.parquet")
    with pytest.raises(UserInputError, match="two columns have the name 'question'; rename one of them"):
        load_scenarios(tmp_path / "b.parquet")


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


def test_further_columns_and_the_agents_name_are_kept(tmp_path: Path) -> None:
    plain = {"id": 1, "question": "x", "agent_name": "mine", "difficulty": 3, "metadata": {"split": "a"}}
    first, second = load_scenarios(write(tmp_path / "a.jsonl", plain, {**VERL, "source": "web"}))
    assert (first.agent, dict(first.metadata)) == ("mine", {"difficulty": 3, "split": "a"})
    assert second.agent == "tool_agent"
    assert dict(second.metadata) == {
        "data_source": "openai/gsm8k", "ability": "math", "source": "web", "index": 7, "split": "train"
    }  # fmt: skip
    assert scenario_from_proto(scenario_to_proto(second)) == second


def test_a_column_and_a_member_that_differ_are_refused(tmp_path: Path) -> None:
    same = {**VERL, "split": "train"}
    assert load_scenarios(write(tmp_path / "a.jsonl", same))[0].metadata["split"] == "train"
    found = problems(write(tmp_path / "b.jsonl", {**VERL, "split": "test"}))
    assert found == [f"{tmp_path}/b.jsonl:1: split: differs from extra_info.split; rename one of them"]


@pytest.mark.parametrize("column", ["images", "videos"])
def test_multimodal_rows_are_refused_by_name(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "a.jsonl", {**VERL, column: []}, {**VERL, column: [{"path": "a.png"}]})
    assert problems(path) == [f"{path}:2: {column}: only text can be trained on; this row has {column}"]


def test_literal_prompts_may_hold_assistant_and_tool_turns(tmp_path: Path) -> None:
    roles = ["system", "user", "assistant", "tool", "assistant", "user"]
    prompt = [{"role": role, "content": role} for role in roles]
    (row,) = load_scenarios(write(tmp_path / "a.jsonl", {"id": 1, "prompt": prompt}))
    assert [message["role"] for message in row.messages] == roles


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (["user", "assistant"], "prompt.1.role: a prompt cannot end with an assistant turn"),
        (["user", "tool"], "prompt.1.role: a tool turn must follow an assistant turn"),
        ([("user", {"tool_calls": [{"function": {}}]})], "prompt.0.tool_calls: calls of a literal assistant turn"),
        (5, "prompt: must be text or a list of messages"),
        ([], "prompt: List should have at least 1 item"),
    ],
)
def test_literal_prompts_that_cannot_be_used(tmp_path: Path, prompt: Any, problem: str) -> None:
    if isinstance(prompt, list):
        turns = [(turn, {}) if isinstance(turn, str) else turn for turn in prompt]
        prompt = [{"role": role, "content": "x", **more} for role, more in turns]
    path = write(tmp_path / "a.jsonl", {"id": 1, "prompt": prompt})
    (found,) = problems(path)
    assert found.startswith(f"{path}:1: {problem}")


def test_values_of_parquet_that_have_an_exact_form(tmp_path: Path) -> None:
    table = tmp_path / "a.parquet"
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    columns = {"when": when, "day": date(2026, 1, 2), "at": time(3, 4), "price": Decimal("1.10")}
    row = {"id": 1, "question": "x", "ground_truth": {"at": [when]}, **columns}
    parquet.write_table(pa.Table.from_pylist([row]), table)
    (read,) = load_scenarios(table)
    assert read.ground_truth == {"at": ["2026-01-02T03:04:05+00:00"]}
    assert dict(read.metadata) == {
        "when": "2026-01-02T03:04:05+00:00", "day": "2026-01-02", "at": "03:04:00", "price": "1.10"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "problem"),
    [(b"\x00", "is of type bytes"), (timedelta(seconds=1), "is of type timedelta"), (float("nan"), "is nan")],
)
def test_values_of_parquet_that_have_none_are_refused(tmp_path: Path, value: Any, problem: str) -> None:
    table = tmp_path / "a.parquet"
    rows = [
        {"id": name, "question": "x", "metadata": {"thing": things}} for name, things in (("a", []), ("b", [value]))
    ]
    parquet.write_table(pa.Table.from_pylist(rows), table)
    (found,) = problems(table)
    assert found.startswith(f"{table}:2: metadata.thing.0: {problem}"), found


def test_a_parquet_value_without_a_python_form_names_its_row(tmp_path: Path) -> None:
    table = tmp_path / "a.parquet"
    days = pa.array([0, 2**31 - 1], pa.date32())
    parquet.write_table(pa.table({"id": ["a", "b"], "question": ["x", "y"], "day": days}), table)
    (found,) = problems(table)
    assert found.startswith(f"{table}:2: day: cannot be read: ")


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"ground_truth": "\ud800"}, "ground_truth"),
        ({"metadata": {"a": ["\udc00"]}}, "metadata.a.0"),
        ({"metadata": {"\ud800": 1}}, "metadata.'\\ud800'"),
        ({"tools": {"calc": {"create_kwargs": {"x": "\ud800"}}}}, "tools.calc.create_kwargs.x"),
        ({"question": "\ud800"}, "question"),
    ],
)
def test_a_lone_surrogate_is_refused_with_its_field(tmp_path: Path, columns: Any, field: str) -> None:
    path = write(tmp_path / "a.jsonl", {"id": "ok", "question": "x"}, {"id": 1, "question": "x", **columns})
    (found,) = problems(path)
    assert found.startswith(f"{path}:2: {field}: holds the lone surrogate U+D")


def test_a_row_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    deep = "[" * 200 + "]" * 200
    path = write(tmp_path / "a.jsonl", f'{{"id": 1, "question": "x", "ground_truth": {deep}}}')
    assert "is nested more than 100 levels deep" in problems(path)[0]


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(ANY_JSON, st.dictionaries(st.text(st.characters(exclude_categories=())), ANY_JSON, max_size=3))
def test_a_row_that_is_accepted_goes_over_the_wire_unchanged(value: Any, metadata: dict[str, Any]) -> None:
    columns, refused = columns_as_json({"id": 1, "question": "x", "ground_truth": value, "metadata": metadata})
    if refused:
        return
    try:
        row = scenario(columns, 0)
    except BadRow:
        return
    sent = type(scenario_to_proto(row)).FromString(scenario_to_proto(row).SerializeToString())
    assert scenario_from_proto(sent) == row


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


def _one_page(path: Path) -> None:
    options: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
    parquet.write_table(pa.table({"id": ["a"], "question": ["x" * 2**27]}), path, compression="zstd", **options)


def _one_dictionary(path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 1024), pa.array(["x" * 2**24]))
    parquet.write_table(pa.table({"question": text}), path, compression="zstd", write_statistics=False)


def _runs_of_nulls(path: Path) -> None:
    lists = pa.ListArray.from_arrays(pa.array([0, 2 * 10**7]), pa.nulls(2 * 10**7, pa.int8()))
    parquet.write_table(pa.table({"question": ["x"], "metadata": lists}), path, compression="zstd")


@pytest.mark.parametrize("write_table", [_one_page, _one_dictionary, _runs_of_nulls])
def test_a_parquet_file_that_expands_is_refused_within_bounds_of_memory(tmp_path: Path, write_table: Any) -> None:
    """What some kilobytes hold would take up to 16 GiB; this process holds none of it."""
    table = tmp_path / "a.parquet"
    write_table(table)
    assert table.stat().st_size < 2**17
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (found,) = problems(table)
    assert "memory" in found, found
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2.5 * 2**20


def test_the_rows_of_a_parquet_file_are_bounded_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "a.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 2000), pa.array(["x" * 2**15]))
    parquet.write_table(pa.table({"question": text}), table)
    monkeypatch.setattr(parquet_reader, "MAX_ROWS", 2**24)
    with pytest.raises(
        parquet_reader.FileRefused, match=r"^:50\d: the rows up to here take more than 16 MiB of memory"
    ):
        parquet_reader.write(table, io.BytesIO())


def test_a_parquet_file_whose_reader_dies_is_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"id": ["a"], "question": ["x"]}), table)
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))  # no interpreter starts
    (found,) = problems(table)
    assert found.startswith(f"{table}: not readable as Parquet: its reader ended with status 1")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"id": 1, "question": "' + "x" * 2**24 + '"}', "the line is longer than 16777216 characters"),
        ('{"id": 1, "question": "x", "metadata": {"a": [' + "[]," * 1_100_000 + "1]}}", "the line has more than"),
        ('{"id": 1, "question": "\\"", "a": [' + "{}," * 1_100_000 + '"', "the line has more than"),
    ],
)
def test_a_line_that_is_too_large_is_refused_before_it_is_parsed(tmp_path: Path, content: str, problem: str) -> None:
    path = write(tmp_path / "a.jsonl", {"id": 0, "question": "x"}, content)
    (found,) = problems(path)
    assert found.startswith(f"{path}:2: {problem}"), found[:300]


def test_a_long_line_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(2**31)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert problems(path)[0].startswith(f"{path}:1: the line is longer")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19


def test_commas_of_texts_are_no_values() -> None:
    text = json.dumps({"text": '[{,"\\' * 400_000, "more": [1, 2]}).encode()
    assert not exceeds_values(text)
    assert exceeds_values(text[:-1] + b',"x":[' + b"0," * 1_000_000)
    assert not exceeds_values(b'"' + b'\\"' * 2_000_000 + b"," * 1_100_000)
