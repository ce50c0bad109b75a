"""The CPU tier's attention kernel has the bits of the definition, broken values included."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from contract.arithmetic import KV_TILE, PAGE_TOKENS
from contract.dtypes import F16, F32, I12
from reference.cpu.attention import AttentionShape
from tests.cpu.steps import Step, make_step, same, steps

ONE_HEAD = AttentionShape(heads=1, kv_heads=1, head_dim=16, scale=0.25)


def stored(step: Step, slot: int, position: int) -> NDArray[Any]:
    """The key and value rows of one position, [2, kv_heads, head_dim], to be changed in place."""
    page = step.page_table[slot, position // PAGE_TOKENS]
    return step.kv[page, :, position % PAGE_TOKENS]


@given(step=steps())
@settings(max_examples=120, deadline=None)
def test_kernel_equals_definition(step):
    """Any step, one thread and two; no garbage page is ever seen."""
    expected = step.by_definition()
    assert np.isfinite(expected).all()
    assert (step.by_kernel(threads=1) == expected).all()
    assert (step.by_kernel(threads=2) == expected).all()


@given(step=steps())
@settings(max_examples=40, deadline=None)
def test_tokens_do_not_see_each_other(step):
    """Batch and chunk invariance: every token alone gives the row it gets in the step."""
    together = step.by_kernel()
    for row in range(len(step.query)):
        at = slice(row, row + 1)
        alone = replace(step, q=step.q[at], query=step.query[at])
        assert (alone.by_kernel() == together[at]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
def test_later_position_does_not_reach_earlier_queries(poison, side):
    """A masked position's value is not read (rule R6), not even to multiply it by zero."""
    step = make_step(1, [(0, 60), (0, 61), (0, 62), (0, 63), (0, 64)], ONE_HEAD)
    stored(step, 0, 63)[side] = poison
    got = step.by_kernel()
    assert np.isfinite(got[:3]).all()
    assert not np.isfinite(got[3:]).all()
    assert same(got, step.by_definition())


def test_position_that_left_the_window_is_not_read():
    """A broken value before the window changes nothing."""
    windowed = AttentionShape(heads=1, kv_heads=1, head_dim=16, scale=0.25, window=4)
    step = make_step(2, [(0, 70), (0, 71)], windowed)
    before = step.by_kernel()
    stored(step, 0, 66)[:] = np.nan
    stored(step, 0, 3)[:] = np.inf
    assert (step.by_kernel() == before).all()


def test_tile_of_a_broken_key():
    """It is not a missing tile: the output is NaN, as defined."""
    step = make_step(3, [(0, KV_TILE)], ONE_HEAD)
    step.q[:] = -1.0
    stored(step, 0, KV_TILE)[0] = np.inf
    assert np.isnan(step.by_definition()).all()
    assert np.isnan(step.by_kernel()).all()


def test_i12_gives_the_bits_of_f32():
    """Its pages hold the integers that binary32 pages become."""
    shape = AttentionShape(heads=4, kv_heads=2, head_dim=24, scale=0.2, window=70)
    tokens = [(0, position) for position in range(60, 140)]
    f32, i12 = (make_step(5, tokens, shape, dtype) for dtype in (F32, I12))
    assert (f32.by_kernel() == i12.by_kernel()).all()
    assert (f32.by_kernel() != make_step(5, tokens, shape, F16).by_kernel()).any()


def test_no_tokens():
    """An empty step is not an error."""
    step = make_step(4, [(0, 3)], ONE_HEAD)
    none = replace(step, q=step.q[:0], query=step.query[:0])
    assert none.by_kernel().shape == (0, 16)
