"""SAMPLE against rule R9 in Python integers, and its properties."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from contract.records import SAMPLING
from reference.exact.philox import philox
from reference.ops.sample import NO_TOKEN, sample, window
from tests.ops.paged import scalar_exp
from tests.ops.scalar import F

RECENT = 8
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repeat_penalty": 1.0, "position": 100}


def record(**fields: Any) -> np.void:
    """One SAMPLING record, neutral but for the named fields."""
    value = np.zeros((), SAMPLING)
    for name, content in (NEUTRAL | fields).items():
        value[name] = content
    return value[()]


def draw_tokens(
    logits: NDArray[np.float32], records: list[np.void], recent: list[list[int]] | None = None
) -> list[int]:
    """The definition on rows of one vocabulary."""
    rules = np.array(records, SAMPLING)
    kept = np.full((len(records), RECENT), 10**9, np.int32)
    for row, ids in enumerate(recent or []):
        rules[row]["slot"], rules[row]["repeat_last_n"] = row, len(ids)
        for age, id_ in enumerate(reversed(ids), 1):
            kept[row, (int(rules[row]["position"]) - age) % RECENT] = id_
    words = rules.view(np.int32).reshape(len(records), -1)
    with np.errstate(over="ignore", invalid="ignore"):
        tokens: list[int] = sample(logits=logits, sampling=words, recent=kept).tolist()
    return tokens


def by_integers(
    logits: list[np.float32],
    rule: np.void,
    recent: list[int],
    allowed: Collection[int] | None = None,
    bias: Mapping[int, float] | None = None,
) -> int:
    """R9 step by step: scalar binary32 up to the weights, Python integers after.

    A token that is not among ``allowed`` never becomes a candidate."""
    values = list(logits)
    candidates = range(len(values)) if allowed is None else sorted(allowed)
    if not candidates:
        return NO_TOKEN
    for token, added in (bias or {}).items():
        values[token] = F(values[token] + F(added))
    for token, count in Counter(t for t in recent if t >= 0).items():
        seen, penalty = values[token], rule["repeat_penalty"]
        seen = F(seen / penalty) if seen > 0 else F(seen * penalty)
        seen = F(seen - F(F(count) * rule["frequency_penalty"]))
        values[token] = F(seen - rule["presence_penalty"])
    ranked = sorted(candidates, key=lambda i: (-values[i], i))
    if not rule["temperature"] > 0:
        return ranked[0]
    values = [F(v / rule["temperature"]) for v in values]
    ranked = sorted(candidates, key=lambda i: (-values[i], i))
    if rule["top_k"] > 0:
        ranked = ranked[: rule["top_k"]]
    largest = values[ranked[0]]
    weight = {i: round(float(scalar_exp(F(values[i] - largest))) * 2**24) for i in ranked}
    kept = ranked
    if rule["top_p"] < 1:
        threshold = round(float(rule["top_p"]) * 65536) * sum(weight.values())
        before, kept = 0, []
        for token in ranked:
            if before * 65536 >= threshold:
                break
            kept.append(token)
            before += weight[token]
    if rule["min_p"] > 0:
        floor = round(float(rule["min_p"]) * 65536) * weight[ranked[0]]
        kept = [token for token in kept if weight[token] * 65536 >= floor]
    kept = sorted(kept or ranked[:1])
    key = (int(rule["seed_low"]), int(rule["seed_high"]))
    u = philox(key, (int(rule["position"]), 0, 0, 0))[0]
    target = u * sum(weight[token] for token in kept) // 2**32
    for token in kept:
        target -= weight[token]
        if target < 0:
            return token
    raise AssertionError("the target lies below the total")


@st.composite
def rules(draw: st.DrawFn) -> np.void:
    """Any combination of the parameters a request may set."""
    return record(
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.1, 0.0])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.5, 1.0])),
        repeat_penalty=draw(st.sampled_from([1.0, 1.2, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3])),
        seed_low=draw(st.integers(0, 2**32 - 1)),
        seed_high=draw(st.integers(0, 2**32 - 1)),
        position=draw(st.integers(RECENT, 2**31 - 1)),
    )


@given(
    seed=st.integers(0, 2**32 - 1),
    rule=rules(),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    recent=st.lists(st.integers(0, 39), max_size=RECENT),
)
@settings(max_examples=300, deadline=None)
def test_rule_in_integers(seed, rule, spread, recent):
    """The same token; half the logits are tied with another."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(40) * spread).astype(np.float32)
    logits[rng.permutation(40)[:20]] = logits[rng.permutation(40)[:20]]
    expected = by_integers(list(logits), rule, recent)
    assert draw_tokens(logits[None], [rule], [recent]) == [expected]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_narrow_rules_are_argmax(seed):
    """Temperature 0, top_k 1, a tiny top_p and min_p 1 all keep the largest logit alone."""
    logits = np.random.default_rng(seed).standard_normal(50).astype(np.float32)
    narrow = [
        record(temperature=0.0, seed_low=seed),
        record(top_k=1, seed_low=seed),
        record(top_p=1e-6, seed_low=seed),
        record(top_p=0.0, seed_low=seed),
        record(min_p=1.0, seed_low=seed),
    ]
    tokens = draw_tokens(np.tile(logits, (len(narrow), 1)), narrow)
    assert tokens == [int(logits.argmax())] * len(narrow)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}])
def test_ties_go_to_the_lower_id(fields):
    """Among equal logits the first survives a cut to one."""
    logits = np.array([[1.0, 5.0, 5.0, 5.0]], np.float32)
    assert draw_tokens(logits, [record(**fields, seed_low=9)]) == [1]


def test_total_weight_beyond_32_bits():
    """300 and 150,000 equal logits weigh more than 2^32; every id can be drawn, evenly."""
    rows = 2000
    logits = np.zeros((rows, 300), np.float32)
    tokens = draw_tokens(logits, [record(seed_low=s) for s in range(rows)])
    assert min(tokens) < 10
    assert max(tokens) >= 290
    assert abs(np.mean(tokens) - 149.5) < 4 * 86.6 / math.sqrt(rows)
    wide = np.zeros((1, 150_000), np.float32)
    rule = record(seed_low=3, position=8)
    u = philox((3, 0), (8, 0, 0, 0))[0]
    assert draw_tokens(wide, [rule]) == [u * 150_000 // 2**32]


def test_distribution_over_seeds():
    """Chi-square of 6,000 draws against the softmax stays below the 0.1 % point."""
    rows = 6000
    logits = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -2.0], np.float32)
    probability = np.exp(logits.astype(np.float64))
    expected = rows * probability / probability.sum()
    tokens = draw_tokens(np.tile(logits, (rows, 1)), [record(seed_low=s) for s in range(rows)])
    counts = np.bincount(tokens, minlength=6)
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


def test_positions_of_one_seed_draw_independently():
    """The counter is the position: one request does not repeat itself."""
    logits = np.zeros((256, 64), np.float32)
    tokens = draw_tokens(logits, [record(seed_low=5, position=p) for p in range(256)])
    assert len(set(tokens)) > 50


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_broken_row_has_no_token(broken):
    """And the rows beside it are as without it."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((3, 30), dtype=np.float32)
    records = [record(seed_low=s) for s in range(3)]
    before = draw_tokens(logits, records)
    logits[1, 4] = broken
    assert draw_tokens(logits, records) == [before[0], NO_TOKEN, before[2]]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-38},
        {"repeat_penalty": 1e-38},
        {"repeat_penalty": 1e-38, "temperature": 0.0},
    ],
)
def test_settings_that_overflow_the_logits_yield_no_token(fields):
    """The largest logit is infinite: no token, and no error that would end the other rows."""
    logits = np.array([[10.0, 900.0, 1000.0, -5.0]], np.float32)
    assert draw_tokens(logits, [record(**fields)], [[1, 2]]) == [NO_TOKEN]


def test_far_lower_logits_may_overflow_downwards():
    """A banned token at -1e38 stays impossible under a low temperature."""
    logits = np.array([[1.0, -1e38, 1.0]], np.float32)
    tokens = {draw_tokens(logits, [record(temperature=0.1, seed_low=s)])[0] for s in range(40)}
    assert tokens == {0, 2}


def test_only_the_tokens_before_the_position_count():
    """Not those of other slots, nor what the ring holds from before the sequence began, nor more
    than asked for."""
    logits = np.array([[1.0, 1.0, 1.5, 1.0]], np.float32)
    recent = np.array([[2, 2, 2, 2], [0, 3, 2, 2]], np.int32)

    def sampled(position: int, last_n: int) -> int:
        rule = record(
            temperature=0.0, repeat_penalty=10.0, slot=1, position=position, repeat_last_n=last_n
        )
        words = np.array([rule], SAMPLING).view(np.int32).reshape(1, -1)
        return int(sample(logits=logits, sampling=words, recent=recent)[0])

    assert [sampled(position, 4) for position in (0, 1, 2, 3)] == [2, 2, 2, 1]
    assert window(record(slot=1, position=6, repeat_last_n=3), recent).tolist() == [2, 0, 3]
    assert window(record(slot=1, position=2, repeat_last_n=4), recent).tolist() == [0, 3]
    assert window(record(slot=0, position=9, repeat_last_n=0), recent).tolist() == []
    assert sampled(7, 1) == 0
    assert sampled(6, 2) == 2
