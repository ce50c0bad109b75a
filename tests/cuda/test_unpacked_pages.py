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
from reference.exact.kv_storage import page_view, store
from reference.exact.rotation import rotated, rotated_back
from tests.cuda.emulated_step import DEVICE, OLDER, Bytes, rows_of, run_step
from tests.cuda.test_attention import (
    PARTS,
    SLOT_PAGES,
    SLOTS,
    Heads,
    attention,
    by_definition,
    step_memory,
    tokens_of,
    words_of,
)


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


@pytest.mark.parametrize("dtype", [I4R, I3R], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "most", "runs"),
    [
        (8, 2, 128, 0, 3, ((1, 70, 2),)),
        (4, 1, 64, 100, 4, ((1, 1060, 1), (0, 3, 1))),
        (2, 2, 128, 0, 9, ((0, 70, 1), (1, 0, 3), (0, 1200, 1))),
        (3, 1, 64, 100, 72, ((0, 1060, 25), (1, 90, 22))),
    ],
    ids=str,
)
def test_unpacked_pages_have_the_bits_of_the_definition(
    dtype: DType,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    most: int,
    runs: tuple[tuple[int, int, int], ...],
    folder: Path,
) -> None:
    """Few tokens and many, of both slots; a broken key; pages that nobody sees have garbage."""
    sizes, query = Heads(heads, kv_heads, head_dim, window), tokens_of(runs)
    graph, key, bucket = attention(sizes, dtype=dtype), ShapeKey(len(query), 0), ShapeKey(most, 0)
    rng = np.random.default_rng(heads * head_dim + window)
    kept = step_memory(graph, sizes, most, rng)
    pages = np.stack([rng.permutation(SLOT_PAGES) for _ in range(SLOTS)]).astype(np.int32)
    broken = rng.standard_normal((2, 1, kv_heads, head_dim)).astype(np.float32)
    broken[0, 0, -1, 3] = np.nan
    slot, position = int(query["slot"][0]), int(query["position"][0])
    where = np.array([pages[slot, position // 16]]), np.array([position % 16])
    store(page_view(kept["kv"], dtype, sizes.pool), *where, *broken)
    inputs = {
        "q": rng.standard_normal((key.tokens, sizes.width)).astype(np.float32),
        "page_table": pages,
        "query": words_of(query),
    }
    for device in (DEVICE, OLDER) if most > 16 else (DEVICE,):
        run_step(
            graph,
            (key, bucket),
            inputs,
            kept,
            {},
            folder,
            parts=PARTS,
            device=device,
            stand_ins=STAND_INS,
        )
        want = by_definition(inputs, kept["kv"], sizes, dtype)
        got = kept["y"].reshape(-1, sizes.width)[: key.tokens].reshape(want.shape)
        assert np.array_equal(got, want, equal_nan=True)
        assert np.isnan(want).any()
        assert np.isfinite(want).any()


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
