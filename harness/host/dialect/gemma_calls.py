"""Calls as Gemma 4 and FunctionGemma write them: ``call:name{key:<|"|>text<|"|>,count:3}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.host.dialect import calls
from harness.host.dialect.schemas import OBJECT_KEYWORDS, keywords_of, members_of, only, resolved
from harness.host.dialect.value_reader import DEEPEST, KEY, Malformed, ValueReader, sequence
from harness.host.structured.json_schema import enforceable
from harness.host.structured.schema_tree import SchemaRefused

NAME = re.compile(r"\s*call:([a-zA-Z0-9_.-]+)(?=\{)")
COMMA = '","'
SCALARS = frozenset(("integer", "number", "boolean", "null"))


@dataclass(frozen=True)
class GemmaCalls(calls.CallSyntax):
    """Objects with keys without quotes, and strings between special ``quote`` tokens."""

    begin: str = "<|tool_call>"
    end: str = "<tool_call|>"
    quote: str = '<|"|>'

    @property
    def begins_each_call(self) -> bool:
        return True

    @property
    def inner_marks(self) -> tuple[str, ...]:
        return (self.quote,)

    def parse(self, body: str, functions: calls.Functions) -> list[calls.Call] | None:
        found = NAME.match(body)
        if found is None or found[1] not in functions:
            return None
        reader = _GemmaReader(body, found.end(), self.quote)
        try:
            arguments = reader.value()
        except Malformed:
            return None
        text = calls.object_text(arguments)
        return None if body[reader.at :].strip() or text is None else [calls.Call(found[1], text)]

    def inside_value(self, body: str, functions: calls.Functions, exact: bool = False) -> bool:
        return body.count(self.quote) % 2 == 1

    def rules(
        self, functions: Sequence[calls.Function], many: bool, marks: calls.Marks
    ) -> list[str]:
        writer = _Rules(self.quote, marks)
        names = []
        for function in functions:
            parameters = enforceable(function.parameters)
            value = writer.value({"type": "object", **parameters}, parameters, "")
            names.append(writer.add(f"{calls.literal(f'call:{function.name}')} {value}"))
        return [f"calls: {calls.choice(names)} {marks.written(self.end)}", *writer.rules]


FUNCTION_GEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")


@dataclass(slots=True)
class _GemmaReader(ValueReader):
    """Reads values whose strings, and possibly keys, are in quotes."""

    quote: str

    def string(self) -> str | None:
        return self._until_quote() if self.takes(self.quote) else None

    def key(self) -> str:
        return self._until_quote() if self.takes(self.quote) else self.word(KEY)

    def _until_quote(self) -> str:
        end = self.text.find(self.quote, self.at)
        if end < 0:
            raise Malformed
        text, self.at = self.text[self.at : end], end + len(self.quote)
        return text


class _Rules:
    """Lark rules for values of schemas. Raises SchemaRefused for unsupported schemas."""

    def __init__(self, quote: str, marks: calls.Marks) -> None:
        self._quote, self._marks = quote, marks
        self.rules = [
            f"string: {marks.written(quote)} string_rest",
            marks.text_up_to(quote, "string_rest"),
        ]

    def add(self, body: str) -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def value(self, schema: Any, root: Mapping[str, Any], path: str, depth: int = 0) -> str:
        """The Lark expression for a value of ``schema``, which is at ``path`` in ``root``."""
        schema = resolved(schema, root)
        if not isinstance(schema, Mapping):
            raise SchemaRefused(path, "a boolean", "is no type of this model's calls")
        keywords = keywords_of(schema)
        if depth > DEEPEST:
            raise SchemaRefused(path, "$ref", "goes too deep for this model's calls")
        if "enum" in keywords or "const" in keywords:
            only(keywords, {"type", "enum", "const"}, path)
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return calls.choice([self._constant(value, path) for value in values])
        if "anyOf" in keywords:
            only(keywords, {"anyOf"}, path)
            options = [
                self.value(one, root, f"{path}/anyOf/{n}", depth + 1)
                for n, one in enumerate(schema["anyOf"])
            ]
            return calls.choice(options)
        match schema.get("type"):
            case "string":
                only(keywords, {"type"}, path)
                return "string"
            case "array":
                only(keywords, {"type", "items"}, path)
                if "items" not in schema:
                    raise SchemaRefused(path, "items", "is needed in this model's calls")
                item = self.value(schema["items"], root, f"{path}/items", depth + 1)
                return self.add(f'"[" ({item} ("," {item})*)? "]"')
            case "object":
                only(keywords, OBJECT_KEYWORDS, path)
                return self._object(schema, root, path, depth)
            case kind if kind in SCALARS:
                return calls.json_rule({key: schema[key] for key in keywords})
        raise SchemaRefused(path, "type", "must be one type in this model's calls")

    def _object(self, schema: Any, root: Mapping[str, Any], path: str, depth: int) -> str:
        members = []
        # The model's template sorts members like this.
        for name, member, needed in sorted(members_of(schema, path), key=lambda m: m[0].lower()):
            if KEY.fullmatch(name) is None:
                raise SchemaRefused(path, repr(name), "cannot be a name in this model's calls")
            value = self.value(member, root, f"{path}/properties/{name}", depth + 1)
            members.append((self.add(f"{calls.literal(f'{name}:')} {value}"), needed))
        return self.add(f'"{{" {sequence(members, COMMA, self.add)} "}}"')

    def _constant(self, value: object, path: str) -> str:
        """The Lark expression for a constant."""
        if isinstance(value, str) and self._quote not in value:
            quote = self._marks.written(self._quote)
            return f"({quote} {calls.literal(value)} {quote})"
        if isinstance(value, str | Mapping | list):
            raise SchemaRefused(path, "enum", "cannot be written in this model's calls")
        return calls.literal(json.dumps(value))
