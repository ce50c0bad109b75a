"""Schemas: what is let through obeys them, and what cannot be enforced is refused."""

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from harness.host.dialect.calls import json_rule
from harness.host.structured.grammars import GrammarRefused, TokenMasks
from harness.host.structured.json_schema import check_schema
from harness.host.structured.schema_tree import SchemaRefused
from reference.model.open import Model
from tests.serve.test_structured import LIKELY, allowed, walk
from tests.tables import table

TABLES = table(__file__, "schemas")

ENFORCED: list[Any] = TABLES["enforced"]


ESCAPED = [
    *(b'{"\\u0061mount": 999999, "amount": 5}', b'"\\u0061mount": 999999', b'"\\u00e9": 3'),
    *(b'"\\u0061": 3', b'"amount": 5, "\\u0061mount": 999999'),
]


"""Keys that mean what a declared key means, spelled otherwise."""


ANNOTATED: list[dict[str, Any]] = [
    {"format": "password"},
    {"format": "int64"},
    {"format": "iri-reference"},
    {"contentMediaType": "application/json", "contentEncoding": "base64", "contentSchema": {}},
    {"x-order": 3, "x-guidance": {"lenient": True}},
    {"nullable": True, "example": "a", "examples": [1], "discriminator": {"propertyName": "a"}},
    {"xml": {"name": "a"}, "externalDocs": {"url": "urn:x"}, "enumNames": ["a"], "foo": {"not": 1}},
    {"title": "T", "default": 3, "readOnly": True, "writeOnly": True, "$comment": "c"},
    {"deprecated": True, "propertyOrdering": ["b", "a"], "markdownDescription": "m"},
    {"uniqueItems": False, "minProperties": 0, "not": False, "additionalItems": True},
    {"unevaluatedProperties": True, "unevaluatedItems": {}, "propertyNames": {}},
    {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    {"default": 0.5, "examples": [Decimal("0.12345678901234567891"), 2**80]},
]


REFUSED: list[Any] = [
    *TABLES["refused"],
    ({"const": Decimal("0.12345678901234567891")}, "", "const"),
]


REFUSED_LATER: list[Any] = [
    {"type": "zork"},
    {"type": "string", "pattern": "(?=a)b"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "integer", "minimum": 3, "maximum": 2},
]


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda s: json.dumps(s)[:60])
def test_whatever_is_allowed_obeys_the_schema(model, grammars, schema):
    """jsonschema, which shares nothing with the grammar, agrees on every text."""
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    ended = 0
    for seed, masks in enumerate(grammars.masks(f"start: {json_rule(schema)}", 30)):
        text = walk(model, masks, seed, ESCAPED)
        if text is not None:
            ended += 1
            judge.validate(json.loads(text))
    assert ended > 5


@pytest.mark.parametrize("annotations", ANNOTATED, ids=str)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 3},
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    ],
    ids=str,
)
def test_annotations_change_nothing(schema, annotations):
    """At the root, in a property and in an item: the grammar is that of the bare schema."""
    noted = {**schema, **annotations}
    assert json_rule(noted) == json_rule(schema)
    for wrap in (
        lambda inner: {"type": "array", "items": inner},
        lambda inner: {"properties": {"format": inner, "x-order": inner}},
        lambda inner: {"$defs": {"title": inner}, "$ref": "#/$defs/title"},
    ):
        assert json_rule({**wrap(noted), **annotations}) == json_rule(wrap(schema))


def test_a_name_of_an_annotation_is_no_annotation_where_it_names_a_property():
    names = ["title", "format", "x-order", "default", "not"]
    schema = {"properties": {name: {"const": name} for name in names}}
    rule = json_rule(schema)
    assert all(f'"{name}": {{"const": "{name}"}}' in rule for name in names)


@pytest.mark.parametrize(
    "draft",
    [
        "https://json-schema.org/draft/2020-12/schema",
        "http://json-schema.org/draft/2020-12/schema#",
        *("https://json-schema.org/draft/2019-09/schema", "http://json-schema.org/schema#"),
        *("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft-07/schema"),
        "http://json-schema.org/draft-06/schema#",
    ],
)
def test_every_draft_that_means_the_same_is_taken(draft):
    schema = {"definitions": {"a": {"type": "integer"}}, "$ref": "#/definitions/a"}
    assert json_rule({"$schema": draft, **schema}) == json_rule(schema)


@pytest.mark.parametrize(("schema", "text", "key"), [
    ({"properties": {"amount": {"maximum": 100}}}, '{"amount": 5, "', "amount"),
    ({"properties": {"amount": {"maximum": 100}}}, '{"', "amount"),
    ({"patternProperties": {"^a": {"type": "null"}}}, '{"', "amount"),
    ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {"const": 1}}, '{"',
     "amount"),
    ({"required": ["amount"]}, '{"', "amount"),
    ({"allOf": [{"properties": {"amount": {"maximum": 100}}}, {"required": ["b"]}]}, '{"',
     "amount"),
], ids=str)  # fmt: skip
def test_a_declared_key_has_one_spelling(model, grammars, schema, text, key):
    """At no character can the key go on with an escape that spells the same."""
    opened = {"type": "object", "additionalProperties": True, **schema}
    (masks,) = grammars.masks(f"start: {json_rule(opened)}", 1)
    for length in range(len(key)):
        spelled = f"{text}{key[:length]}\\".encode()
        tokens = list(spelled[:-1])
        choices = allowed(masks, tokens)
        if spelled[-1] in choices:
            assert ord("u") not in allowed(masks, [*tokens, spelled[-1]])


def test_where_every_key_is_declared_escapes_are_allowed(model, grammars):
    """The control of the one before: texts of a closed object may have any escape."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for closed, expected in ((True, True), (False, False)):
        rule = json_rule({**schema, "additionalProperties": not closed})
        (masks,) = grammars.masks(f"start: {rule}", 1)
        assert (ord("u") in allowed(masks, list(b'{"a": "\\'))) == expected


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("integer", 2**53 - 1, 2**53),
        ("integer", -(2.0**53), 1.0 - 2**53),
        ("integer", 9e15, 9.000000000000001e15),
        ("number", 9007199254740991.0, 9007199254740992.0),
        ("number", 100000000000000.5, 100000000000002.5),
        ("number", 0.1, 0.3),
        ("number", 1e-9, 3e-9),
    ],
)
def test_bounds_are_exact_to_the_last_digit(model, grammars, kind, low, high):
    rule = json_rule({"type": kind, "minimum": low, "maximum": high})
    (masks,) = grammars.masks(f"start: {rule}", 1)
    bounds = [Decimal(repr(bound)) for bound in (low, high)]
    last = Decimal(1) if low % 1 == 0 else Decimal(10) ** min(Decimal(bounds[0]).as_tuple()[2], 0)
    for bound in bounds:
        for steps in range(-2, 3):
            value = bound + steps * last
            text = str(int(value)) if value % 1 == 0 else f"{value:f}"
            assert accepts(model, masks, text) == (bounds[0] <= value <= bounds[1]), text


@pytest.mark.parametrize("step", ["0.01", "0.25", "0.5", "0.15", "0.125", "1.5", "0.0004", "7"])
@pytest.mark.parametrize("bounds", [{}, {"minimum": -1, "maximum": 2.5}], ids=["free", "bound"])
def test_every_multiple_can_be_written_and_no_other_number(model, grammars, step, bounds):
    """Without zeros at its end; with them, no other number either."""
    schema = {"type": ["number", "null"] if bounds else "number", "multipleOf": json.loads(step)}
    (masks,) = grammars.masks(f"start: {json_rule(schema | bounds)}", 1)
    places = -min(int(Decimal(step).as_tuple().exponent), 0)
    rng = random.Random(5)
    for _ in range(60):
        count = rng.randrange(-(10**places), 3 * 10**places)
        if rng.random() < 0.5:
            count -= count % int(Decimal(step).scaleb(places))
        value = Decimal(count).scaleb(-places)
        allowed_value = value % Decimal(step) == 0 and (not bounds or -1 <= value <= Decimal("2.5"))
        shortest = f"{value.normalize():f}" if value else "0"
        assert accepts(model, masks, shortest) == allowed_value, shortest
        assert allowed_value or not accepts(model, masks, f"{value:f}"), value


BESIDE: list[tuple[Any, str, str]] = [
    ({"minimum": -1}, '-0.5 0.5 0.75 2 "a" null', "-1.25 0.3"),
    ({"type": ["number", "string"], "maxLength": 1}, '0.5 -0.5 "a"', '"ab" 0.3'),
    ({"const": 0.5}, "0.5", "0.25 1"),
    ({"enum": [0.25, 0.5, 0.3, 2, "a"]}, '0.25 0.5 2 "a"', '0.3 0.75 "b"'),
    ({"type": "number", "anyOf": [{"minimum": 1}, {"maximum": -0.5}]}, "-0.5 1.5 -2", "0.5 1.1"),
    ({"anyOf": [{"minimum": 1}, {"maximum": 0}], "allOf": [{"maximum": 2}]}, "-0.5 1.5", "2.5 .5"),
    ({"type": "integer"}, "-1 0 2", "0.5 1.5"),
    ({"allOf": [{"multipleOf": 0.1}], "type": "number"}, "0.5 -1.5 2", "0.25 0.1"),
    ({"$defs": {"a": {"maximum": 1}}, "$ref": "#/$defs/a"}, "0.5 -1.5 true", "1.5 0.3"),
]


@pytest.mark.parametrize(("beside", "can", "cannot"), BESIDE, ids=str)
def test_every_multiple_can_be_written_beside_other_keywords(model, grammars, beside, can, cannot):
    (masks,) = grammars.masks(f"start: {json_rule({**beside, 'multipleOf': 0.25})}", 1)
    for texts, expected in ((can, True), (cannot, False)):
        for text in texts.split():
            assert accepts(model, masks, text) == expected, text


def accepts(model: Model, masks: TokenMasks, text: str) -> bool:
    """Whether a text may be the whole answer, token by token."""
    tokens = list(text.encode())
    follows = all(token in allowed(masks, tokens[:n]) for n, token in enumerate(tokens))
    return follows and not model.tokenizer.eog_ids.isdisjoint(allowed(masks, tokens))


def test_without_masks_nothing_obeys(model):
    """The negative control: random tokens are no JSON."""
    rng = random.Random(0)
    for _ in range(20):
        text = model.tokenizer.decode_bytes(rng.choices(sorted(LIKELY), k=12))
        with pytest.raises((ValueError, jsonschema.ValidationError)):
            jsonschema.validate(json.loads(text), {"type": "object", "required": ["a"]})


@pytest.mark.parametrize(("schema", "pointer", "keyword"), REFUSED, ids=str)
def test_a_schema_that_cannot_be_enforced_is_refused(schema, pointer, keyword):
    with pytest.raises(SchemaRefused) as refused:
        check_schema(schema)
    assert (refused.value.pointer, refused.value.keyword) == (pointer, keyword)
    assert keyword in str(refused.value)


@pytest.mark.parametrize("schema", REFUSED_LATER, ids=json.dumps)
def test_what_only_the_compiler_knows_is_refused_too(grammars, schema):
    with pytest.raises(GrammarRefused, match="cannot be enforced"):
        grammars.masks(f"start: {json_rule(schema)}", 1)
