"""The OpenAPI document, made from the table of routes and the types that validate bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from harness.serve.answer_schemas import REFERENCE, Schema, answer_schemas
from harness.serve.route import EVENT_STREAM, Route
from harness.serve.strict_json import known_type

NULL = {"type": "null"}
STREAMED = frozenset(
    (
        *("chat", "complete", "infill", "continue_text", "respond", "message", "pull_model"),
        *("ollama_chat", "ollama_generate", "ollama_pull"),
    )
)
"""Routes that answer with events when asked to."""
NAMED_EVENTS = frozenset({"respond", "message"})
"""Those of them whose events have names."""
EVENT_SCHEMA = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"const": "message"}},
}
"""A server-sent event without a name, whose type is ``message``."""
NAMED_EVENT_SCHEMA = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}


def openapi_document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """The OpenAPI document of a server with these routes."""
    routes = list(routes)
    bodies = [route.body for route in routes if route.body is not None]
    kinds = [known_type(kind) for kind in dict.fromkeys(bodies)]
    answer_components, answers = answer_schemas()
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    strict = {route.body.__name__ for route in routes if route.strict and route.body is not None}
    for name in _reachable(components, [body.__name__ for body in bodies]):
        _accept(components[name], strict=name in strict)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        parameters = _parameters(route.path)
        path = route.path.replace("<path:", "{").replace("<", "{").replace(">", "}")
        error = {"$ref": REFERENCE.format(name=route.error_schema)}
        operation: dict[str, Any] = {
            "operationId": route.name,
            "summary": route.summary,
            "responses": {
                "200": {"description": "done", "content": _content(route, answers.get(route.name))},
                "default": {
                    "description": "refused",
                    "content": {"application/json": {"schema": error}},
                },
            },
        }
        if parameters:
            operation["parameters"] = parameters
        if route.body is not None:
            schema = schema_of[route.body]
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "zinc-rt", "version": version},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, **answer_components},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _reachable(components: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """The names of all components that ``names`` refer to, directly or not, and ``names``
    themselves."""
    found: set[str] = set()
    waiting = [name for name in names if name in components]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            text = msgspec.json.encode(components[name]).decode()
            waiting += [one for one in components if f'"{REFERENCE.format(name=one)}"' in text]
    return found


def _accept(schema: dict[str, Any], *, strict: bool) -> None:
    """Change the schema of an object to what the server accepts: null for optional fields, and
    unknown fields unless ``strict``."""
    if not strict and schema.get("additionalProperties") is False:
        del schema["additionalProperties"]
    required = schema.get("required", ())
    for name, given in schema.get("properties", {}).items():
        if name not in required and NULL not in given.get("anyOf", ()):
            plain = {"anyOf": [{k: v for k, v in given.items() if k != "default"}, NULL]}
            default = {"default": given["default"]} if "default" in given else {}
            schema["properties"][name] = plain | default


def _content(route: Route, answer: Schema | None) -> dict[str, Any]:
    """The content of a route's successful answers, by content type."""
    content: dict[str, Any] = {route.produces: {} if answer is None else {"schema": answer}}
    if route.name in STREAMED:
        named = route.name in NAMED_EVENTS
        events = route.streams == EVENT_STREAM
        schema = NAMED_EVENT_SCHEMA if named else EVENT_SCHEMA
        content[route.streams] = {"schema": schema} if events else {}
    return content


def _parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for part in path.split("/")
        if part.startswith("<")
        for name in [part.strip("<>").removeprefix("path:")]
    ]
