"""Attention for matrix units, whose work the items of a subgroup do here: C++ of Metal's text
beside the definition, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.kernels.source import Language, Module, module_source
from accel.packets.binding import lone_packet
from contract.arrays import Floats
from contract.dtypes import I12
from contract.opcodes import Opcode
from harness.parity.cases import Case
from harness.parity.execute import Example, example
from harness.parity.shape import OpShape, Run
from tests.kernels.metal_modules import compiled

MODULE = Module("flash_attn_tiles", I12)
GROUPS = 3
"""Fewer than there are blocks of queries."""


def attended(*runs: Run, kind: str = "normal", **given: Any) -> Case:
    """Attention of the tokens of ``runs`` over I12 pages."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "scale": 0.125} | given
    absent = frozenset({"sinks"} - {*given})
    sizes.pop("sinks", None)
    shape = OpShape("-".join(map(str, runs)), sizes, runs, absent)
    return Case(Opcode.FLASH_ATTN_BATCHED, I12, shape, kind, 0)


CASES = {
    "blocks-of-32-tokens": attended((0, 0, 40)),
    "heads-of-128": attended((0, 150, 40), heads=8, head_dim=128),
    "two-slots": attended((0, 80, 10), (1, 60, 10), kv_heads=1, head_dim=128),
    "window": attended((0, 250, 30), head_dim=128, window=70),
    "sinks": attended((0, 110, 40), heads=6, head_dim=96, sinks=1),
    "spans": attended((0, 2080, 10), (1, 5, 1), heads=2, kv_heads=1),
    "one-head-each": attended((0, 10, 80), heads=2, head_dim=32),
    **{kind: attended((0, 40, 30), kind=kind) for kind in ("nan", "inf", "scales")},
}


def tiled(known: Example, folder: Path, text: str = "") -> Floats:
    """y of the kernel, or of another ``text`` of it."""
    given, sizes = known.operands, known.case.sizes
    y = np.full_like(given["q"], 12345.0)
    names = ("q", "kv", "page_table", "query", "y", "sinks")
    arrays = [given.get(name) if name != "y" else y for name in names]
    shape = [sizes.get(name, 0) for name in ("tokens", "heads", "kv_heads", "head_dim", "window")]
    packet = lone_packet([0] * 5, shape)
    for index, array in enumerate(arrays):
        if array is not None:
            packet["operand"][0, index] = array.ctypes.data
            packet["stride"][0, index] = array.shape[-1]
    packet["real"][0, :2] = known.case.params["scale"], 0.0
    packet["dtype"] = I12.ggml_id
    run = compiled(MODULE, text or module_source(Language.METAL, MODULE), folder)
    assert run(packet.ctypes.data, GROUPS)
    return y


@pytest.mark.parametrize("name", CASES)
def test_tiles_have_the_bits_of_the_definition(name, kernel_cache):
    """Blocks of queries that are whole and others, windows, sinks, spans; rows that break."""
    known = example(CASES[name])
    expected = known.expected["y"]
    assert np.isfinite(expected).any()
    assert np.isfinite(expected).all() == (name not in ("nan", "inf"))
    assert np.array_equal(tiled(known, kernel_cache), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("2u * item + key % 2u", "2u * item + (key + 1u) % 2u"),
        ("SHUFFLED_F32(sum, 2u >> step)", "SHUFFLED_F32(sum, 1u << step)"),
        ("(number + 1u) % SPAN_TILES", "number % SPAN_TILES"),
        ("SCALE_SUM(of_low, 16)", "SCALE_SUM(of_low, 15)"),
    ],
)
def test_wrong_kernels_are_noticed(text, instead, kernel_cache):
    """Negative controls: keys in places of others, a sum in another order, spans that end
    elsewhere, a wrong weight."""
    kernel = module_source(Language.METAL, MODULE)
    assert text in kernel
    known = example(CASES["spans"])
    found = tiled(known, kernel_cache, kernel.replace(text, instead))
    assert not np.array_equal(found, known.expected["y"], equal_nan=True)
