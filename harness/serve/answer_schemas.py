"""JSON schemas of the routes' answers, from ``answers.toml``.

Answers are built as plain objects; that they are of these types is tested by asking for them."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
REFERENCE = "#/components/schemas/{name}"
PLAIN: dict[str, Schema] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "str": {"type": "string"},
    "bool": {"type": "boolean"},
    "null": {"type": "null"},
    "true": {"enum": [True]},
    "Any": {},
}


def answer_schemas() -> tuple[dict[str, Schema], dict[str, Schema]]:
    """The schemas of all types by name, and for every route that answers with one the reference to
    it."""
    rows = tomllib.loads(Path(__file__).with_name("answers.toml").read_text("utf-8"))
    routes = {route: row_name for row_name, row in rows.items() for route in row.get("routes", ())}
    return (
        {name: _object(name, rows) for name in rows},
        {route: {"$ref": REFERENCE.format(name=name)} for route, name in routes.items()},
    )


def _object(name: str, rows: dict[str, Any]) -> Schema:
    """The schema of the type ``name``."""
    row = rows[name]
    schema: Schema = {"title": name, "type": "object", "properties": {}, "required": []}
    if "extends" in row:
        schema |= _object(row["extends"], rows)
    for field in re.split(r",\s+(?=\w+\??:)", row.get("fields", "")):
        if field:
            field_name, _, text = field.partition(": ")
            schema["properties"][field_name.rstrip("?")] = _schema(
                ast.parse(text, mode="eval").body
            )
            schema["required"] += [field_name] if not field_name.endswith("?") else []
    return schema | {"title": name, "description": " ".join(row["about"].split())}


def _schema(type_text: ast.expr) -> Schema:
    """The schema of a type."""
    match type_text:
        case ast.BinOp(left, ast.BitOr(), right):
            first, second = _schema(left), _schema(right)
            if "enum" in first and "enum" in second:
                return {"enum": first["enum"] + second["enum"]}
            return {"anyOf": [*first.get("anyOf", [first]), second]}
        case ast.Subscript(ast.Name("list"), item):
            return {"type": "array", "items": _schema(item)}
        case ast.Subscript(ast.Name("dict"), ast.Tuple([_, value])):
            return {"type": "object", "additionalProperties": _schema(value)}
        case ast.Constant(value):
            return {"enum": [value]}
        case ast.Name(name):
            return PLAIN.get(name, {"$ref": REFERENCE.format(name=name)})
    raise ValueError(f"answers.toml: no type: {ast.unparse(type_text)}")
