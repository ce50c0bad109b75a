"""SAMPLE's masks and biases: rule R9 over the allowed tokens alone, and what makes a row fail."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from contract.records import LOGIT_BIAS, SAMPLING
from reference.ops.sample import NO_TOKEN, sample
from tests.ops.test_sample import RECENT, by_integers, record, rules

VOCAB = 40
Float32 = NDArray[np.float32]


def mask_of(allowed: Collection[int], words: int = 2) -> NDArray[np.int32]:
    """Bit v mod 32 of word v / 32, written as the sentence says."""
    mask = np.zeros(words, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


def draw_token(
    logits: Float32,
    rule: np.void,
    recent: Sequence[int] = (),
    allowed: Collection[int] | None = None,
    bias: Mapping[int, float] | None = None,
) -> int:
    """One row whose mask and biases are not the first of their tables."""
    rules = np.array([rule], SAMPLING)
    kept = np.zeros((1, RECENT), np.int32)
    rules["repeat_last_n"] = len(recent)
    for age, token in enumerate(reversed(recent), 1):
        kept[0, (int(rule["position"]) - age) % RECENT] = token
    masks, biases = [mask_of(range(3))], [(7, 50.0)]
    if allowed is not None:
        masks.append(mask_of(allowed))
        rules["mask"] = 2
    if bias is not None:
        biases += list(bias.items())
        rules["bias_first"], rules["bias_count"] = 1, len(bias)
    with np.errstate(over="ignore"):
        drawn = sample(
            logits=logits[None],
            sampling=rules.view(np.int32).reshape(1, -1),
            recent=kept,
            allowed=np.array(masks),
            bias=np.array(biases, LOGIT_BIAS).view(np.int32).reshape(-1, 2),
        )
    return int(drawn[0])


TOKENS = st.integers(0, VOCAB - 1)
BIASES = st.dictionaries(TOKENS, st.sampled_from([-100.0, -0.7, 0.1, 2.0, 100.0]), max_size=9)


@given(
    seed=st.integers(0, 2**32 - 1),
    rule=rules(),
    recent=st.lists(TOKENS, max_size=RECENT),
    allowed=st.none() | st.frozensets(TOKENS),
    bias=st.none() | BIASES,
)
@settings(max_examples=300, deadline=None)
def test_rule_in_integers(seed, rule, recent, allowed, bias):
    """The token of a row that knows the allowed tokens only; half the logits are tied."""
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal(VOCAB)).astype(np.float32)
    logits[rng.permutation(VOCAB)[:20]] = logits[rng.permutation(VOCAB)[:20]]
    expected = by_integers(list(logits), rule, recent, allowed, bias)
    assert draw_token(logits, rule, recent, allowed, bias) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_forbidden_token_has_does_not_matter(temperature):
    """The largest logit, a bias that overflows, a repetition: none of it reaches the others."""
    logits = np.linspace(0, 1, VOCAB, dtype=np.float32)
    allowed = {0, 4, 33}
    rule = record(temperature=temperature, seed_low=3, repeat_penalty=1e-38)
    plain = draw_token(logits, rule, (), allowed)
    logits[[1, 35]] = 3e38, -3e38
    assert plain in allowed
    assert draw_token(logits, rule, [1, 35], allowed, {1: 3e38, 35: -3e38}) == plain


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_forbidden_token_that_is_not_finite_ends_the_row(broken):
    """Whatever broke the model is not hidden by a mask."""
    logits = np.linspace(0, 1, VOCAB, dtype=np.float32)
    logits[5] = broken
    assert draw_token(logits, record(), (), {1, 2}) == NO_TOKEN


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_nothing_allowed_is_no_token(temperature):
    """Bits behind the vocabulary allow nothing; no bias does."""
    logits = np.linspace(0, 1, VOCAB, dtype=np.float32)
    rule = record(temperature=temperature)
    assert draw_token(logits, rule, (), ()) == NO_TOKEN
    assert draw_token(logits, rule, (), range(VOCAB, 64), {3: 100.0}) == NO_TOKEN
    assert draw_token(logits, rule, (), {3}, {3: -100.0}) == 3


def test_a_bias_is_one_rounding_before_the_penalties():
    """A logit of 1 and a bias of -3 is negative: the penalty multiplies it."""
    logits = np.array([1.0, -3.5], np.float32)
    rule = record(temperature=0.0, repeat_penalty=2.0)
    assert draw_token(logits, rule, (), None, {0: -3.0}) == 0
    assert draw_token(logits, rule, [0], None, {0: -3.0}) == 1


def test_a_bias_that_overflows_the_largest_is_no_token():
    """To +infinity; to -infinity it only rules the token out."""
    logits = np.array([3e38, 1.0, -3e38], np.float32)
    assert draw_token(logits, record(), (), None, {0: 3e38}) == NO_TOKEN
    assert draw_token(logits, record(), (), {1, 2}, {2: -3e38}) == 1


def test_zero_means_neither():
    """Records of today's steps, with and without the operands."""
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((9, VOCAB), dtype=np.float32)
    rules = np.array([record(seed_low=s) for s in range(9)], SAMPLING)
    words = rules.view(np.int32).reshape(9, -1)
    recent = np.zeros((1, 4), np.int32)
    tables = {
        "allowed": np.zeros((1, 2), np.int32),
        "bias": np.array([(3, 90.0)], LOGIT_BIAS).view(np.int32).reshape(1, 2),
    }
    plain = sample(logits=logits, sampling=words, recent=recent)
    assert (sample(logits=logits, sampling=words, recent=recent, **tables) == plain).all()
