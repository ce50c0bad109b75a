"""Grammars and masks: they depend on tokens alone, and one that breaks is alone with it."""

import json
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.types import Request, SamplingParams
from harness.host.background_work import BackgroundWork
from harness.host.dialect.calls import json_rule
from harness.host.driver import EngineDriver
from harness.host.engine_thread import EngineThread
from harness.host.structured.grammars import (
    GrammarBroke,
    GrammarLimits,
    GrammarRefused,
    Grammars,
    TokenMasks,
    regex_rule,
)
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import PromptLookup
from reference.limits import Limits
from reference.model.open import Model
from reference.model.tokenizer import load_tokenizer
from reference.observer import Observer
from reference.runner import ModelRunner
from reference.sched.constraints import Mask
from tests.model.tokenizer_data import byte_level_metadata
from tests.named_tiers import quick_tier
from tests.patience import PATIENCE_SECONDS
from tests.serve.test_driver import tokens_of

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


def test_an_error_shows_nothing_of_the_grammar(grammars):
    with pytest.raises(GrammarRefused) as refused:
        grammars.masks('start: "hush" %json {"type": "zork"}', 1)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "limits",
    [GrammarLimits(cpu_seconds=1.0), GrammarLimits(memory_bytes=16 << 20, cpu_seconds=20)],
    ids=["time", "memory"],
)
def test_a_grammar_that_explodes_ends_its_child_only(model, limits):
    """And the next one is compiled by another."""
    grammars = Grammars(model.tokenizer, model.config.vocab, limits)
    try:
        with pytest.raises(GrammarRefused, match="too much time or memory"):
            grammars.masks(EXPLODES, 1)
        assert len(grammars.masks('start: "a"', 2)) == 2
    finally:
        grammars.close()


def test_a_grammar_of_special_tokens(model, grammars):
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
def test_masks_depend_on_the_tokens_alone(model, grammars, data):
    """However they were asked before: ahead, again, or for something else."""
    first, second, third = grammars.masks(f"start: {json_rule(LINKED)}", 3)
    tokens: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        choices = [t for t in allowed(first, tokens) if t not in model.tokenizer.eog_ids]
        if not choices:
            break
        tokens.append(data.draw(st.sampled_from(choices)))
        third.follow(tokens.copy())
    cut = data.draw(st.integers(0, len(tokens)))
    expected = allowed(first, tokens)
    allowed(second, tokens[:cut])
    assert allowed(second, tokens) == allowed(third, tokens) == expected
    assert allowed(first, tokens[:cut]) == allowed(second, tokens[:cut])
    assert allowed(first, tokens) == expected


@given(data=st.data())
def test_drafted_tokens_leave_no_trace_in_masks(model, grammars, data):
    """Before each token the masks are asked about tokens that do not come: some that may, then one
    that may not. The masks behind the tokens that come are those of a sequence without drafts."""
    plain, drafted = grammars.masks(f"start: {json_rule(LINKED)}", 2)
    ends, tokens = model.tokenizer.eog_ids, list[int]()
    for _ in range(data.draw(st.integers(1, 9))):
        guess = list(tokens)
        for _ in range(data.draw(st.integers(0, 4))):
            guess.append(data.draw(st.sampled_from(allowed(drafted, guess))))
        if data.draw(st.booleans()):
            drafted.problem_after([*guess, 0])
        choices = [token for token in allowed(plain, tokens) if token not in ends]
        assert allowed(drafted, tokens) == allowed(plain, tokens)
        assert drafted.failure is None
        if not choices:
            break
        tokens.append(data.draw(st.sampled_from(choices)))


def test_a_token_that_does_not_follow_breaks_the_masks(grammars):
    (masks,) = grammars.masks('start: "ab"', 1)
    with pytest.raises(GrammarBroke):
        masks([ord("b")])
    with pytest.raises(GrammarBroke):
        masks([ord("b")])


def test_a_grammar_that_breaks_for_one_sequence_holds_for_the_others(grammars):
    """Before, beside and after it; and it breaks again for whoever goes the same way."""
    rule = f"start: body\nbody: {regex_rule('([yx](a?){3000}a{3000}z)|(q[qr]a*b)')}"
    fine, late = list(b"qqaab"), list(b"xaaaaaa")
    one, two, three = grammars.masks(rule, 3)
    before = allowed(one, fine[:2])
    for _ in range(2):
        with pytest.raises(GrammarBroke):
            [two(late[:end]) for end in range(len(late) + 1)]
        assert two.failure is not None
        assert two.problem_after(late) == two.failure
        (after,) = grammars.masks(rule, 1)
        for masks in (one, three, after):
            assert [len(allowed(masks, fine[:end])) for end in range(5)] == [3, 2, 2, 2, 2]
            assert masks.failure is None
            assert masks.problem_after(fine) is None
        assert allowed(three, fine[:2]) == before
        (two,) = grammars.masks(rule, 1)


@pytest.mark.parametrize("text", ["cafe\u0301 x", "caf\u00e9", "\u212b\u1112\u1161", "a" * 900])
def test_a_text_that_must_come_is_that_text_to_the_character(text):
    """Also under a vocabulary whose prompts are normalized: what a grammar demands is not."""
    metadata = byte_level_metadata(["c a", "a a", "aa aa"], ["<|im_end|>"])
    tokenizer = load_tokenizer(metadata | {"tokenizer.ggml.eos_token_id": 259}, "m.gguf")
    with closing(Grammars(tokenizer, 260)) as grammars:
        (masks,) = grammars.masks(f"start: {json_rule({'const': text})}", 1)
        tokens: list[int] = []
        while 259 not in (choices := allowed(masks, tokens)):
            tokens.append(max(choices))
    assert json.loads(tokenizer.decode_bytes(tokens)) == text


def test_a_dead_end_is_named():
    """Where the vocabulary has no token for what would have to come."""
    metadata = byte_level_metadata([], ["<|im_end|>"])
    metadata["tokenizer.ggml.tokens"][ord("b")] = "xyz"
    metadata["tokenizer.ggml.eos_token_id"] = 256
    with closing(Grammars(load_tokenizer(metadata, "m.gguf"), 257)) as grammars:
        (masks,) = grammars.masks('start: "ab" | "c"', 1)
        assert allowed(masks, []) == [ord("a"), ord("c")] or allowed(masks, []) == [ord("c")]
        if ord("a") in allowed(masks, []):
            assert masks.problem_after([ord("a")]) is not None


class _Late(TokenMasks):
    """Masks that come when they are let."""

    def __init__(self, inner: TokenMasks, gate: threading.Event) -> None:
        self._inner, self._gate = inner, gate

    def __call__(self, tokens: list[int]) -> Mask:
        return self._inner(tokens)

    def follow(self, tokens: list[int]) -> None:
        self._gate.wait()
        self._inner.follow(tokens)


def test_a_late_mask_is_told_once_it_is_there(grammars):
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
        background.received(1, ord("a"))
        assert background.settle(0) == [1]
        for request_id in (2, 3):
            background.received(request_id, ord("a"))
        assert background.settle(PATIENCE_SECONDS) == []
        assert background.late == {1}
        gate.set()
        assert told.wait(PATIENCE_SECONDS)
        assert arrived == [1]
        assert background.settled(1)
        assert not background.settled(1)
        assert background.settle() == []
    finally:
        gate.set()
        background.close()


def test_guessing_for_others_changes_no_token(model, grammars):
    """Beside requests that are guessed for: the tokens of the request alone without guessing."""
    draft = 4
    limits = Limits(
        slots=3, context=96, pages=18, step_tokens=40, step_rows=15, masks=3,
        recent_tokens=64 + draft, draft_tokens=draft,
    )  # fmt: skip
    rule = f"start: {json_rule({'type': 'array', 'items': {'type': 'integer'}, 'minItems': 9})}"

    def run(runner: ModelRunner, numbers: list[int], guess: int) -> dict[int, list[int]]:
        drafter = PromptLookup() if guess else None
        engine = Engine(
            runner,
            EngineOptions(end_of_generation=model.tokenizer.eog_ids, draft_tokens=guess),
            drafter=drafter,
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

    with quick_tier() as tier, ModelRunner(model, tier, limits) as runner:
        alone = {n: run(runner, [n], 0)[n] for n in (0, 1)}
        assert run(runner, [0, 1], draft) == alone
    text = model.tokenizer.decode_bytes(alone[1])
    assert text.startswith(b"[")


def test_nobody_waits_for_a_late_mask(model, grammars):
    """Its request sits out steps while another one comes to its end, and has the same tokens."""
    limits = Limits(slots=2, context=96, pages=12, step_tokens=32, step_rows=4, masks=2)
    rule = f"start: {json_rule({'type': 'string', 'minLength': 6, 'maxLength': 9})}"
    ends = model.tokenizer.eog_ids

    def asked(driver: EngineDriver, most: int) -> Request:
        sampling = SamplingParams(temperature=0.9, seed=3)
        return Request(driver.new_id(), (65, 66, 67), most, sampling, ignore_end=most > 20)

    with quick_tier() as tier, ModelRunner(model, tier, limits) as runner:

        def make(observer: Observer) -> Engine:
            return Engine(
                runner, EngineOptions(end_of_generation=ends, stall_steps=5), observer=observer
            )

        gate = threading.Event()
        with EngineThread() as thread:
            driver = thread.add(make)
            try:
                alone_masks, inner = grammars.masks(rule, 2)
                one = asked(driver, 20)
                alone = tokens_of(driver.submit([one], masks={one.id: alone_masks}))
                two, free = asked(driver, 20), asked(driver, 40)
                late = _Late(inner, gate)
                waiting = driver.submit([two], masks={two.id: late})
                assert len(tokens_of(driver.submit([free]))) == 40
                assert sum(len(waiting.take(0.2)) for _ in range(2)) == 1
                gate.set()
                assert tokens_of(waiting) == alone[1:]
            finally:
                gate.set()


def test_ctrl_c_just_behind_the_lock_stops_no_later_grammar(model):
    """Neither one of the same thread nor, then, one of another."""
    limits = GrammarLimits(wall_seconds=PATIENCE_SECONDS / 10)
    with closing(Grammars(model.tokenizer, model.config.vocab, limits)) as grammars:
        lock = grammars._compiling

        class Interrupted:
            def acquire(self, timeout: float) -> bool:
                lock.acquire(timeout=timeout)
                raise KeyboardInterrupt

        grammars._compiling = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            grammars.masks('start: "a"', 1)
        grammars._compiling = lock
        assert len(grammars.masks('start: "b"', 1)) == 1
        with ThreadPoolExecutor(1) as others:
            assert len(others.submit(grammars.masks, 'start: "c"', 1).result()) == 1
