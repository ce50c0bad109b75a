"""Calls as Gemma 4 writes them: ``call:name{key:<|"|>text<|"|>,count:3}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.serve.dialect.calls import Call, Function, Functions, choice, json_rule, literal
from harness.serve.structured.json_schema import ANNOTATIONS, SchemaRefused, check_schema

QUOTE = '<|"|>'
NAME = re.compile(r"\s*call:([a-zA-Z0-9_.-]+)(?=\{)")
KEY = re.compile(r"[a-zA-Z0-9_.-]+")
SCALAR = re.compile(r"true|false|null|None|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
DEEPEST = 32
STRING_REST = r'string_rest[lazy]: /(.|\n)*<\|"\|>/'
ROOT_KEYWORDS = frozenset(("$schema", "$defs", "definitions"))
SCALARS = frozenset(("integer", "number", "boolean", "null"))


@dataclass(frozen=True)
class GemmaCalls:
    """Objects with bare keys, in which strings stand between tokens of their own."""

    begin: str = "<|tool_call>"
    end: str | None = "<tool_call|>"
    only_first: bool = False
    repeats: bool = True
    separator: str = ""
    short_ids: bool = False

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        found = NAME.match(body)
        if found is None or found[1] not in functions:
            return None
        reader = _Reader(body, found.end())
        try:
            arguments = reader.value()
        except _Malformed:
            return None
        if body[reader.at :].strip() or not isinstance(arguments, dict):
            return None
        return [Call(found[1], json.dumps(arguments, ensure_ascii=False))]

    def inside_value(self, body: str) -> bool:
        return body.count(QUOTE) % 2 == 1

    def arguments_start(self, body: str) -> tuple[str, int] | None:
        return None

    def rules(self, functions: Sequence[Function], many: bool) -> list[str]:
        writer = _Rules()
        names = []
        for function in functions:
            check_schema(function.parameters)
            value = writer.value({"type": "object", **function.parameters}, function.parameters, "")
            names.append(writer.add(f"{literal(f'call:{function.name}')} {value}"))
        return [f"calls: {choice(names)} {literal('<tool_call|>')}", *writer.rules]


class _Malformed(Exception):
    """A body that is not of this form."""


@dataclass(slots=True)
class _Reader:
    """Reads one value after the other."""

    text: str
    at: int

    def value(self, depth: int = 0) -> Any:
        """The value that starts here. Raises _Malformed."""
        if depth > DEEPEST:
            raise _Malformed
        self._skip()
        if self._takes(QUOTE):
            return self._until_quote()
        if self._takes("{"):
            return self._members(depth)
        if self._takes("["):
            return self._items(depth)
        return self._scalar()

    def _members(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._closes("}", bool(members)):
            key = self._key()
            if key in members or not self._takes(":"):
                raise _Malformed
            members[key] = self.value(depth + 1)
        return members

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._closes("]", bool(items)):
            items.append(self.value(depth + 1))
        return items

    def _closes(self, bracket: str, has_some: bool) -> bool:
        """Whether the container ends here; before another part comes a comma."""
        self._skip()
        if self._takes(bracket):
            return True
        if has_some and not self._takes(","):
            raise _Malformed
        self._skip()
        return False

    def _key(self) -> str:
        if self._takes(QUOTE):
            return self._until_quote()
        found = KEY.match(self.text, self.at)
        if found is None:
            raise _Malformed
        self.at = found.end()
        return found[0]

    def _until_quote(self) -> str:
        end = self.text.find(QUOTE, self.at)
        if end < 0:
            raise _Malformed
        text, self.at = self.text[self.at : end], end + len(QUOTE)
        return text

    def _scalar(self) -> Any:
        found = SCALAR.match(self.text, self.at)
        if found is None:
            raise _Malformed
        self.at = found.end()
        return None if found[0] == "None" else json.loads(found[0])

    def _takes(self, text: str) -> bool:
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1


class _Rules:
    """Lark rules for values of schemas. Raises SchemaRefused for what cannot be written."""

    def __init__(self) -> None:
        self.rules = [
            f"string: {literal(QUOTE)} string_rest",
            r'string_rest[lazy]: /(.|\n)*<\|"\|>/',
        ]

    def add(self, body: str) -> str:
        """The name of a new rule."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def value(self, schema: Any, root: Mapping[str, Any], place: str, depth: int = 0) -> str:
        """What writes a value of ``schema``, which is at ``place`` in ``root``."""
        schema = _followed(schema, root, place)
        keywords = set(schema) - ANNOTATIONS - ROOT_KEYWORDS
        if depth > DEEPEST:
            raise SchemaRefused(place, "$ref", "goes too deep for this model's calls")
        if "enum" in keywords or "const" in keywords:
            _only(keywords, {"type", "enum", "const"}, place)
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return choice([_written(value, place) for value in values])
        if "anyOf" in keywords:
            _only(keywords, {"anyOf"}, place)
            options = [
                self.value(one, root, f"{place}/anyOf/{n}", depth + 1)
                for n, one in enumerate(schema["anyOf"])
            ]
            return choice(options)
        match schema.get("type"):
            case "string":
                _only(keywords, {"type"}, place)
                return "string"
            case "array":
                _only(keywords, {"type", "items"}, place)
                if "items" not in schema:
                    raise SchemaRefused(place, "items", "is needed in this model's calls")
                item = self.value(schema["items"], root, f"{place}/items", depth + 1)
                return self.add(f'"[" ({item} ("," {item})*)? "]"')
            case "object":
                _only(keywords, {"type", "properties", "required", "additionalProperties"}, place)
                return self._object(schema, root, place, depth)
            case kind if kind in SCALARS:
                return json_rule({key: schema[key] for key in keywords})
        raise SchemaRefused(place, "type", "must be one type in this model's calls")

    def _object(self, schema: Any, root: Mapping[str, Any], place: str, depth: int) -> str:
        properties: Mapping[str, Any] = schema.get("properties", {})
        required = set(schema.get("required", ()))
        if unknown := required - properties.keys():
            raise SchemaRefused(place, "required", f"names {min(unknown)!r}, which has no schema")
        members = []
        # In the order in which the model's template writes them.
        for name in sorted(properties, key=str.lower):
            if KEY.fullmatch(name) is None:
                raise SchemaRefused(place, repr(name), "cannot be a name in this model's calls")
            value = self.value(properties[name], root, f"{place}/properties/{name}", depth + 1)
            members.append((self.add(f"{literal(f'{name}:')} {value}"), name in required))
        return self.add(f'"{{" {self._sequence(members)} "}}"')

    def _sequence(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members with commas between them, those that are not required left out or not."""
        after = '""'
        firsts: list[str] = []
        for name, needed in reversed(members):
            first = f"{name} {after}"
            firsts = [first] if needed else [first, *firsts]
            with_comma = f'("," {name})' + ("" if needed else "?")
            after = self.add(f"{with_comma} {after}")
        if not any(needed for _, needed in members):
            firsts.append('""')
        return choice(firsts)


def _followed(schema: Any, root: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The schema itself, for one that is a reference to it."""
    for _ in range(DEEPEST):
        if not isinstance(schema, Mapping):
            raise SchemaRefused(place, "a boolean", "is no type of this model's calls")
        if "$ref" not in schema:
            return schema
        _only(set(schema) - ANNOTATIONS - ROOT_KEYWORDS, {"$ref"}, place)
        target: Any = root
        for part in schema["$ref"].removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        schema = target
    raise SchemaRefused(place, "$ref", "leads nowhere")


def _only(keywords: set[str], allowed: set[str], place: str) -> None:
    if more := keywords - allowed:
        raise SchemaRefused(place, min(more), "cannot be enforced in this model's calls")


def _written(value: object, place: str) -> str:
    if isinstance(value, str):
        if QUOTE in value:
            raise SchemaRefused(place, "enum", "cannot be written in this model's calls")
        return literal(f"{QUOTE}{value}{QUOTE}")
    if isinstance(value, Mapping | list):
        raise SchemaRefused(place, "enum", "cannot be written in this model's calls")
    return literal(json.dumps(value))
