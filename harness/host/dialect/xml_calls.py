"""Calls of Qwen3-Coder, Qwen3.5 and Seed-OSS: XML-like tags with values as plain text. A value is
plain text if the parameter may be a string, else JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.host.dialect.calls import (
    Call,
    CallSyntax,
    Function,
    Functions,
    Marks,
    choice,
    in_regex,
    json_rule,
    literal,
    object_text,
    strict_loads,
)
from harness.host.dialect.schemas import OBJECT_KEYWORDS, keywords_of, members_of, only, resolved
from harness.host.dialect.xml_text import CLOSE, name_called, read_tags
from harness.host.structured.json_schema import enforceable
from harness.host.structured.schema_tree import SchemaRefused

CALL = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.S)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.S)
LONGEST_HEAD = 256
"""Most characters of a call's first tag."""
PARAMETER_NAME = re.compile(r"[^<>\s\x00-\x1f]([^<>\n\x00-\x1f]{0,126}[^<>\s\x00-\x1f])?")
PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""Words that these models' template writes for JSON's true, false and null."""


@dataclass(frozen=True)
class TagForm:
    """How a grammar writes a call. ``head`` and ``opening`` are formats for the names of the
    function and of a parameter. A value is followed by ``before``, ``close`` and ``after``."""

    head: str
    opening: str
    before: str
    close: str
    after: str
    end: str

    def trimmed(self, text: str) -> str:
        """The text between tags without the newlines that belong to the tags."""
        return text.removeprefix(self.before).removesuffix(self.before)


FORM = TagForm("<function={}>\n", "<parameter={}>\n", "\n", "</parameter>", "\n", CLOSE)


@dataclass(frozen=True)
class XmlCalls(CallSyntax):
    """``<function=name><parameter=key>value</parameter></function>``."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    form: TagForm = FORM

    separator = "\n"

    @property
    def begins_each_call(self) -> bool:
        return True

    @property
    def bare_marks(self) -> tuple[str, str]:
        return ("<function=", CLOSE)

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        call = self._read(body, functions)
        return [call] if isinstance(call, Call) else None

    def call_boundaries(self, body: str) -> Iterator[tuple[int, int]]:
        for found in re.finditer(rf"{re.escape(self.begin)}|<function=", body):
            yield found.start(), found.start() if found[0] == self.bare_marks[0] else found.end()

    def repair(self, body: str, functions: Functions) -> tuple[list[Call], str] | None:
        ends = [found.start() for found in re.finditer(re.escape(self.end), body)]
        for end in (*ends, len(body)):
            call = self._read(body[:end], functions, cut=True)
            if isinstance(call, Call):
                return [call], body[end:].removeprefix(self.end)
        return None

    def cannot_become_call(self, body: str, functions: Functions) -> bool:
        name = name_called(body)
        if name is not None:
            return name not in functions
        return "\n" in body.lstrip() or ">" in body or len(body) > LONGEST_HEAD

    def parse_exactly(self, body: str, functions: Functions) -> list[Call] | None:
        found = CALL.fullmatch(body)
        if found is None or found[1] not in functions:
            return None
        function = functions[found[1]]
        arguments: dict[str, Any] = {}
        at, inner = 0, found[2]
        while (parameter := PARAMETER.match(inner, at)) is not None:
            name, text = parameter[1], parameter[2]
            if name in arguments:
                return None
            arguments[name] = value_of(self.form.trimmed(text), function, name)
            at = parameter.end()
        if inner[at:].strip():
            return None
        written = object_text(arguments)
        return None if written is None else [Call(function.name, written)]

    def inside_value(self, body: str, functions: Functions, exact: bool = False) -> bool:
        if exact:
            return body.rfind("<parameter=") > body.rfind("</parameter>")
        return self._read(body, functions) is True

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        rules = []
        for n, function in enumerate(functions):
            rules.extend(call_rules(function, f"call_{n}", self.form))
        names = choice([f"call_{n}" for n in range(len(functions))])
        return [f'calls: "\\n" {names} "\\n" {marks.written(self.end)}', *rules]

    def _read(self, body: str, functions: Functions, cut: bool = False) -> Call | bool:
        """The call in a body; see ``read_tags``."""
        function = functions.get(name_called(body) or "")
        if function is None:
            return False
        properties = function.parameters.get("properties")
        declared = properties.keys() if isinstance(properties, Mapping) and properties else None
        found = read_tags(body, declared, cut)
        if isinstance(found, bool):
            return found
        arguments = {
            name: value_of(self.form.trimmed(text), function, name)
            for name, text in found.parameters.items()
        }
        written = object_text(arguments)
        return written is not None and Call(function.name, written)


SEED_CALLS = XmlCalls(
    "<seed:tool_call>",
    "</seed:tool_call>",
    TagForm("<function={}>\n", "<parameter={}>", "", "</parameter>", "\n", CLOSE),
)
"""Calls of Seed-OSS, whose values have no newlines around them."""


def call_rules(function: Function, rule: str, form: TagForm) -> list[str]:
    """Lark rules of a call; the first is named ``rule``. Raises SchemaRefused for parameters that
    cannot be enforced."""
    schema = enforceable(function.parameters)
    only(keywords_of(schema), OBJECT_KEYWORDS, "")
    if schema.get("type", "object") != "object":
        raise SchemaRefused("", "type", "of parameters must be object")
    parts, rules = [], []
    for n, (name, value, needed) in enumerate(members_of(schema, "")):
        if PARAMETER_NAME.fullmatch(name) is None:
            raise SchemaRefused(
                "/properties", repr(name), "cannot be written in this model's calls"
            )
        parts.append(f"{rule}_{n}" + ("" if needed else "?"))
        opening = form.opening.format(name)
        rules += _value_rules(f"{rule}_{n}", opening, form, value, schema, f"/properties/{name}")
    words = (
        literal(form.head.format(function.name)),
        *parts,
        *map(literal, [form.end] * bool(form.end)),
    )
    return [f"{rule}: {' '.join(words)}", *rules]


def _value_rules(
    rule: str, opening: str, form: TagForm, schema: Any, root: Mapping[str, Any], pointer: str
) -> list[str]:
    """The rules of a parameter with its tags."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    texts: list[str] = []
    values: list[str] = []
    free = typed = False
    for option in _options(resolved(schema, root), root):
        keywords = keywords_of(option)
        if not _may_be_string(option, root):
            values.append(json_rule({**definitions, **option}))
            typed = typed or keywords != {"type"}
        elif keywords <= {"type"}:
            free = True
        elif keywords <= {"type", "enum", "const"} and option.get("type", "string") == "string":
            texts.extend([option["const"]] if "const" in option else option["enum"])
        else:
            keyword = min(keywords - {"type"})
            raise SchemaRefused(pointer, keyword, "cannot be enforced in this model's calls")
    if (free and (typed or texts)) or not all(_is_plain(text, form.close) for text in texts):
        raise SchemaRefused(pointer, "a choice", "is ambiguous in this model's calls")
    if free:
        after = f" {literal(form.after)}" if form.after else ""
        text = rf"/(.|\n)*{in_regex(form.close)}/"
        return [f"{rule}: {literal(opening)} {rule}_text{after}", f"{rule}_text[lazy]: {text}"]
    either = choice([*map(literal, texts), *values])
    closing = literal(form.before + form.close + form.after)
    return [f"{rule}: {literal(opening)} {either} {closing}"]


def _options(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The alternative schemas of a value."""
    if not isinstance(schema, Mapping):
        return [{}] if schema else []
    if keywords_of(schema) == {"anyOf"}:
        return [one for option in schema["anyOf"] for one in _options(resolved(option, root), root)]
    kinds = schema.get("type")
    if isinstance(kinds, list) and "enum" not in schema and "const" not in schema:
        return [{**schema, "type": kind} for kind in kinds]
    return [dict(schema)]


def _is_plain(text: object, close: str) -> bool:
    """Whether a text can stand before the tag ``close`` without being read as anything else."""
    if not isinstance(text, str) or close in text or text != text.strip("\n"):
        return False
    try:
        strict_loads(text)
    except ValueError:
        return True
    return False


def value_of(text: str, function: Function, name: str) -> Any:
    """The value of the parameter ``name`` that is written as ``text``."""
    root = function.parameters
    meant = resolved(_schema_of(function, name), root)
    try:
        value = PYTHON_WORDS[text] if text in PYTHON_WORDS else strict_loads(text)
    except (ValueError, RecursionError):
        return text
    if not _may_be_string(meant, root):
        return value
    return value if _allows_json(meant, value, root) else text


def _schema_of(function: Function, name: str) -> Any:
    properties = function.parameters.get("properties")
    return properties.get(name, True) if isinstance(properties, Mapping) else True


def _may_be_string(schema: Any, root: Mapping[str, Any]) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    if "const" in schema:
        return isinstance(schema["const"], str)
    if isinstance(schema.get("enum"), list):
        return any(isinstance(value, str) for value in schema["enum"])
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return any(_may_be_string(resolved(option, root), root) for option in options)
    return True


def _allows_json(schema: Any, value: Any, root: Mapping[str, Any]) -> bool:
    """Whether ``value``, parsed from text that may also be a string, matches the schema's types."""
    if isinstance(value, str):
        return False
    if not isinstance(schema, Mapping):
        return True
    if isinstance(schema.get("enum"), list):
        return value in schema["enum"]
    kinds = schema.get("type")
    if kinds is not None:
        return _type_of(value) & set([kinds] if isinstance(kinds, str) else kinds) != set()
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return any(_allows_json(resolved(option, root), value, root) for option in options)
    return True


def _type_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case list():
            return {"array"}
    return {"object"}
