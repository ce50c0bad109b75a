"""Attention for matrix units, whose work the items of a subgroup do here: C++ of Metal's text
beside the definition, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.kernels.source import Language, Module, module_source
from contract.dtypes import I12, DType
from tests.kernels.metal_modules import compiled
from tests.opencl.test_attention import Attention, Call, call_of, defined

MODULE = Module("flash_attn_tiles", I12)
GROUPS = 3
"""Fewer than there are blocks of queries."""


class Tiles(Attention):
    """The kernel, or another ``text`` of it."""

    def __init__(self, folder: Path, text: str = "") -> None:
        launch = compiled(MODULE, text or module_source(Language.METAL, MODULE), folder)

        def run(op: str, one: NDArray[np.void], groups: int, dtype: DType) -> None:
            assert launch(one.ctypes.data, groups)

        self._run = run


@pytest.fixture(scope="module")
def tiles(kernel_cache: Path) -> Tiles:
    return Tiles(kernel_cache)


def prompt(slot: int, first: int, end: int) -> tuple[tuple[int, int], ...]:
    """The tokens of a slot's positions from ``first`` to before ``end``."""
    return tuple((slot, position) for position in range(first, end))


def made(seed: int, lengths: tuple[int, ...], *runs: tuple[int, int, int], **params: Any) -> Call:
    """A call over sequences of these lengths, of the tokens of ``runs``."""
    tokens = tuple(token for run in runs for token in prompt(*run))
    return call_of(seed, lengths, tokens, dtype=I12, **params)


SINKS = np.linspace(-2, 3, 6, dtype=np.float32)
CALLS = {
    "blocks-of-32-tokens": made(1, (40,), (0, 0, 40)),
    "heads-of-128": made(2, (200,), (0, 150, 190), heads=8, head_dim=128),
    "two-slots": made(3, (100, 70), (0, 80, 90), (1, 60, 70), kv_heads=1, head_dim=128),
    "window": made(4, (300,), (0, 250, 280), head_dim=128, window=70),
    "sinks": made(5, (150,), (0, 110, 150), heads=6, head_dim=96, sinks=SINKS),
    "spans": made(6, (2100,), (0, 2080, 2090), (0, 5, 6), heads=2, kv_heads=1),
    "one-head-each": made(7, (90,), (0, 10, 90), heads=2, head_dim=32),
}


@pytest.mark.parametrize("name", CALLS)
def test_tiles_have_the_bits_of_the_definition(tiles: Tiles, name: str) -> None:
    found = tiles.run(CALLS[name], GROUPS)
    assert np.isfinite(found).all()
    assert np.array_equal(found, defined(CALLS[name]))


@pytest.mark.parametrize("broken", ["q", "keys", "values"])
def test_what_is_not_finite_stays_in_its_head(tiles: Tiles, broken: str) -> None:
    """A query without a finite row, and a key and a value that some queries see."""
    call = made(8, (70,), (0, 40, 70), heads=4, head_dim=64)
    if broken == "q":
        call.q[3, 5] = np.inf
    else:
        getattr(call.sequences[0], broken)[50, 1, 7] = np.nan
    found = tiles.run(call, GROUPS)
    assert np.isnan(found).any()
    assert np.isfinite(found).any()
    assert np.array_equal(found, defined(call), equal_nan=True)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("2u * item + key % 2u", "2u * item + (key + 1u) % 2u"),
        ("SHUFFLED_F32(sum, 2u >> step)", "SHUFFLED_F32(sum, 1u << step)"),
        ("(number + 1u) % SPAN_TILES", "number % SPAN_TILES"),
        ("SCALE_SUM(of_low, 16)", "SCALE_SUM(of_low, 15)"),
    ],
)
def test_wrong_kernels_are_noticed(text: str, instead: str, kernel_cache: Path) -> None:
    """Negative controls: keys in places of others, a sum in another order, spans that end
    elsewhere, a wrong weight."""
    kernel = module_source(Language.METAL, MODULE)
    assert text in kernel
    call = CALLS["spans"]
    found = Tiles(kernel_cache, kernel.replace(text, instead)).run(call, GROUPS)
    assert not np.array_equal(found, defined(call), equal_nan=True)
