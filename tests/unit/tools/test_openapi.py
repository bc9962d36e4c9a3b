"""OpenAPI documents as tools: both versions' schemas, names, and what is refused with the operation and the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kestrl.errors import UserInputError
from kestrl_tools.http.document import DocumentInvalid, parsed
from kestrl_tools.http.operations import Operation, name_of, of_document
from kestrl_tools.http.requests import request_of

PETS = """
openapi: 3.0.3
info: {title: Pets, version: 1.0.0}
paths:
  /pets:
    post:
      operationId: addPet
      description: Adds a pet.
      requestBody:
        required: true
        content:
          application/json:
            schema:
              allOf: [{$ref: '#/components/schemas/Pet'}]
  /pets/{id}/photos:
    get:
      tags: [photos]
      parameters:
        - {name: id, in: path, required: true, schema: {type: integer, minimum: 0, exclusiveMinimum: true}}
        - {name: state, in: query, schema: {type: string, nullable: true, enum: [on, off]}}
        - {name: since, in: query, schema: {type: string, format: date, default: 2026-01-01}}
components:
  schemas:
    Pet: &pet
      type: object
      required: [name, owner]
      properties:
        name: {type: string, maxLength: 20, example: Rex, xml: {attribute: true}}
        owner: {nullable: true, allOf: [{$ref: '#/components/schemas/Owner'}]}
        born: {type: string, readOnly: true}
    Owner: {type: object, properties: {mail: {type: string, pattern: '^.+@.+$'}}, additionalProperties: false}
"""


def read(text: str, *wanted: str, fixed: tuple[str, ...] = ()) -> dict[str, Operation]:
    return {tool.name: tool for tool in of_document("pets", parsed(text.encode()), wanted or None, fixed)}


def test_schemas_of_openapi_3_0_become_json_schemas() -> None:
    pets = read(PETS)
    assert list(pets) == ["addPet", "get_pets_id_photos"]
    assert pets["addPet"].listed().parameters == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "owner": {
                "anyOf": [
                    {
                        "allOf": [
                            {
                                "type": "object",
                                "properties": {"mail": {"type": "string", "pattern": "^.+@.+$"}},
                                "additionalProperties": False,
                            }
                        ]
                    },
                    {"type": "null"},
                ]
            },
        },
        "required": ["name", "owner"],
        "additionalProperties": False,
    }
    photos = pets["get_pets_id_photos"].listed()
    assert photos.description == "GET /pets/{id}/photos"
    assert photos.parameters["properties"] == {
        "id": {"type": "integer", "exclusiveMinimum": 0},
        "state": {"type": ["string", "null"], "enum": ["on", "off", None]},
        "since": {"type": "string", "format": "date", "default": "2026-01-01"},
    }


def test_only_selected_operations_are_read() -> None:
    assert list(read(PETS, "addPet")) == ["addPet"]
    with pytest.raises(UserInputError, match=r"tools: pets has no tool addPets \(it has: addPet, get_pets_id_photos\)"):
        read(PETS, "addPets")


@pytest.mark.parametrize(
    ("operation_id", "method", "path", "name"),
    [
        ("repos/get", "get", "/", "repos_get"),
        ("2nd", "get", "/", "_2nd"),
        (None, "get", "/pets/{id}", "get_pets_id"),
        (None, "delete", "/", "delete"),
        ("a" * 100, "get", "/", "a" * 64),
    ],
)
def test_names_are_ones_that_models_can_call(operation_id: str | None, method: str, path: str, name: str) -> None:
    assert name_of(operation_id, method, path) == name


def document(operation: dict[str, Any], path: str = "/a", **root: Any) -> str:
    item = {"get": {"operationId": "look", **operation}, **root.pop("item", {})}
    return json.dumps({"openapi": "3.1.0", "paths": {path: item}, **root})


def query(**parameter: Any) -> dict[str, Any]:
    return {"parameters": [{"name": "p", "in": "query", "schema": {"type": "string"}, **parameter}]}


def body(schema: Any, kind: str = "application/json") -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


NODE: dict[str, Any] = {
    "components": {"schemas": {"Node": {"properties": {"next": {"$ref": "#/components/schemas/Node"}}}}}
}
IN_QUERY = {"type": "apiKey", "in": "query", "name": "key"}
DEEP: dict[str, Any] = json.loads('{"items": ' * 100 + "{}" + "}" * 100)
WIDE = {f"S{n}": {"prefixItems": [{"$ref": f"#/components/schemas/S{n + 1}"}] * 9} for n in range(9)} | {"S9": {}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (document(query(style="deepObject")), "its query parameter 'p' has the style 'deepObject'; only 'form'"),
        (document(query(allowReserved=True)), "its query parameter 'p' has the style 'allowReserved'"),
        (document(query(schema={"type": "object"})), "its query parameter 'p' is an object"),
        (document(query(content={"text/xml": {}})), "its query parameter 'p' is text/xml, not JSON"),
        (document({"parameters": [{"name": "c", "in": "cookie", "required": True}]}), "its cookie parameter 'c' is"),
        (document({"parameters": [{"name": "Host", "in": "header"}]}), "its header parameter 'Host' belongs to"),
        (document({"parameters": {"name": "p"}}), "a part of it that must be a list is none"),
        (document({"parameters": [7]}), "a part of it is not an object"),
        (document({}, path="/a/{id}"), "its path parameter id is not described"),
        (document({}, path="/a?b=c"), "its path has a query or a fragment"),
        (document(body({}, "multipart/form-data")), "its body is multipart/form-data, and only JSON is supported"),
        (document({"servers": [{"url": "http://h"}]}), "it has `servers` of its own"),
        (document(body({"$ref": "other.yaml#/Item"})), "the reference 'other.yaml#/Item' is not into the document"),
        (document(body({"$ref": "#/components/schemas/No"})), "the reference #/components/schemas/No names nothing"),
        (document(body({"$ref": "#/components/schemas/Node"}), **NODE), "its schema contains itself by #/comp"),
        (document({"requestBody": {"$ref": "#/paths/~1a/get/requestBody"}}), "leads to itself"),
        (document(body({"$dynamicRef": "#a"})), r"its schema has \$dynamicRef"),
        (document(body({"pattern": "("})), "the pattern '\\(' is not a regular expression"),
        (document(body({"required": True})), "a `required` that is not a list of names"),
        (document(body(DEEP)), "more than 5000 parts or 64 levels"),
        (document(body({"$ref": "#/components/schemas/S0"}), components={"schemas": WIDE}), "more than 5000 parts"),
        (
            document({}, security=[{"k": []}], components={"securitySchemes": {"k": IN_QUERY}}),
            "its credential k is in the query; a credential can only be a header",
        ),
        (document({}, item={"post": {"operationId": "look"}}), r"look \(POST /a\) would have the same name, 'look'"),
        (
            document({"parameters": [{"name": name, "in": place} for name, place in [("p", "query"), ("p", "header")]]
                      + [{"name": "p_header", "in": "query"}]}),
            "several of its parameters would be called 'p_header'",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UserInputError, match=rf"http.openapi: the operation look \(GET /a.*\) is not supp.*{reason}"):
        read(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "it is not an object"),
        (b'{"openapi": "3.1.0"}', "it has no `paths`"),
        (b'{"openapi": "2.0.0", "paths": {}}', "its version is '2.0.0'"),
        (b"{", "it is neither JSON nor YAML: JSONDecodeError"),
        (b"a: !!python/object:os.system {}", "it is neither JSON nor YAML: ConstructorError"),
        (b"\xff", "it is neither JSON nor YAML"),
        (b"[" * 100_000, "it has more than 200 levels"),
        (b" " * (9 * 1024 * 1024), "it is longer than 8388608 bytes"),
    ],
)
def test_a_file_that_is_no_document_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DocumentInvalid, match=message):
        parsed(content)


def test_a_document_whose_parts_contain_themselves_is_refused() -> None:
    text = (
        "openapi: 3.1.0\npaths: {/a: {post: {operationId: look, requestBody: {content: {application/json: &m {schema: "
    )
    for schema in ("&s {items: *s}", "{enum: &e [*e]}"):
        with pytest.raises(DocumentInvalid, match="within what it names"):
            read(f"{text}{schema}}}}}}}}}}}}}\n")
    with pytest.raises(UserInputError, match="its schema has a date, which JSON does not have"):
        read(f"{text}{{const: !!timestamp 2026-01-01}}}}}}}}}}}}}}\n")


def test_references_may_have_keywords_beside_them_in_3_1() -> None:
    named: dict[str, Any] = {"components": {"schemas": {"Name": {"type": "string", "maxLength": 9}}}}
    found = read(
        document(query(schema={"$ref": "#/components/schemas/Name", "minLength": 2, "description": "N"}), **named)
    )
    assert found["look"].listed().parameters["properties"]["p"] == {
        "type": "string", "maxLength": 9, "minLength": 2, "description": "N"
    }  # fmt: skip
    both = read(document(query(schema={"$ref": "#/components/schemas/Name", "maxLength": 5}), **named))
    assert both["look"].listed().parameters["properties"]["p"] == {
        "allOf": [{"type": "string", "maxLength": 9}, {"maxLength": 5}]
    }


def test_a_path_keeps_the_characters_that_the_document_has() -> None:
    found = read(document({"parameters": [{"name": "id", "in": "path"}]}, path="/a b/{id}:run"))
    request = request_of(found["look"], "http://h/v1/", {"id": "{id}?x#y%2e"})
    assert str(request.url) == "http://h/v1/a%20b/%7Bid%7D%3Fx%23y%252e:run"
