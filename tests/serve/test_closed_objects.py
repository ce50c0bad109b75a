"""Objects whose schema does not say whether other keys are allowed have none."""

import itertools
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.host.dialect.calls import json_rule
from harness.host.structured.closed_objects import with_closed_objects
from harness.host.structured.json_schema import enforceable
from tests.serve.test_structured import allowed

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "null"}}}


def tagged(tag: str, **more: Any) -> dict[str, Any]:
    properties = {"kind": {"const": tag}, **more}
    return {"type": "object", "properties": properties, "required": ["kind"]}


TOLD_APART = {
    "by a tag": [tagged("a", **A["properties"]), tagged("b", **B["properties"])],
    "by a type": [{"type": "string"}, {"type": ["null", "integer"]}, {"type": "object", **A}],
    "alone": [A],
}
ALIKE = {
    "nothing required": [A, B],
    "only one required": [{**A, "type": "object", "required": ["a"]}, {**B, "type": "object"}],
    "the same tag": [tagged("a", **A["properties"]), tagged("a", **B["properties"])],
    "a tag that may be left out": [tagged("a"), {**tagged("b"), "required": []}],
    "a tag beside any value": [tagged("a"), {"type": "object", "required": ["kind"]}],
    "objects of two kinds": [{"type": ["object", "null"], **A}, {"type": "object", **B}],
    "numbers": [{"type": "integer"}, {"type": "number"}, {"type": "object", **A}],
}


@pytest.mark.parametrize("schema", [
    A,
    {"type": ["object", "null"], **A},
    {**A, "required": ["a"], "description": "of an a"},
    {"allOf": [A], "title": "one"},
    {"anyOf": [A, {"type": "null"}]},
    {"$ref": "#/$defs/one", "$defs": {"one": A}},
    *({"oneOf": alternatives} for alternatives in TOLD_APART.values()),
], ids=str)  # fmt: skip
def test_no_other_key_may_begin(grammars, schema):
    (masks,) = grammars.masks(f"start: {json_rule(schema)}", 1)
    assert set(allowed(masks, list(b'{"'))) <= set(b"abk")
    nested = {"type": "array", "items": {"properties": {"x": schema}, "required": ["x"]}}
    rule = json_rule({**nested, "$defs": schema.get("$defs", {})})
    (masks,) = grammars.masks(f"start: {rule}", 1)
    assert set(allowed(masks, list(b'[{"x": {"'))) <= set(b"abk")


def test_an_object_without_keys_is_empty(grammars):
    """As the arguments of a function that takes none."""
    (masks,) = grammars.masks(f"start: {json_rule({'type': 'object', 'properties': {}})}", 1)
    assert ord('"') not in allowed(masks, list(b"{"))


def test_blanks_are_one_space_or_the_indentation_of_a_line(grammars):
    """A model that may write more blanks writes them until its tokens run out."""
    (masks,) = grammars.masks(f"start: {json_rule({**A, 'type': 'object', 'required': ['a']})}", 1)
    for text, goes_on in (
        ("{", True), ("{ ", False), ("{\n", True), ("{\n ", True), ('{"a": ', False),
        ("{\n" + " " * 39, True), ("{\n" + " " * 40, False),
    ):  # fmt: skip
        assert (ord(" ") in allowed(masks, list(text.encode()))) == goes_on, text


@pytest.mark.parametrize("schema", [
    {"type": "object"},
    {**A, "additionalProperties": True},
    {**A, "additionalProperties": {"type": "null"}},
    {**A, "patternProperties": {"^b": {}}},
    {**A, "required": ["b"]},
    {**A, "enum": [{"b": 1}]},
    {**A, "$ref": "#/$defs/two", "$defs": {"two": B}},
    {**A, "anyOf": [B, {"required": ["b"]}]},
    {"allOf": [A, B]},
    {"allOf": [{"anyOf": [A]}, {"$ref": "#/$defs/two"}], "$defs": {"two": {"allOf": [B]}}},
    {"allOf": [{"properties": {"a": A}}, {"properties": {"a": B}}]},
    *({"oneOf": alternatives} for alternatives in ALIKE.values()),
], ids=str)  # fmt: skip
def test_where_closing_could_change_more_than_keys_nothing_is_closed(schema):
    assert with_closed_objects(enforceable(schema)) == enforceable(schema)


def test_a_part_that_is_used_twice_stays_open_if_one_use_needs_it():
    schema = {"$defs": {"one": A}, "properties": {
        "alone": {"$ref": "#/$defs/one"}, "joined": {"allOf": [{"$ref": "#/$defs/one"}, B]},
        "beside": A,
    }}  # fmt: skip
    closed = with_closed_objects(enforceable(schema))
    assert closed["additionalProperties"] is False
    assert closed["$defs"]["one"] == A
    assert closed["properties"]["beside"] == {**A, "additionalProperties": False}


def test_a_schema_that_contains_itself_is_closed():
    schema = {"properties": {"next": {"$ref": "#"}, "value": {"type": "null"}}}
    closed = with_closed_objects(enforceable(schema))
    assert closed["additionalProperties"] is False
    assert all(one["additionalProperties"] is False for one in closed["$defs"].values())


VALUES: list[Any] = [1, None, {"a": 1}, {"b": 1}]
INSTANCES: list[Any] = [
    {key: value for key, value in zip("ab", values, strict=True) if value != "absent"}
    for values in itertools.product(["absent", *VALUES], repeat=2)
]
LEAVES = st.sampled_from([{"const": 1}, {"type": "integer"}, {"enum": [1, None]}, {}])
KEYS = st.sampled_from("ab")


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(KEYS, inner, max_size=2)},
        optional={"required": st.lists(KEYS, max_size=2, unique=True)},
    )


@st.composite
def composed(draw: st.DrawFn) -> Any:
    """Objects, maybe with others in them, that are alternatives or have to match together."""
    part = st.one_of(objects(LEAVES), objects(objects(LEAVES)))
    keyword = draw(st.sampled_from(["anyOf", "allOf", "oneOf"]))
    own = draw(st.one_of(st.just({}), objects(LEAVES), st.just({"enum": INSTANCES[:9]})))
    schema = {**own, keyword: draw(st.lists(part, min_size=1, max_size=2))}
    if draw(st.booleans()):
        return schema
    whole = {"$defs": {"one": schema}, "properties": {"a": {"$ref": "#/$defs/one"}}}
    return {**whole, "allOf": [draw(part)]} if draw(st.booleans()) else whole


@given(composed())
def test_what_a_closed_schema_allows_the_schema_allows(schema):
    """And it allows something if the schema does."""
    closed = with_closed_objects(enforceable(schema))
    before = jsonschema.Draft202012Validator(schema)
    after = jsonschema.Draft202012Validator(closed)
    allowed_before = [before.is_valid(one) for one in INSTANCES]
    allowed_after = [after.is_valid(one) for one in INSTANCES]
    assert all(was for was, is_now in zip(allowed_before, allowed_after, strict=True) if is_now)
    assert any(allowed_after) == any(allowed_before)
