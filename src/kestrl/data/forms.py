"""The two forms of a row, the plain one and verl's, and the scenario that each gives."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from kestrl.episode import Json, Scenario

Text = Annotated[str, Field(min_length=1)]
MEDIA = ("images", "videos", "audios", "multi_modal_data")
"""Columns of multimodal rows, which are refused: their text alone would be a different task."""
SIMILAR = 0.8
"""Similarity (difflib's ratio) above which an unknown column is reported as a misspelt field."""


class BadRow(ValueError):
    """A row that cannot be used; `problems` has one line for each invalid field."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    role: Annotated[str, Field(pattern="^(system|user|assistant|tool)$")]
    content: str
    tool_calls: Any = None
    reasoning_content: Any = None
    name: Any = None

    @field_validator("tool_calls")
    @classmethod
    def _no_calls(cls, value: Any) -> Any:
        if value:
            raise ValueError("calls of a literal assistant turn are not supported; leave the turn and its results out")
        return value

    @field_validator("reasoning_content", "name")
    @classmethod
    def _unused(cls, value: Any) -> Any:
        if value:
            raise ValueError("would not reach the model; write it into content, or remove it")
        return value

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.content and self.role != "system":
            raise ValueError("content is empty; write what is said, or remove the message")
        return self


class _Kwargs(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    create_kwargs: dict[str, Any] = {}
    execute_kwargs: dict[str, Any] = {}


def _kind(value: object) -> str | None:
    """Form of a field by the type of its value, so that only the problems of this form are reported."""
    for form, name in ((str, "=text"), (int, "=int"), (list, "=list"), (dict, "=object")):
        if type(value) is form:  # a bool is not a number here
            return name
    return None


def _either(forms: str) -> Discriminator:
    return Discriminator(_kind, custom_error_type="form", custom_error_message=f"must be {forms}")


IdField = Annotated[Annotated[Text, Tag("=text")] | Annotated[int, Tag("=int")], _either("text or a whole number")]
PromptField = Annotated[
    Annotated[Text, Tag("=text")] | Annotated[list[_Message], Field(min_length=1), Tag("=list")],
    _either("text or a list of messages"),
]
ToolsField = Annotated[
    Annotated[list[Text], Tag("=list")] | Annotated[dict[Text, _Kwargs], Tag("=object")],
    _either("a list of names, or an object of keyword arguments by name"),
]


class _PlainRow(BaseModel):
    """`{id?, prompt|question, tools?, agent_name?, ground_truth?|answer?, metadata?}` and further columns, kept in the
    metadata.

    Without `id` a row has its number, without `ground_truth` its `answer` is that: rows of GSM8K, TRL and verifiers are
    read as they are. `tools` is a list of names, or an object of keyword arguments by name.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    id: IdField | None = None
    prompt: PromptField | None = None
    question: Text | None = None
    tools: ToolsField | None = None
    agent_name: Text | None = None
    ground_truth: Any = None
    metadata: dict[str, Any] = {}


class _RewardModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    style: str = "rule"
    ground_truth: Any

    @field_validator("ground_truth")
    @classmethod
    def _given(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("is null; set the value that answers are compared with")
        return value


class _ExtraInfo(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    index: int | str | None = None
    need_tools_kwargs: bool = False
    tools_kwargs: dict[str, _Kwargs | None] | None = None


class _VerlRow(BaseModel):
    """verl's form. Its Parquet files fill absent struct members with null, so null means absent."""

    model_config = ConfigDict(extra="allow", strict=True)
    data_source: Text
    agent_name: str | None = None
    prompt: Annotated[list[_Message], Field(min_length=1)]
    reward_model: _RewardModel
    extra_info: _ExtraInfo = _ExtraInfo()

    @field_validator("extra_info", mode="before")
    @classmethod
    def _absent(cls, value: Any) -> Any:
        return {} if value is None else value


def scenario(columns: Mapping[str, Json], ordinal: int, *, promptless: bool = False) -> Scenario:
    """Converts a row to a scenario.

    Args:
        columns: JSON values by column.
        ordinal: Position in the data set, from 0.
        promptless: Whether a plain row may have no prompt, since the environment gives it.

    Raises:
        BadRow: Fields are missing, of a wrong type, or not supported.
    """
    media = [f"{name}: only text can be trained on; this row has {name}" for name in MEDIA if columns.get(name)]
    if media:
        raise BadRow(media)
    try:
        if "reward_model" in columns or "data_source" in columns:
            return _from_verl(_VerlRow.model_validate(columns), ordinal)
        return _from_plain(_PlainRow.model_validate(columns), ordinal, promptless=promptless)
    except ValidationError as error:
        raise BadRow([_problem(item) for item in error.errors()]) from error


def _problem(item: Mapping[str, Any]) -> str:
    where = [str(part) for part in item["loc"] if not str(part).startswith("=")]  # the tags of `_kind` are not fields
    return f"{'.'.join(where) or 'row'}: {str(item['msg']).removeprefix('Value error, ')}"


def _from_plain(row: _PlainRow, ordinal: int, *, promptless: bool) -> Scenario:
    columns = row.model_extra or {}
    misspelt = list(_misspelt(columns, _PlainRow))
    if misspelt:
        raise BadRow(misspelt)
    prompt_count = 2 - [row.prompt, row.question].count(None)
    if prompt_count != 1 and not (promptless and prompt_count == 0):
        raise BadRow(["prompt: give either `prompt` or `question`, and one of them only"])
    prompt = row.question if row.question is not None else row.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt) if prompt else []
    by_name = row.tools if isinstance(row.tools, dict) else {}
    return Scenario(
        id=f"row-{ordinal}" if row.id is None else str(row.id),
        ordinal=ordinal,
        messages=messages,
        tools=None if row.tools is None else list(row.tools),
        tools_kwargs={name: kwargs.model_dump() for name, kwargs in by_name.items()},
        agent=row.agent_name or "",
        ground_truth=columns.get("answer") if row.ground_truth is None else row.ground_truth,
        metadata=_merged(columns, row.metadata, "metadata"),
    )


def _from_verl(row: _VerlRow, ordinal: int) -> Scenario:
    tools_kwargs = row.extra_info.tools_kwargs or {}
    extra = row.extra_info.model_dump(exclude={"tools_kwargs", "need_tools_kwargs"})
    index = row.extra_info.index
    columns = {name: value for name, value in (row.model_extra or {}).items() if name not in MEDIA}
    return Scenario(
        id=f"{row.data_source}/{ordinal if index is None else index}",
        ordinal=ordinal,
        messages=_messages(row.prompt),
        tools_kwargs={name: value.model_dump() for name, value in tools_kwargs.items() if value is not None},
        agent=row.agent_name or "",
        ground_truth=row.reward_model.ground_truth,
        metadata=_merged({"data_source": row.data_source, **columns}, extra, "extra_info"),
    )


def _messages(chat: Sequence[_Message]) -> list[dict[str, str]]:
    if chat[-1].role == "assistant":
        raise BadRow(
            [f"prompt.{len(chat) - 1}.role: a prompt cannot end with an assistant turn, since the model's turn follows"]
        )
    for index, message in enumerate(chat):
        if message.role == "tool" and (index == 0 or chat[index - 1].role not in {"assistant", "tool"}):
            raise BadRow([f"prompt.{index}.role: a tool turn must follow an assistant turn"])
    # An empty system message, as in many of verl's rows, is none.
    return [{"role": message.role, "content": message.content} for message in chat if message.content]


def _misspelt(columns: Mapping[str, Json], form: type[BaseModel]) -> Iterator[str]:
    for name in columns:
        for field in difflib.get_close_matches(name, form.model_fields, n=1, cutoff=SIMILAR):
            yield f"{name}: unknown field; did you mean {field}? Rename the column if it is your own"


def _merged(columns: Mapping[str, Json], members: Mapping[str, Json], field: str) -> dict[str, Json]:
    """Additional columns and the members of the metadata field, merged into one object."""
    apart = [name for name in columns if members.get(name, columns[name]) != columns[name]]
    if apart:
        raise BadRow([f"{name}: differs from {field}.{name}; rename one of them" for name in apart])
    return {**columns, **members}
