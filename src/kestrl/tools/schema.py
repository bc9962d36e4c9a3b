"""Derives the definition of a tool for the model, and the check of its arguments, from a function or class.

pydantic reads the type hints, so that nested types, `Literal`, `Annotated[int, Field(ge=1)]`, unions and defaults all
have their JSON Schema; a value that fits is converted to the declared type (a date, an enum, a model of the user's).
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import docstring_parser
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from kestrl.errors import UserInputError
from kestrl.tools import Hidden, ToolSchema
from kestrl.tools.arguments import Arguments, Convert
from kestrl.tools.json_schema import SchemaInvalid
from kestrl.tools.shapes import is_list, is_mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Description of a tool."""

    schema: ToolSchema
    arguments: Arguments
    fillable: frozenset[str]
    """Parameters allowed in `execute_kwargs`: all except those set by the manifest."""
    required: frozenset[str]
    """Hidden parameters without a default, required in `execute_kwargs`."""


class _Parameter(NamedTuple):
    name: str
    adapter: TypeAdapter[Any]
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class _Documentation:
    description: str
    arguments: Mapping[str, str]


class _Generator(GenerateJsonSchema):
    # A default without a JSON form is omitted from the schema, without pydantic's warning.
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - pydantic's own attribute


def describe(obj: Any, name: str, *, hidden: Collection[str] = ()) -> ToolSchema:
    """Definition of the tool for the model.

    Args:
        obj: A function, or a class whose instances are called.
        name: What the model calls it.
        hidden: Parameters to omit, in addition to those marked `Hidden`.

    Raises:
        UserInputError: A parameter cannot be described; the message names it and the fix.
    """
    return read(obj, name, fixed=hidden).schema


def read(obj: Any, name: str, *, fixed: Collection[str] = (), method: str | None = None) -> Described:
    """Like `describe`, with the check of arguments.

    Args:
        obj: A function or class.
        name: What the model calls the tool.
        fixed: Parameters set by the manifest.
        method: The method of the class that is called; None for `__call__`.
    """
    target: Callable[..., Any] = _target(obj, name) if method is None else getattr(obj, method)
    hints = _hints(target, name)
    documentation = _documentation(obj, target) if method is None else _parsed(_source(target))
    bound = inspect.isclass(obj) and not (
        method is not None and isinstance(inspect.getattr_static(obj, method), staticmethod | classmethod)
    )
    parameters: list[_Parameter] = []
    fillable: set[str] = set()
    required: set[str] = set()
    for parameter in _parameters(target, name, bound=bound):
        if parameter.name in fixed:
            continue
        fillable.add(parameter.name)
        hint = hints.get(parameter.name)
        if _is_hidden(hint):
            if parameter.default is parameter.empty:
                required.add(parameter.name)
            continue
        parameters.append(_shown(parameter, hint, documentation, name))
    schema = ToolSchema(name=name, description=documentation.description, parameters=_object(parameters))
    converters: dict[str, Convert] = {parameter.name: _converter(parameter.adapter) for parameter in parameters}
    try:
        arguments = Arguments(schema.parameters, converters)
    except SchemaInvalid as error:
        raise UserInputError(f"{name}: the schema of its parameters cannot be used: {error}") from error
    return Described(
        schema=schema,
        arguments=arguments,
        fillable=frozenset(fillable),
        required=frozenset(required),
    )


def _target(obj: Any, name: str) -> Callable[..., Any]:
    """Function that is called for the tool."""
    if not callable(obj):
        raise UserInputError(f"{name}: a tool is a function or a class, this is {type(obj).__name__}")
    if inspect.isclass(obj):
        if not any("__call__" in vars(base) for base in obj.__mro__):
            raise UserInputError(
                f"{name}: the class {obj.__name__} has neither __call__ nor public methods; write `def "
                "__call__(self, ...)` "
                "for one tool, or methods for several"
            )
        obj = cast(Any, obj).__call__
    elif not inspect.isroutine(obj) and not _is_partial(obj):
        obj = cast(Any, obj).__call__
    target: Callable[..., Any] = obj
    return target


def _is_partial(obj: Any) -> bool:
    return isinstance(obj, partial)


def _source(target: Any) -> Callable[..., Any]:
    """Original function without `partial` and decorators, which has the type hints and the docstring."""
    while _is_partial(target):
        target = target.func
    original: Callable[..., Any] = inspect.unwrap(target)
    return original


def _parameters(target: Callable[..., Any], name: str, *, bound: bool) -> list[inspect.Parameter]:
    """Parameters passed by name; without the first one if the function is to be `bound` to an instance."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserInputError(
            f"{name}: has no readable signature ({error}); wrap it in a function with type hints"
        ) from error
    for parameter in parameters[bound:]:
        stars = (
            "*"
            if parameter.kind is parameter.VAR_POSITIONAL
            else "**"
            if parameter.kind is parameter.VAR_KEYWORD
            else ""
        )
        if stars or parameter.kind is parameter.POSITIONAL_ONLY:
            raise UserInputError(
                f"{name}: the parameter {stars + parameter.name!r} cannot be described to the model, which sends "
                "arguments by name; "
                "write each one out, with its type"
            )
    return parameters[bound:]


def _hints(target: Callable[..., Any], name: str) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(_source(target), include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise UserInputError(f"{name}: its type hints cannot be read: {error}") from error


def _documentation(obj: Any, target: Callable[..., Any]) -> _Documentation:
    documented = _parsed(_source(target))
    if documented.description or not inspect.isclass(obj):
        return documented
    return _Documentation(_parsed(obj).description, documented.arguments)


def _parsed(documented: Any) -> _Documentation:
    """Docstring in Google, NumPy, reST or Epydoc style. Returns, errors and examples are for programmers and
    omitted.
    """
    text = inspect.cleandoc(documented.__doc__ or "")
    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:
        return _Documentation(text, {})
    arguments = {
        parameter.arg_name.lstrip("*"): " ".join((parameter.description or "").split()) for parameter in parsed.params
    }
    return _Documentation((parsed.description or "").strip(), arguments)


def _is_hidden(hint: Any) -> bool:
    marks = getattr(hint, "__metadata__", ())
    return any(isinstance(mark, Hidden) or mark is Hidden for mark in marks)


def _shown(parameter: inspect.Parameter, hint: Any, documentation: _Documentation, name: str) -> _Parameter:
    if parameter.annotation is parameter.empty:
        raise UserInputError(
            f"{name}: the parameter {parameter.name!r} has no type hint, which its schema needs; add one, "
            f"such as `{parameter.name}: str`"
        )
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        adapter.json_schema(schema_generator=_Generator)
    except PydanticUserError as error:
        raise UserInputError(
            f"{name}: the parameter {parameter.name!r} has a type without a JSON form "
            f"({error.message.splitlines()[0]}). "
            "Use another, or mark it `Annotated[..., Hidden()]` when the scenario fills it"
        ) from error
    return _Parameter(parameter.name, adapter, parameter.default, documentation.arguments.get(parameter.name, ""))


def _object(parameters: list[_Parameter]) -> dict[str, Any]:
    """JSON Schema of all parameters."""
    by_name, shared = TypeAdapter.json_schemas(
        [(parameter.name, "validation", parameter.adapter) for parameter in parameters], schema_generator=_Generator
    )
    properties = {
        parameter.name: _property(parameter, by_name[parameter.name, "validation"]) for parameter in parameters
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    if required:
        schema["required"] = required
    schema["additionalProperties"] = False
    if "$defs" in shared:
        schema["$defs"] = {name: _without_titles(definition) for name, definition in shared["$defs"].items()}
    return schema


def _property(parameter: _Parameter, schema: Mapping[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = _without_titles(schema)
    if parameter.description:
        described.setdefault("description", parameter.description)
    if parameter.default is not inspect.Parameter.empty:
        try:
            described["default"] = parameter.adapter.dump_python(parameter.default, mode="json", warnings=False)
        except ValueError:  # a sentinel object: the argument is optional, without a default in the schema
            described.pop("default", None)
    return described


def _without_titles(schema: Any) -> Any:
    """Removes the titles that pydantic derives from names, which carry no information."""
    if is_list(schema):
        return [_without_titles(item) for item in schema]
    if not is_mapping(schema):
        return schema
    members: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("default", "const", "enum", "examples"):
            members[key] = value
        elif key in ("properties", "$defs", "patternProperties"):
            members[key] = {name: _without_titles(subschema) for name, subschema in value.items()}
        elif key != "title":
            members[key] = _without_titles(value)
    return members


def _converter(adapter: TypeAdapter[Any]) -> Convert:
    # From JSON, since pydantic's strict mode then accepts a string for a date or an enum, and an array for a set.
    return lambda value: adapter.validate_json(json.dumps(value), strict=True)
