"""Attention over pages of rotated rows: unpacked to I12 pages, then by the tuned kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda.plan import plan_launches
from accel.cuda.unpacked_pages import unpack_rotated
from accel.packets.packet import INPUT_MEMORY, SCRATCH_MEMORY
from accel.packets.rules import lower_graph
from contract.dtypes import I3R, I4R, DType
from contract.shape_key import ShapeKey
from reference.exact.coded_rows import rotated, rotated_back
from tests.cuda.emulated_step import DEVICE, OLDER, Bytes, rows_of
from tests.cuda.test_attention import PARTS, Heads, attention, check_runs


def rotate_plainly(packet: np.void, key: ShapeKey, scratch: Bytes, inputs: Bytes) -> None:
    """Execute one rotate_heads, of rows that lie one behind the other."""
    _, heads, head_dim, back = packet["size"][:4].tolist()
    count = key.tokens * heads * head_dim

    def rows(number: int) -> NDArray[Any]:
        stored = int(packet["operand"][number])
        if stored & (SCRATCH_MEMORY | INPUT_MEMORY):
            shape = key.tokens, heads * head_dim
            return rows_of(packet, number, shape, np.float32, (scratch, inputs))
        outside = (ctypes.c_float * count).from_address(stored)
        return np.frombuffer(outside, np.float32).reshape(key.tokens, -1)

    x = rows(0).reshape(-1, heads, head_dim)
    rows(1)[:] = (rotated_back(x) if back else rotated(x)).reshape(key.tokens, -1)


STAND_INS = MappingProxyType({"rotate_heads": rotate_plainly})


CASES = [
    (Heads(8, 2, 128), 3, ((1, 70, 3),)),
    (Heads(4, 2, 64, 100), 4, ((1, 1060, 1), (0, 3, 2))),
    (Heads(2, 2, 128), 9, ((0, 70, 1), (1, 0, 3), (0, 1200, 1))),
    (Heads(3, 1, 64, 100), 72, ((0, 1060, 25), (1, 90, 22))),
]
"""Few tokens and many, as runs of (slot, first position, tokens)."""


@pytest.mark.parametrize("dtype", [I4R, I3R], ids=str)
@pytest.mark.parametrize(("heads", "most", "runs"), CASES, ids=str)
def test_unpacked_pages_have_the_bits_of_the_definition(
    dtype: DType, heads: Heads, most: int, runs: tuple[tuple[int, int, int], ...], folder: Path
) -> None:
    """On devices with products of warp groups and, for many tokens, on older ones."""
    for device in (DEVICE, OLDER) if most > 16 else (DEVICE,):
        check_runs(heads, most, runs, folder, device, dtype, STAND_INS)


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_layer_is_unpacked_by_one_launch(tokens: int) -> None:
    """The tuned kernels of I12 pages read what it writes; queries and results are rotated."""
    sizes, bucket = Heads(8, 2, 128), ShapeKey(tokens, 0)
    graph = attention(sizes, dtype=I4R)
    step = unpack_rotated(lower_graph(graph, bucket, PARTS, "cuda"), graph, bucket)
    entries = [one.entry for one in plan_launches(step.ops, DEVICE, step.scratch).launches]
    assert entries[1] == "unpack_pages"
    assert entries[2] in ("attention_spans", "attention_tokens", "attention_groups")
    assert entries[0] == entries[3] == "launch_rotate_heads"
    assert len(entries) == 4
