"""Which JSON schemas can be enforced to the letter. Whatever cannot is refused, never weakened.

llguidance makes a grammar of a schema, and refuses many keywords it does not have; others it takes
and forgets. So every keyword at every place has to be one that is known to be enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any] | bool
MOST_SUBSCHEMAS = 10_000
BLANKS = r"\n[ \t]{0,40}|[ \t]{1,40}"
"""What may stand between the parts of a JSON value: indentation, but nothing without end."""

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
) | {"$comment"}
"""Keywords that ask for nothing."""
VALUES = frozenset(
    (
        *("type", "enum", "const", "required", "minItems", "maxItems", "minLength", "maxLength"),
        *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        "multipleOf",
    )
)
"""Keywords without schemas in them. ``minProperties`` and ``maxProperties`` are missing: a grammar
cannot tell whether a key came before."""
SCHEMA = frozenset(("items", "additionalProperties"))
LIST_OF_SCHEMAS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
SCHEMA_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
ROOT_ONLY = frozenset(("$schema", "$id"))
DIALECTS = (
    "https://json-schema.org/draft/2020-12/schema",
    "http://json-schema.org/draft-07/schema",
)
LOCAL_REFERENCES = ("#/$defs/", "#/definitions/")


@dataclass(eq=False)
class SchemaRefused(Exception):
    """A schema that cannot be enforced: ``keyword`` at ``pointer``, a JSON pointer, is why."""

    pointer: str
    keyword: str
    problem: str

    def __str__(self) -> str:
        place = self.pointer or "its root"
        return f"{self.keyword} at {place} {self.problem}"


def check_schema(schema: object) -> None:
    """Raise SchemaRefused for a schema that is malformed or has a keyword that is not enforced."""
    seen = 0
    for pointer, part in subschemas(schema):
        seen += 1
        if seen > MOST_SUBSCHEMAS:
            raise SchemaRefused("", "the schema", f"has more than {MOST_SUBSCHEMAS} parts")
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise SchemaRefused(pointer, "the value", "is no schema: neither object nor boolean")
        for keyword, value in part.items():
            _check_keyword(pointer, keyword, value)
    if _drops_quotes(schema) and (place := _quoted_text(schema)) is not None:
        raise SchemaRefused(
            place, 'the text with "', "cannot be enforced beside a pattern with [^...]"
        )


def compile_options(schema: object) -> dict[str, Any]:
    """llguidance's options for a schema that ``check_schema`` let pass.

    Under a negated class of a pattern it would let an escaped quotation mark pass, whether the
    class excludes it or not; so the strings of such a schema have none at all.
    """
    options: dict[str, Any] = {
        "whitespace_pattern": BLANKS,
        "lenient": False,
        "coerce_one_of": False,
    }
    if _drops_quotes(schema):
        options["json_allowed_escapes"] = "nrbtf\\u"
    return options


def subschemas(schema: object, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """``schema`` and every schema in it, with its JSON pointer. What is malformed is given as it
    is."""
    open_parts: list[tuple[str, Any]] = [(pointer, schema)]
    while open_parts:
        place, part = open_parts.pop()
        yield place, part
        if not isinstance(part, Mapping):
            continue
        for keyword, value in part.items():
            below = f"{place}/{_escaped(keyword)}"
            if keyword in SCHEMA:
                open_parts.append((below, value))
            elif keyword in LIST_OF_SCHEMAS and isinstance(value, list):
                open_parts.extend((f"{below}/{n}", one) for n, one in enumerate(value))
            elif keyword in SCHEMA_BY_NAME and isinstance(value, Mapping):
                open_parts.extend((f"{below}/{_escaped(n)}", one) for n, one in value.items())


def _check_keyword(pointer: str, keyword: str, value: object) -> None:
    def refuse(problem: str) -> SchemaRefused:
        return SchemaRefused(pointer, keyword, problem)

    if keyword in ANNOTATIONS or keyword in SCHEMA or keyword in VALUES:
        check = SHAPES.get(keyword)
        if check is not None and not check(value):
            raise refuse("has a value it cannot have")
    elif keyword in LIST_OF_SCHEMAS:
        if not isinstance(value, list) or not value:
            raise refuse("is no list of schemas")
    elif keyword in SCHEMA_BY_NAME:
        if not isinstance(value, Mapping):
            raise refuse("is no object of schemas")
    elif keyword in ROOT_ONLY:
        if pointer:
            raise refuse("is taken at the root only")
        if keyword == "$schema" and str(value).rstrip("#") not in DIALECTS:
            raise refuse(f"is not one of {', '.join(DIALECTS)}")
    elif keyword == "$ref":
        local = isinstance(value, str) and (value == "#" or value.startswith(LOCAL_REFERENCES))
        if not local:
            raise refuse("must be # or lead into $defs or definitions of the same schema")
    else:
        raise refuse("cannot be enforced here")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_types(value: object) -> bool:
    return isinstance(value, str) or (_is_texts(value) and bool(value))


SHAPES: dict[str, Callable[[object], bool]] = {
    "type": _is_types,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "required": _is_texts,
    "pattern": _is_text,
    "format": _is_text,
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _is_count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    "multipleOf": lambda value: _is_number(value) and value > 0,  # type: ignore[operator]
}
"""What the value of a keyword must be, where llguidance would take something else."""


def _drops_quotes(schema: object) -> bool:
    for _, part in subschemas(schema):
        if isinstance(part, Mapping):
            patterns = [part.get("pattern"), *_keys(part.get("patternProperties"))]
            if any(isinstance(pattern, str) and "[^" in pattern for pattern in patterns):
                return True
    return False


def _quoted_text(schema: object) -> str | None:
    """Where a schema asks for a text with a quotation mark in it."""
    for pointer, part in subschemas(schema):
        if isinstance(part, Mapping):
            requested = [part.get("const"), part.get("enum"), part.get("required")]
            if any(map(_has_quote, [*requested, *_keys(part.get("properties"))])):
                return pointer
    return None


def _has_quote(value: object) -> bool:
    if isinstance(value, str):
        return '"' in value
    if isinstance(value, Mapping):
        return any(map(_has_quote, (*value, *value.values())))
    return isinstance(value, list) and any(map(_has_quote, value))


def _keys(value: object) -> list[str]:
    return list(value) if isinstance(value, Mapping) else []


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
