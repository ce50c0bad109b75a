"""Schemas and grammars: what is let through obeys them, and what cannot be enforced is refused."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.types import Request, SamplingParams
from harness.serve.background_work import BackgroundWork
from harness.serve.dialect.calls import json_rule
from harness.serve.driver import EngineDriver, EventStream
from harness.serve.structured.grammars import (
    GrammarBroke,
    GrammarLimits,
    GrammarRefused,
    Grammars,
    TokenMasks,
)
from harness.serve.structured.json_schema import SchemaRefused, check_schema
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.engine.drafter import PromptLookup
from reference.limits import Limits
from reference.model.open import Model
from reference.observer import Observer
from reference.runner import ModelRunner
from reference.sched.constraints import Mask

LIKELY = frozenset(b'"}],0123456789.-:{[truefalsn \\aAzZ#@')
LENGTH = 300
LINKED = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
ENFORCED: list[Any] = [
    True,
    {"type": "object"},
    {"type": ["integer", "null"], "minimum": 3},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "a"},
    {"type": "string", "pattern": '^[^"]+$'},
    {"type": "string", "pattern": "^[^!-/]{2}$"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "integer", "multipleOf": 7, "minimum": -20, "exclusiveMaximum": 40},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {
        "type": "object",
        "patternProperties": {"^a": {"type": "null"}},
        "additionalProperties": False,
    },
    {"type": "object", "properties": {'é"': {"type": "null"}}, "required": ['é"']},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"enum": [1, 'a"b', None, {"b": [True]}]},
    {"const": {"a": [1, 2.5, "x"]}},
    {"anyOf": [{"type": "integer"}, {"type": "string"}], "description": "either"},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"allOf": [{"type": "object", "properties": {"a": {"minimum": 3}}}, {"required": ["a"]}]},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "type": "null"},
    LINKED,
]
REFUSED: list[tuple[Any, str, str]] = [
    ({"not": {}}, "", "not"),
    ({"type": "object", "minProperties": 1}, "", "minProperties"),
    ({"type": "array", "uniqueItems": True}, "", "uniqueItems"),
    ({"type": "array", "contains": {}}, "", "contains"),
    ({"if": {}, "then": {}}, "", "if"),
    ({"type": "object", "dependentRequired": {}}, "", "dependentRequired"),
    ({"type": "object", "propertyNames": {}}, "", "propertyNames"),
    ({"type": "object", "unevaluatedProperties": False}, "", "unevaluatedProperties"),
    ({"type": "string", "contentEncoding": "base64"}, "", "contentEncoding"),
    ({"x-guidance": {"lenient": True}}, "", "x-guidance"),
    ({"type": "object", "properties": {"a/b": {"foo": 1}}}, "/properties/a~1b", "foo"),
    ({"$defs": {"unused": {"foo": 1}}}, "/$defs/unused", "foo"),
    ({"anyOf": [{}, {"items": {"$anchor": "x"}}]}, "/anyOf/1/items", "$anchor"),
    ({"items": [{"type": "string"}]}, "/items", "the value"),
    ({"anyOf": []}, "", "anyOf"),
    ({"properties": [1]}, "", "properties"),
    ({"$ref": "http://example.org/x"}, "", "$ref"),
    ({"$ref": "#/properties/a"}, "", "$ref"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "", "$schema"),
    ({"items": {"$id": "x"}}, "/items", "$id"),
    ({"exclusiveMinimum": True}, "", "exclusiveMinimum"),
    ({"minLength": -1}, "", "minLength"),
    ({"required": "a"}, "", "required"),
    ({"type": "string", "pattern": "[^a]", "enum": ['"']}, "", 'the text with "'),
    ([], "", "the value"),
]
REFUSED_LATER: list[Any] = [
    {"type": "zork"},
    {"type": "string", "format": "zork"},
    {"type": "string", "pattern": "(?=a)b"},
    {"$ref": "#/$defs/nowhere"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "integer", "minimum": 3, "maximum": 2},
]
EXPLODES = "start: A\nA: " + " & ".join(f"/(.|\\n)*a(.|\\n){{{k}}}/" for k in range(3, 60))


def allowed(masks: TokenMasks, tokens: list[int]) -> list[int]:
    return np.flatnonzero(np.unpackbits(masks(tokens).view(np.uint8), bitorder="little")).tolist()


def walk(model: Model, masks: TokenMasks, seed: int, phrases: Sequence[bytes] = ()) -> bytes | None:
    """A text made of tokens that were allowed; None for one that did not end. Now and then it goes
    on with one of ``phrases``, as far as that is allowed."""
    rng = random.Random(seed)
    tokens: list[int] = []
    planned: list[int] = []
    for _ in range(LENGTH):
        choices = allowed(masks, tokens)
        assert choices, "a dead end"
        ends = model.tokenizer.eog_ids.intersection(choices)
        goes_on = [token for token in choices if token not in ends]
        if ends and (not goes_on or rng.random() < 0.5):
            return model.tokenizer.decode_bytes(tokens)
        if phrases and not planned and rng.random() < 0.1:
            planned = list(rng.choice(phrases))
        likely = [token for token in goes_on if token in LIKELY]
        closing = [token for token in b'"}]' if token in likely]
        if planned and planned[0] in goes_on:
            tokens.append(planned.pop(0))
        elif closing and rng.random() < 0.3:
            tokens.append(rng.choice(closing))
        else:
            planned = []
            tokens.append(rng.choice(likely if likely and rng.random() < 0.9 else goes_on))
    return None


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda s: json.dumps(s)[:60])
def test_whatever_is_allowed_obeys_the_schema(
    model: Model, grammars: Grammars, schema: Any
) -> None:
    """jsonschema, which shares nothing with the grammar, agrees on every text."""
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    ended = 0
    for seed, masks in enumerate(grammars.masks(f"start: {json_rule(schema)}", 30)):
        text = walk(model, masks, seed)
        if text is not None:
            ended += 1
            judge.validate(json.loads(text))
    assert ended > 5


def test_without_masks_nothing_obeys(model: Model) -> None:
    """The negative control: random tokens are no JSON."""
    rng = random.Random(0)
    for _ in range(20):
        text = model.tokenizer.decode_bytes(rng.choices(sorted(LIKELY), k=12))
        with pytest.raises((ValueError, jsonschema.ValidationError)):
            jsonschema.validate(json.loads(text), {"type": "object", "required": ["a"]})


@pytest.mark.parametrize(("schema", "pointer", "keyword"), REFUSED, ids=str)
def test_a_schema_that_cannot_be_enforced_is_refused(
    schema: Any, pointer: str, keyword: str
) -> None:
    with pytest.raises(SchemaRefused) as refused:
        check_schema(schema)
    assert (refused.value.pointer, refused.value.keyword) == (pointer, keyword)
    assert keyword in str(refused.value)


@pytest.mark.parametrize("schema", REFUSED_LATER, ids=json.dumps)
def test_what_only_the_compiler_knows_is_refused_too(grammars: Grammars, schema: Any) -> None:
    with pytest.raises(GrammarRefused, match="cannot be enforced"):
        grammars.masks(f"start: {json_rule(schema)}", 1)


def test_an_error_shows_nothing_of_the_grammar(grammars: Grammars) -> None:
    with pytest.raises(GrammarRefused) as refused:
        grammars.masks('start: "hush" %json {"type": "zork"}', 1)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "limits",
    [GrammarLimits(cpu_seconds=0.2), GrammarLimits(memory_bytes=16 << 20, cpu_seconds=20)],
    ids=["time", "memory"],
)
def test_a_grammar_that_explodes_ends_its_child_only(model: Model, limits: GrammarLimits) -> None:
    """And the next one is compiled by another."""
    grammars = Grammars(model.tokenizer, model.config.vocab, limits)
    try:
        with pytest.raises(GrammarRefused, match="too much time or memory"):
            grammars.masks(EXPLODES, 1)
        assert len(grammars.masks('start: "a"', 2)) == 2
    finally:
        grammars.close()


def test_a_grammar_of_special_tokens(model: Model, grammars: Grammars) -> None:
    """Text never stands for a control token, only its number does."""
    control = model.tokenizer.encode("<|im_start|>", parse_special=True)[0]
    (masks,) = grammars.masks(f"start: /(.|\\n)*/ <[{control}]>", 1)
    assert control in allowed(masks, [])
    (text,) = grammars.masks('start: "<|im_start|>"', 1)
    assert control not in allowed(text, [])
    (anything,) = grammars.masks("start: /(.|\\n)*/", 1)
    assert set(range(256)).isdisjoint(model.tokenizer.eog_ids)
    assert control not in allowed(anything, [])


@given(data=st.data())
def test_masks_depend_on_the_tokens_alone(
    model: Model, grammars: Grammars, data: st.DataObject
) -> None:
    """However they were asked before: ahead, again, or for something else."""
    first, second, third = grammars.masks(f"start: {json_rule(LINKED)}", 3)
    tokens: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        choices = [t for t in allowed(first, tokens) if t not in model.tokenizer.eog_ids]
        if not choices:
            break
        tokens.append(data.draw(st.sampled_from(choices)))
        third.follow(tokens[-1])
    cut = data.draw(st.integers(0, len(tokens)))
    expected = allowed(first, tokens)
    allowed(second, tokens[:cut])
    assert allowed(second, tokens) == allowed(third, tokens) == expected
    assert allowed(first, tokens[:cut]) == allowed(second, tokens[:cut])
    assert allowed(first, tokens) == expected


def test_a_token_that_does_not_follow_breaks_the_masks(grammars: Grammars) -> None:
    (masks,) = grammars.masks('start: "ab"', 1)
    with pytest.raises(GrammarBroke):
        masks([ord("b")])
    with pytest.raises(GrammarBroke):
        masks([ord("b")])


class _Late(TokenMasks):
    """Masks that come when they are let."""

    def __init__(self, inner: TokenMasks, gate: threading.Event) -> None:
        self._inner, self._gate = inner, gate

    def __call__(self, tokens: list[int]) -> Mask:
        return self._inner(tokens)

    def follow(self, token: int) -> None:
        self._gate.wait()
        self._inner.follow(token)


def test_a_late_mask_is_told_once_it_is_there(grammars: Grammars) -> None:
    gate, told = threading.Event(), threading.Event()
    arrived: list[int] = []

    def note(request_id: int) -> None:
        arrived.append(request_id)
        told.set()

    background = BackgroundWork(note)
    late, punctual = grammars.masks('start: "ab"', 2)
    try:
        background.add(1, _Late(late, gate))
        background.add(2, punctual)
        for request_id in (1, 2, 3):
            background.received(request_id, ord("a"))
        assert background.settle(0.5) == [1]
        assert background.settle() == []
        assert background.late == {1}
        gate.set()
        assert told.wait(30)
        assert arrived == [1]
        assert background.settled(1)
        assert not background.settled(1)
        assert background.settle() == []
    finally:
        gate.set()
        background.close()


def test_guessing_for_others_changes_no_token(model: Model, grammars: Grammars) -> None:
    """Beside requests that are guessed for: the tokens of the request alone without guessing."""
    draft = 4
    limits = Limits(
        slots=3, context=96, pages=18, step_tokens=40, step_rows=15, masks=3,
        recent_tokens=64 + draft,
    )  # fmt: skip
    rule = f"start: {json_rule({'type': 'array', 'items': {'type': 'integer'}, 'minItems': 9})}"

    def run(runner: ModelRunner, numbers: list[int], guess: int) -> dict[int, list[int]]:
        drafter = PromptLookup() if guess else None
        engine = Engine(
            runner, end_of_generation=model.tokenizer.eog_ids, drafter=drafter, draft_tokens=guess
        )
        masks = dict(zip(numbers, grammars.masks(rule, len(numbers)), strict=True))
        for number in numbers:
            prompt = tuple([65, 66, 67, 68] * 5)
            sampling = SamplingParams(temperature=0.8 * (number > 0), seed=number)
            constrained = masks[number] if number else None
            engine.submit(Request(number, prompt, 24, sampling), allowed=constrained)
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        for event in engine.run():
            tokens[event.request_id].append(event.token)
        assert (engine.statistics.speculation.drafted > 0) == (guess > 0)
        return tokens

    with CpuTier() as tier, ModelRunner(model, tier, limits) as runner:
        alone = {n: run(runner, [n], 0)[n] for n in (0, 1)}
        assert run(runner, [0, 1], draft) == alone
    text = model.tokenizer.decode_bytes(alone[1])
    assert text.startswith(b"[")


def test_nobody_waits_for_a_late_mask(model: Model, grammars: Grammars) -> None:
    """Its request sits out steps while another one comes to its end, and has the same tokens."""
    limits = Limits(slots=2, context=96, pages=12, step_tokens=32, step_rows=4, masks=2)
    rule = f"start: {json_rule({'type': 'string', 'minLength': 6, 'maxLength': 9})}"
    ends = model.tokenizer.eog_ids

    def asked(driver: EngineDriver, most: int) -> Request:
        sampling = SamplingParams(temperature=0.9, seed=3)
        return Request(driver.new_id(), (65, 66, 67), most, sampling, ignore_end=most > 20)

    def tokens_of(stream: EventStream) -> list[int]:
        tokens: list[int] = []
        while True:
            for delivered in stream.take(60):
                tokens.append(delivered.event.token)
                if delivered.event.finish_reason is not None:
                    return tokens

    with CpuTier() as tier, ModelRunner(model, tier, limits) as runner:

        def make(observer: Observer) -> Engine:
            return Engine(runner, end_of_generation=ends, observer=observer, stall_steps=5)

        driver = EngineDriver(make)
        driver.start()
        try:
            alone_masks, inner = grammars.masks(rule, 2)
            one = asked(driver, 20)
            alone = tokens_of(driver.submit([one], masks={one.id: alone_masks}))
            gate = threading.Event()
            two, free = asked(driver, 20), asked(driver, 40)
            late = _Late(inner, gate)
            waiting = driver.submit([two], masks={two.id: late})
            assert len(tokens_of(driver.submit([free]))) == 40
            assert sum(len(waiting.take(0.2)) for _ in range(2)) == 1
            gate.set()
            assert tokens_of(waiting) == alone[1:]
        finally:
            gate.set()
            driver.close()
