"""What a request may ask of its tokens: masks are packed bits, everything else is checked."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import RequestError
from contract.types import Request
from reference.limits import Limits, mask_words
from reference.sched.constraints import bias_records, check_constraints, pack_mask

LIMITS = Limits(1, 64, 4, masks=1, biases=3, top_log_probabilities=5)
VOCAB = 100
LARGEST = float(np.finfo(np.float32).max)


@given(st.integers(1, 200).flatmap(lambda v: st.tuples(st.just(v), st.sets(st.integers(0, v - 1)))))
def test_a_mask_says_which_tokens_are_allowed(case):
    """Bit v mod 32 of word v / 32, and no bit behind the vocabulary."""
    vocab, tokens = case
    mask = pack_mask(tokens, vocab)
    assert mask.shape == (mask_words(vocab),)
    places = range(32 * len(mask))
    assert {v for v in places if int(mask[v // 32]) >> (v % 32) & 1} == tokens
    assert (pack_mask(np.array(sorted(tokens), np.int32), vocab) == mask).all()


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_mask_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match="outside 0 to 99"):
        pack_mask((1, token), VOCAB)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((True, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1.0, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ({"logit_bias": ((1, -math.inf),)}, "logit_bias"),
        ({"logit_bias": ((1, 2 * LARGEST),)}, "logit_bias"),
        ({"logit_bias": ((1, "1"),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (2, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": tuple((token, 1.0) for token in range(4))}, "logit_bias"),
        ({"logit_bias": (1, 2)}, "logit_bias"),
        ({"log_probabilities": 6}, "log_probabilities"),
        ({"log_probabilities": -1}, "log_probabilities"),
        ({"log_probabilities": True}, "log_probabilities"),
    ],
)
def test_what_cannot_be_had_is_named(changes, field):
    request = replace(Request(1, (5,), 3), **changes)
    with pytest.raises(RequestError) as caught:
        check_constraints(request, LIMITS, VOCAB, masked=False)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "masked", "field"),
    [
        ({"logit_bias": ((1, 1.0),)}, False, "logit_bias"),
        ({"log_probabilities": 0}, False, "log_probabilities"),
        ({}, True, "allowed"),
    ],
)
def test_an_engine_built_without_them_says_so(changes, masked, field):
    plain = Limits(1, 64, 4)
    request = replace(Request(1, (5,), 3), **changes)
    with pytest.raises(RequestError) as caught:
        check_constraints(request, plain, VOCAB, masked=masked)
    assert caught.value.field == field
    check_constraints(Request(1, (5,), 3), plain, VOCAB, masked=False)


def test_everything_in_range_is_accepted():
    bias = ((0, 2), (99, -LARGEST), (5, LARGEST))
    request = Request(1, (5,), 3, logit_bias=bias, log_probabilities=5)
    check_constraints(request, LIMITS, VOCAB, masked=True)
    assert [tuple(record) for record in bias_records(request).tolist()] == list(bias)
    assert len(bias_records(Request(1, (5,), 3))) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("masks", -1), ("masks", 17), ("biases", -1), ("biases", 4097), ("top_log_probabilities", 21)],
)
def test_limits_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        replace(LIMITS, **{name: value})
