"""Accepts JSON schemas that can be enforced exactly, and refuses all others.

llguidance makes a grammar from a schema. It refuses many unsupported keywords, but silently ignores
others. So every keyword that constrains a value must be known to be enforced. All other keywords
are annotations, which are removed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from math import gcd
from typing import Any

from harness.host.structured.regex_runs import LONGEST_COUNTED, MOST_FORCED, longest_run
from harness.host.structured.schema_tree import (
    LIST_OF_SCHEMAS,
    SCHEMA,
    SCHEMA_BY_NAME,
    SchemaRefused,
    names_of_reference,
    pointer_of,
    subschemas,
    with_children,
)

MAX_SUBSCHEMAS = 10_000
LARGEST_NUMBER = 2**53
"""The grammar's numbers are binary64, which does not have every integer above this."""
MAX_DECIMALS = 22
"""The grammar's reader computes a decimal from an integer and a power of ten. The result is
correctly rounded if binary64 has both: an integer up to LARGEST_NUMBER, and 10^22."""
BLANKS = r"\n[ \t]{0,40}| "
"""White space between the parts of a JSON value: indentation of limited length, or one space. A
weak model that may write more does so for many tokens."""

VALUES = frozenset(
    (
        *("type", "enum", "const", "required", "minItems", "maxItems", "minLength", "maxLength"),
        *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        "multipleOf",
    )
)
"""Keywords whose values contain no schemas."""
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
ROOT_ONLY = frozenset(("$schema", "$id"))
NOT_ENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
        *("additionalItems", "propertyNames", "unevaluatedProperties"),
        # A grammar cannot tell whether a key came before.
        *("minProperties", "maxProperties"),
        *("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"),
        *("$vocabulary", "id", "extends", "disallow", "divisibleBy"),
    )
)
"""Keywords of any draft that constrain a value but cannot be enforced. A keyword that is in no
draft is an annotation, as the specification says."""
FORMATS = frozenset(
    (*("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"), "uri")
)
"""Formats that are enforced. Any other format is an annotation, as the specification says."""
DIALECT = re.compile(r"https?://json-schema\.org/((draft/20(20-12|19-09)/)?|draft-0[67]/)schema#?")
"""Drafts that a schema may name. The enforced keywords mean the same in each."""
ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "propertyNames"), (True, {})),
    **dict.fromkeys(("dependentSchemas", "dependentRequired", "dependencies"), ({},)),
    "additionalItems": (True, {}),
    "minProperties": (0,),
    "not": (False,),
    "uniqueItems": (False,),
}
"""Values of keywords that are not enforced with which they constrain nothing."""
ENFORCED = VALUES | SCHEMA | LIST_OF_SCHEMAS | SCHEMA_BY_NAME | ROOT_ONLY | {"$ref"}
PLAIN_REFERENCE = re.compile(r"#/(\$defs|definitions)/[a-zA-Z0-9_.-]+")
"""References that every reader resolves alike."""
ESCAPES = 'nrbtf\\"u'
"""Letters that may follow a backslash in a JSON text the model writes."""


def check_schema(schema: object) -> None:
    """Raise SchemaRefused for a schema that is malformed or cannot be enforced."""
    parts: dict[str, Any] = {}
    for pointer, part in subschemas(schema):
        parts[pointer] = part
        if len(parts) > MAX_SUBSCHEMAS:
            raise SchemaRefused("", "the schema", f"has more than {MAX_SUBSCHEMAS} parts")
        if not isinstance(part, Mapping | bool):
            raise SchemaRefused(pointer, "the value", "is no schema: neither object nor boolean")
    for pointer, part in parts.items():
        for keyword, value in part.items() if isinstance(part, Mapping) else ():
            _check_keyword(pointer, keyword, value, parts)
    _check_patterns(parts)
    _check_texts(schema)


def enforceable(schema: Any) -> Any:
    """``schema`` without annotations, with all references into ``$defs`` or ``definitions``, as the
    grammar is made from it. Raises SchemaRefused."""
    check_schema(schema)
    if not isinstance(schema, Mapping):
        return schema
    targets: dict[str, str] = {}
    taken = set(schema.get("$defs", ()))
    for _, part in subschemas(schema):
        if isinstance(part, Mapping) and not PLAIN_REFERENCE.fullmatch(
            part.get("$ref", "#/$defs/a")
        ):
            pointer = pointer_of("", *(names_of_reference(part["$ref"]) or []))
            if pointer not in targets:
                targets[pointer] = _free_name(taken)
    moved: dict[str, Any] = {}
    whole = _without_annotations(schema, "", targets, moved)
    if "" in targets:
        definitions = ("$defs", "definitions", "$schema", "$id")
        moved[targets[""]] = {key: whole[key] for key in whole if key not in definitions}
    return {**whole, "$defs": {**whole.get("$defs", {}), **moved}} if moved else whole


def compile_options(schema: object) -> dict[str, Any]:
    """llguidance's options for a checked schema."""
    options: dict[str, Any] = {
        "whitespace_pattern": BLANKS,
        "lenient": False,
        "coerce_one_of": False,
    }
    escapes = _escapes_of(schema)
    if escapes != ESCAPES:
        options["json_allowed_escapes"] = escapes
    return options


def _free_name(taken: set[str]) -> str:
    name = next(name for n in range(len(taken) + 1) if (name := f"part_{n}") not in taken)
    taken.add(name)
    return name


def _without_annotations(
    part: Any, pointer: str, targets: Mapping[str, str], moved: dict[str, Any]
) -> Any:
    """A copy of ``part`` without annotations. Targets of references move to ``moved``, by their
    names."""
    if not isinstance(part, Mapping):
        copy: Any = part
    else:
        copy = {}
        for keyword, value in part.items():
            if keyword not in ENFORCED or (keyword == "format" and value not in FORMATS):
                continue
            if keyword == "$schema":
                continue
            if keyword == "$ref":
                reference = pointer_of("", *(names_of_reference(value) or []))
                name = targets.get(reference)
                value = value if name is None else f"#/$defs/{name}"
            if keyword in VALUES:
                value = _with_integers(value)
            copy[keyword] = with_children(
                pointer,
                keyword,
                value,
                lambda at, one: _without_annotations(one, at, targets, moved),
            )
        copy = _with_short_spellings(copy)
    if pointer and pointer in targets:
        moved[targets[pointer]] = copy
        return {"$ref": f"#/$defs/{targets[pointer]}"}
    return copy


def _check_keyword(pointer: str, keyword: str, value: object, parts: Mapping[str, Any]) -> None:
    def refuse(problem: str) -> SchemaRefused:
        return SchemaRefused(pointer, keyword, problem)

    check = SHAPES.get(keyword)
    if check is not None and not check(value):
        raise refuse("has a value it cannot have")
    if keyword in VALUES and (_has_inexact_number(value) or _is_open_end(keyword, value)):
        raise refuse(
            f"has a number beyond {LARGEST_NUMBER} or of too many digits, which cannot be "
            "enforced exactly"
        )
    if keyword in LIST_OF_SCHEMAS and not (isinstance(value, list) and value):
        raise refuse("is no list of schemas")
    if keyword in SCHEMA_BY_NAME and not isinstance(value, Mapping):
        raise refuse("is no object of schemas")
    if keyword in ROOT_ONLY and pointer:
        raise refuse("is taken at the root only")
    if keyword == "$schema" and DIALECT.fullmatch(str(value)) is None:
        raise refuse("is no draft from 6 on")
    if keyword == "$ref":
        names = names_of_reference(value)
        if names is None:
            raise refuse("must lead into the same schema, by a JSON pointer behind #")
        if pointer_of("", *names) not in parts:
            raise refuse("leads to no schema")
    if keyword in NOT_ENFORCED and not any(
        type(value) is type(one) and value == one for one in ASKS_NOTHING.get(keyword, ())
    ):
        raise refuse("cannot be enforced here")


def _check_patterns(parts: Mapping[str, Any]) -> None:
    """Raise SchemaRefused for a pattern that repeats literals too often. Patterns that would take
    long to read are left to the compiler."""
    patterns: list[tuple[str, str, str]] = []
    for pointer, part in parts.items():
        if isinstance(part, Mapping):
            named = _keys(part.get("patternProperties"))
            patterns += [(pointer, "patternProperties", pattern) for pattern in named]
            if "pattern" in part:
                patterns.append((pointer, "pattern", part["pattern"]))
    if sum(len(pattern) for *_, pattern in patterns) > LONGEST_COUNTED:
        return
    for pointer, keyword, pattern in patterns:
        if longest_run(pattern) > MOST_FORCED:
            problem = f"forces a text of more than {MOST_FORCED:,} characters"
            raise SchemaRefused(pointer, keyword, problem)


def _has_inexact_number(value: object) -> bool:
    """Whether ``value`` contains a number that binary64 or the grammar's reader would change."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return abs(value) > LARGEST_NUMBER or (value % 1 != 0 and _is_misread(value))
    if isinstance(value, Mapping):
        return any(map(_has_inexact_number, value.values()))
    return isinstance(value, Decimal) or (
        isinstance(value, list) and any(map(_has_inexact_number, value))
    )


def _is_misread(value: float) -> bool:
    """Whether the grammar's reader may round a decimal to another number."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    return int("".join(map(str, digits))) > LARGEST_NUMBER or -exponent > MAX_DECIMALS


def _with_integers(value: Any) -> Any:
    """``value`` with integral floats as integers."""
    if isinstance(value, float) and value % 1 == 0:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _with_integers(one) for key, one in value.items()}
    return [_with_integers(one) for one in value] if isinstance(value, list) else value


def _with_short_spellings(part: dict[str, Any]) -> dict[str, Any]:
    """A schema that also accepts multiples without trailing zeros. llguidance's grammar for
    multiples of 0.25 may accept only 0.50, and only if bounds or an ``enum`` allow to write the
    zero."""
    step = part.get("multipleOf")
    if type(step) is not float:
        return part
    _, digits, exponent = Decimal(repr(step)).normalize().as_tuple()
    assert isinstance(exponent, int)
    # With ``left`` decimals omitted: the multiples of ``whole`` that end in as many zeros.
    whole = int("".join(map(str, digits)))
    steps = {
        whole // gcd(whole, 10**left): -exponent - left for left in range(-exponent - 1, -1, -1)
    }
    if len(steps) == 1:
        return part
    chosen = [float(Decimal(number).scaleb(-decimals)) for number, decimals in steps.items()]
    choice = {"anyOf": [{"multipleOf": one} for one in chosen]}
    rest = {keyword: value for keyword, value in part.items() if keyword != "multipleOf"}
    return {**rest, "allOf": [*rest.get("allOf", ()), choice]} if "anyOf" in rest else rest | choice


def _is_open_end(keyword: str, value: object) -> bool:
    """Whether the first integer allowed by an exclusive bound is beyond LARGEST_NUMBER."""
    bound = {"exclusiveMinimum": LARGEST_NUMBER, "exclusiveMaximum": -LARGEST_NUMBER}
    return value == bound.get(keyword)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float, Decimal)


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
"""Checks of keyword values that llguidance does not make."""


def _escapes_of(schema: object) -> str:
    """The escapes that strings under a schema may contain.

    Under a negated class of a pattern llguidance would accept an escaped quotation mark even if the
    class excludes it. In an object with undeclared keys, an escaped spelling of a declared key
    would pass as another key."""
    dropped = ""
    for _, part in subschemas(schema):
        if not isinstance(part, Mapping):
            continue
        by_pattern = _keys(part.get("patternProperties"))
        patterns = [part.get("pattern"), *by_pattern]
        if any(isinstance(pattern, str) and "[^" in pattern for pattern in patterns):
            dropped += '"'
        declared = part.get("properties") or part.get("required")
        if by_pattern or (declared and part.get("additionalProperties") is not False):
            dropped += "u"
    return "".join(letter for letter in ESCAPES if letter not in dropped)


def _check_texts(schema: object) -> None:
    """Raise SchemaRefused for a required text that needs a forbidden escape."""
    escapes = _escapes_of(schema)
    needs_escape = "".join(
        characters
        for letter, characters in (('"', '"'), ("u", r"\x00-\x07\x0b\x0e-\x1f\x7f"))
        if letter not in escapes
    )
    if not needs_escape:
        return
    unwritable = re.compile(f"[{needs_escape}]")
    for pointer, part in subschemas(schema):
        if isinstance(part, Mapping):
            demanded = [part.get("const"), part.get("enum"), part.get("required")]
            for text in _texts_in([*demanded, *_keys(part.get("properties"))]):
                found = unwritable.search(text)
                if found is not None:
                    other = "a pattern with [^...]" if found[0] == '"' else "keys that are open"
                    problem = f"cannot be enforced beside {other}"
                    raise SchemaRefused(pointer, f"the text with {_shown(found[0])}", problem)


def _shown(character: str) -> str:
    return character if character.isprintable() else f"\\u{ord(character):04x}"


def _texts_in(value: object) -> list[str]:
    """Every text in a JSON value, including keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for one in (*value, *value.values()) for text in _texts_in(one)]
    return [text for one in value for text in _texts_in(one)] if isinstance(value, list) else []


def _keys(value: object) -> list[str]:
    return list(value) if isinstance(value, Mapping) else []
