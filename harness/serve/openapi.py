"""The OpenAPI document: from the table of routes, and the types that validate their bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from harness.serve.answer_schemas import ANSWERS, NAMED_EVENTS, STREAMED
from harness.serve.errors import ApiError

REFERENCE = "#/components/schemas/{name}"
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}

EVENT_SCHEMA = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"const": "message"}},
}
"""An event of a stream: unnamed, which readers take for ``message``."""
NAMED_EVENT_SCHEMA = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, in Flask's notation; ``body`` validates what is sent to it, and
    ``errors`` makes the body of a refusal."""

    method: str
    path: str
    name: str
    summary: str
    body: type[Struct] | None = None
    produces: str = "application/json"
    errors: Callable[[ApiError], bytes] = ApiError.encoded


def openapi_document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """The document of a server with these routes."""
    routes = list(routes)
    bodies = [route.body for route in routes if route.body is not None]
    kinds = list(dict.fromkeys([*bodies, *ANSWERS.values()]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        parameters = _parameters(route.path)
        path = route.path.replace("<path:", "{").replace("<", "{").replace(">", "}")
        operation: dict[str, Any] = {
            "operationId": route.name,
            "summary": route.summary,
            "responses": {
                "200": {"description": "done", "content": _content(route, schema_of)},
                "default": {
                    "description": "refused",
                    "content": {"application/json": {"schema": _to("Error")}},
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
            "schemas": {**components, "Error": ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _content(route: Route, schema_of: Mapping[type[Struct], Any]) -> dict[str, Any]:
    """What a route answers with when it does not refuse."""
    kind = ANSWERS.get(route.name)
    content: dict[str, Any] = {route.produces: {} if kind is None else {"schema": schema_of[kind]}}
    if route.name in STREAMED:
        named = route.name in NAMED_EVENTS
        content["text/event-stream"] = {"schema": NAMED_EVENT_SCHEMA if named else EVENT_SCHEMA}
    return content


def _parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for part in path.split("/")
        if part.startswith("<")
        for name in [part.strip("<>").removeprefix("path:")]
    ]


def _to(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=name)}
