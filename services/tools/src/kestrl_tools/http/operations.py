"""Operations of an HTTP server as tools: those of an OpenAPI document, and endpoints that the manifest declares."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kestrl._shared.plan.settings.tools import EndpointEntry
from kestrl.errors import UserInputError
from kestrl.tools.shapes import is_list, is_mapping
from kestrl_tools.http.document import Document, Unsupported
from kestrl_tools.http.schemas import Schemas
from kestrl_tools.servers import NOTHING_LEFT_OUT, LeftOut, ListedTool, callable_name, chosen, refuse

METHODS = ("get", "put", "post", "delete", "patch")
"""Methods of operations that are tools; head, options and trace return nothing to read."""
WITH_BODY = frozenset({"PUT", "POST", "PATCH"})
IGNORED_HEADERS = frozenset({"accept", "content-type", "authorization"})
"""Header parameters without effect, by OpenAPI's own rule."""
REFUSED_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "cookie", "te", "upgrade"})
"""Headers that belong to the connection, which no argument may set."""
JSON_TYPE = re.compile(r"application/([\w.+-]+\+)?json(\s*;.*)?", re.IGNORECASE)
STYLES = {"path": "simple", "query": "form", "header": "simple"}
"""OpenAPI's default styles, the only ones that are supported."""
OF_PROPERTIES = frozenset({"type", "properties", "required", "additionalProperties", "title", "description", "default"})
"""Keywords of an object's schema that can become one parameter for each property."""
PATH_PARAMETER = re.compile(r"\{([^{}]*)\}")


class ArgumentPlace(StrEnum):
    """Where a request has an argument."""

    PATH = "path"
    QUERY = "query"
    HEADER = "header"
    PROPERTY = "property"
    """A property of the JSON body."""
    BODY = "body"
    """The whole JSON body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a tool and its place in the request."""

    name: str
    """Name for the model."""
    place: ArgumentPlace
    key: str
    """Name in the request."""
    schema: Any
    required: bool = False
    explode: bool = True
    """Whether each item of a list repeats the name in the query; else they are joined by commas."""
    as_json: bool = False
    """Whether the value is JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation as a tool."""

    name: str
    description: str
    method: str
    path: str
    parameters: tuple[Parameter, ...]
    body: bool = False
    """Whether the request has a body although no argument is in it."""

    def listed(self) -> ListedTool:
        """The tool as the model may see it."""
        properties = {item.name: item.schema for item in self.parameters}
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        if required := [item.name for item in self.parameters if item.required]:
            schema["required"] = required
        return ListedTool(self.name, self.description, schema)


@dataclass(frozen=True, slots=True)
class _Found:
    """An operation of the document that is not converted yet."""

    method: str
    path: str
    item: Mapping[str, Any]
    operation: Mapping[str, Any]

    def __str__(self) -> str:
        name = self.operation.get("operationId")
        return f"{f'{name} ' if name else ''}({self.method.upper()} {self.path})"


def of_document(
    server: str,
    document: Document,
    selection: Sequence[str] | None,
    fixed_headers: Collection[str],
    left_out: LeftOut = NOTHING_LEFT_OUT,
) -> list[Operation]:
    """Operations of a document that are offered, in the order of their names.

    Args:
        server: Name of the server, for messages.
        document: The document.
        selection: Names that the manifest selects; None for all.
        fixed_headers: Names of headers that the manifest sets; their parameters are hidden.
        left_out: What the manifest leaves out.

    Raises:
        UserInputError: An operation is missing or not supported; the message has its id and the reason, and begins with
            the rest of the field.
    """
    by_name: dict[str, list[_Found]] = {}
    try:
        for operation in _all(document):
            by_name.setdefault(
                name_of(operation.operation.get("operationId"), operation.method, operation.path), []
            ).append(operation)
    except Unsupported as error:
        raise UserInputError(f"http.openapi: {error}") from error
    operations: list[Operation] = []
    reasons: list[str] = []
    for name in chosen("http", server, by_name, selection, left_out):
        first, *namesakes = by_name[name]
        try:
            if namesakes:
                raise Unsupported(f"{', '.join(map(str, namesakes))} would have the same name, {name!r}")
            operations.append(_Reader(document, fixed_headers).read(name, first))
        except Unsupported as error:
            reasons.append(f"the operation {first} is not supported: {error}")
    refuse("http.openapi", server, reasons, left_out)
    return operations


def name_of(operation_id: object, method: str, path: str) -> str:
    """Name of an operation for the model: its id, or its method and path, with `_` for what a name cannot have."""
    return callable_name(operation_id if isinstance(operation_id, str) and operation_id else f"{method}{path}")


def _all(document: Document) -> Iterator[_Found]:
    for path, value in document.root["paths"].items():
        if not str(path).startswith("/"):
            continue  # an extension
        item = document.at(value)
        for method in METHODS:
            if method in item:
                yield _Found(method, str(path), item, document.at(item[method]))


class _Reader:
    """Reads one operation."""

    def __init__(self, document: Document, fixed_headers: Collection[str]) -> None:
        self._document = document
        self._schemas = Schemas(document)
        self._fixed = {name.lower() for name in fixed_headers}

    def read(self, name: str, source: _Found) -> Operation:
        """The operation as a tool; raises Unsupported."""
        operation = source.operation
        if operation.get("servers") or source.item.get("servers"):
            raise Unsupported("it has `servers` of its own")
        if "?" in source.path or "#" in source.path:
            raise Unsupported("its path has a query or a fragment")
        self._check_security(operation)
        parameters = list(self._parameters(source))
        declared = {item.key for item in parameters if item.place is ArgumentPlace.PATH}
        if undescribed := sorted(set(PATH_PARAMETER.findall(source.path)) - declared):
            raise Unsupported(f"its path parameter {', '.join(undescribed)} is not described")
        in_body, body = self._body(operation, {item.name for item in parameters})
        parameters += in_body
        return Operation(
            name=name,
            description=_description(operation, source),
            method=source.method.upper(),
            path=source.path,
            parameters=_named_apart(parameters),
            body=body,
        )

    def _check_security(self, operation: Mapping[str, Any]) -> None:
        """Refuses an operation whose every kind of credential is sent in a way that is not supported."""
        document = self._document
        alternatives = document.items(operation.get("security", document.root.get("security"))) or [{}]
        schemes = document.at(document.at(document.root.get("components", {})).get("securitySchemes", {}))
        reasons = [self._refused_security(schemes, document.at(alternative)) for alternative in alternatives]
        if all(reasons):
            raise Unsupported(f"{reasons[0]}; a credential can only be a header (`secretHeaders`)")

    def _refused_security(self, schemes: Mapping[str, Any], alternative: Mapping[str, Any]) -> str:
        for name in alternative:
            scheme = self._document.at(schemes.get(name, {}))
            if scheme.get("type") == "apiKey" and scheme.get("in") in ("query", "cookie"):
                return f"its credential {name} is in the {scheme['in']}"
            if scheme.get("type") == "mutualTLS":
                return f"its credential {name} is a certificate of the client"
        return ""

    def _parameters(self, source: _Found) -> Iterator[Parameter]:
        merged: dict[tuple[str, str], Mapping[str, Any]] = {}
        items = self._document.items
        for value in [*items(source.item.get("parameters")), *items(source.operation.get("parameters"))]:
            item = self._document.at(value)
            merged[str(item.get("in")), str(item.get("name"))] = item
        for (place, key), item in merged.items():
            hidden = place == "header" and key.lower() in {*IGNORED_HEADERS, *self._fixed}
            if not hidden and not (place == "cookie" and item.get("required") is not True):
                yield self._parameter(place, key, item)

    def _parameter(self, place: str, key: str, item: Mapping[str, Any]) -> Parameter:
        subject = f"its {place} parameter {key!r}"
        style = STYLES.get(place)
        if style is None:
            raise Unsupported(f"{subject} is required, and only parameters in path, query and header can be set")
        if place == "header" and key.lower() in REFUSED_HEADERS:
            raise Unsupported(f"{subject} belongs to the connection")
        if item.get("style", style) != style or item.get("allowReserved") is True:
            raise Unsupported(
                f"{subject} has the style {item.get('style', 'allowReserved')!r}; only {style!r} is supported"
            )
        schema, as_json = self._value(subject, item)
        if not as_json and _is_object(schema):
            raise Unsupported(f"{subject} is an object")
        return Parameter(
            name=key,
            place=ArgumentPlace(place),
            key=key,
            schema=_with_description(schema, item.get("description")),
            required=place == "path" or item.get("required") is True,
            explode=item.get("explode", style == "form") is True,
            as_json=as_json,
        )

    def _value(self, subject: str, item: Mapping[str, Any]) -> tuple[Any, bool]:
        """Schema of a parameter, and whether its value is JSON text."""
        content = self._document.at(item.get("content", {}))
        if not content:
            return self._schemas.converted(item.get("schema", {})), False
        kind, media = next(iter(content.items()))
        if not JSON_TYPE.fullmatch(str(kind)):
            raise Unsupported(f"{subject} is {kind}, not JSON")
        return self._schemas.converted(self._document.at(media).get("schema", {})), True

    def _body(self, operation: Mapping[str, Any], parameter_names: Set[str]) -> tuple[list[Parameter], bool]:
        """Parameters for the JSON body, and whether there is a body in any case."""
        if "requestBody" not in operation:
            return [], False
        body = self._document.at(operation["requestBody"])
        content = self._document.at(body.get("content", {}))
        media = next((value for kind, value in content.items() if JSON_TYPE.fullmatch(str(kind))), None)
        if media is None:
            raise Unsupported(f"its body is {', '.join(map(str, content)) or 'of no type'}, and only JSON is supported")
        required = body.get("required") is True
        schema = _unwrapped(self._schemas.converted(self._document.at(media).get("schema", {})))
        properties = _properties(schema)
        flat = (
            properties is not None
            and parameter_names.isdisjoint(properties)
            and (required or not schema.get("required"))
        )
        if not flat or properties is None:
            body_schema = _with_description(schema, body.get("description"))
            return [
                Parameter(name="body", place=ArgumentPlace.BODY, key="body", schema=body_schema, required=required)
            ], False
        needed = schema.get("required", ())
        return [
            Parameter(name=key, place=ArgumentPlace.PROPERTY, key=key, schema=value, required=key in needed)
            for key, value in properties.items()
        ], required


def of_endpoint(entry: EndpointEntry) -> Operation:
    """An endpoint that the manifest declares."""
    in_path = set(PATH_PARAMETER.findall(entry.path))
    default_place = ArgumentPlace.PROPERTY if entry.method in WITH_BODY else ArgumentPlace.QUERY
    return Operation(
        name=entry.name,
        description=entry.description,
        method=entry.method,
        path=entry.path,
        parameters=tuple(
            Parameter(
                name=key,
                place=ArgumentPlace.PATH if key in in_path else default_place,
                key=key,
                schema=schema,
                required=key in entry.required,
            )
            for key, schema in entry.parameters.items()
        ),
        body=entry.method in WITH_BODY,
    )


def _description(operation: Mapping[str, Any], source: _Found) -> str:
    parts = [operation.get("summary"), operation.get("description")]
    text = "\n\n".join(dict.fromkeys(str(part).strip() for part in parts if part))
    return text or f"{source.method.upper()} {source.path}"


def _with_description(schema: Any, description: object) -> Any:
    if not description or not is_mapping(schema):
        return schema
    return {**schema, "description": str(description)}


def _unwrapped(schema: Any) -> Any:
    """The schema in an `allOf` of one, which documents use to describe a reference."""
    if is_mapping(schema) and set(schema) <= {"allOf", "title", "description", "default"}:
        parts: Any = schema.get("allOf", ())
        if len(parts) == 1:
            return _unwrapped(parts[0])
    return schema


def _properties(schema: Any) -> Mapping[str, Any] | None:
    """Properties of an object's schema that says nothing else of it."""
    if not is_mapping(schema) or not set(schema) <= OF_PROPERTIES:
        return None
    if schema.get("type", "object") != "object" or schema.get("additionalProperties", False) is not False:
        return None
    properties: Any = schema.get("properties")
    return properties if properties and set(schema.get("required", ())) <= set(properties) else None


def _is_object(schema: Any) -> bool:
    if not is_mapping(schema):
        return False
    kinds = schema.get("type")
    return "object" in (kinds if is_list(kinds) else [kinds]) or "properties" in schema


def _named_apart(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Parameters with names of their own: one whose name is taken gets its place as a suffix.

    Raises:
        Unsupported: The name with the suffix is taken, too.
    """
    by_name: dict[str, Parameter] = {}
    names = {item.name for item in parameters}
    for item in parameters:
        name = item.name
        if name in by_name:
            name = f"{name}_{item.place}"
            if name in names or name in by_name:
                raise Unsupported(f"several of its parameters would be called {name!r}")
        by_name[name] = replace(item, name=name)
    return tuple(by_name.values())
