"""Attention kernels of the OpenCL tier: every code path, bit for bit against the definition."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.packets.ops import NUMBERS, OPS
from accel.packets.packet import ABSENT, PACKET
from accel.packets.rules import PART_HEADER, part_slots
from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import F16, F32, I12, Q8_0, DType
from reference.exact.kv_storage import page_view, store
from reference.ops.flash_attn_batched import flash_attn_batched
from reference.ops.kv_write_batched import kv_write_batched
from tests.long_cases import long_except
from tests.opencl.cores import Variant, run_by_cores, run_by_groups
from tests.ops.paged import Sequence, pool_of, random_sequence

Float32 = NDArray[np.float32]

KERNEL_OPS = ("flash_attn_part", "flash_attn", "flash_attn_batched", "kv_write_batched")
MARGIN = 3
UNWRITTEN = np.float32(12345.0)
UNUSED = 0xFF
"""Bytes of pages that nobody wrote: a NaN in most types, any integers in I12."""


VARIANTS = {
    "vnni": Variant((), True),
    "avx512": Variant(("__AVX512VNNI__",), False),
    "avx2": Variant(("__AVX512BW__", "__AVX512F__"), False),
    "portable": Variant(("__AVX512BW__", "__AVX512F__", "__AVX2__"), False),
    "work_groups": None,
}
"""Of the cores' code; None for the kernels that GPU tiers share."""


@dataclass(frozen=True)
class Call:
    """One call of attention: ``tokens`` are (slot, position)."""

    sequences: tuple[Sequence, ...]
    tokens: tuple[tuple[int, int], ...]
    q: Float32
    heads: int
    dtype: DType = F32
    scale: float = 0.125
    window: int = 0
    soft_cap: float = 0.0
    sinks: Float32 | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """tokens, heads, kv_heads, head_dim, window."""
        _, kv_heads, head_dim = self.sequences[0].keys.shape
        return len(self.tokens), self.heads, kv_heads, head_dim, self.window


def call_of(
    seed: int,
    lengths: tuple[int, ...],
    tokens: tuple[tuple[int, int], ...],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    **params: Any,
) -> Call:
    """Gaussian queries, keys and values."""
    sequences = tuple(
        random_sequence(seed + slot, length, kv_heads, head_dim)
        for slot, length in enumerate(lengths)
    )
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((len(tokens), heads * head_dim), dtype=np.float32)
    return Call(sequences, tokens, q, heads, **params)


class Attention:
    """The attention kernels, run on arrays of this process."""

    def __init__(self, variant: Variant | None) -> None:
        self.grouped = variant is None
        self._run = (
            run_by_groups() if variant is None else run_by_cores(variant, KERNEL_OPS, frozenset())
        )

    def run(self, call: Call, workers: int, slots: int | None = None) -> Float32:
        """y of the op for many tokens; of the two ops for few where there are ``slots``."""
        kv, page_table = pages_of(call)
        query = np.array([(0, slot, position, 0) for slot, position in call.tokens], np.int32)
        y = np.full((len(query), call.q.shape[1] + MARGIN), UNWRITTEN)
        reals = call.scale, call.soft_cap
        sources = call.q, kv, page_table, query
        if slots is None:
            packets = [packet("flash_attn_batched", (*sources, y, call.sinks), call.sizes, reals)]
        else:
            tokens, heads, _, head_dim, window = call.sizes
            part = PART_HEADER + -(-head_dim // 16) * 16
            parts = np.full((tokens, heads * slots * part), np.nan, np.float32)
            packets = [
                packet("flash_attn_part", (*sources, parts), (*call.sizes, slots), reals),
                packet(
                    "flash_attn",
                    (parts, query, y, call.sinks),
                    (tokens, heads, head_dim, window, slots),
                ),
            ]
        for one in packets:
            self.launch(one, call.dtype, workers)
        assert (y[:, -MARGIN:] == UNWRITTEN).all()
        return y[:, :-MARGIN]

    def launch(self, one: NDArray[np.void], dtype: DType, workers: int) -> None:
        """Run a packet over KV pages of ``dtype`` to its end."""
        one["dtype"] = dtype.ggml_id
        self._run(OPS[one["op"][0]].name, one, workers, dtype)


def packet(
    name: str,
    operands: tuple[NDArray[Any] | None, ...],
    sizes: tuple[int, ...],
    reals: tuple[float, ...] = (),
) -> NDArray[np.void]:
    """One packet over arrays of this process."""
    made = np.zeros(1, PACKET)
    made["op"] = NUMBERS[name]
    made["operand"] = ABSENT
    for index, array in enumerate(operands):
        if array is not None:
            made["operand"][0, index] = array.ctypes.data
            made["stride"][0, index] = array.shape[-1]
    made["size"][0, : len(sizes)] = sizes
    made["real"][0, : len(reals)] = reals
    return made


def pages_of(call: Call) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """The sequences in pages of the call's storage type, and the page table."""
    pool, page_table = pool_of(list(call.sequences))
    nbytes = math.prod(pool.shape[:-1]) * call.dtype.row_bytes(pool.shape[-1])
    kv = page_view(np.full(nbytes, UNUSED, np.uint8), call.dtype, pool.shape)
    for slot, sequence in enumerate(call.sequences):
        position = np.arange(len(sequence.keys), dtype=np.int32)
        page = page_table[slot, position // PAGE_TOKENS]
        store(kv, page, position % PAGE_TOKENS, sequence.keys, sequence.values)
    return kv, page_table


def defined(call: Call) -> Float32:
    """What the definition gives."""
    kv, page_table = pages_of(call)
    _, heads, kv_heads, head_dim, window = call.sizes
    return flash_attn_batched(
        q=call.q,
        kv=kv,
        page_table=page_table,
        query=np.array([(0, slot, position, 0) for slot, position in call.tokens], np.int32),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=call.scale,
        window=window,
        soft_cap=call.soft_cap,
        sinks=call.sinks,
    )


def check(attention: Attention, call: Call) -> None:
    """Blocks of tokens, and parts of tiles and of spans, whoever works on them. Work-groups, which
    a processor runs long, once of each."""
    expected = defined(call)
    context = max(len(sequence.keys) for sequence in call.sequences)
    most = part_slots(-(-context // PAGE_TOKENS) * PAGE_TOKENS, 64)
    ways = (1, None), (3, None), (2, most), (1, -(-context // 1024))
    for workers, slots in ways[1:] if attention.grouped else ways:
        got = attention.run(call, workers, slots)
        assert np.array_equal(got, expected, equal_nan=True), f"{workers} workers, {slots} slots"


@pytest.fixture(scope="module", params=long_except(VARIANTS, "portable"))
def attention(request: pytest.FixtureRequest) -> Attention:
    return Attention(VARIANTS[request.param])


def run_of(slot: int, first: int, count: int) -> tuple[tuple[int, int], ...]:
    """Tokens at neighbouring positions of a slot."""
    return tuple((slot, position) for position in range(first, first + count))


@pytest.mark.parametrize("head_dim", [1, 16, 17, 64, 80, 96, 128, 192, 576])
def test_head_sizes(attention: Attention, head_dim: int) -> None:
    """Whole and partial vectors, prompts and single tokens of several slots."""
    tokens = (*run_of(0, 0, 21), (1, 129), *run_of(2, 60, 8), (2, 3))
    check(attention, call_of(head_dim, (21, 130, 70), tokens, 4, 2, head_dim))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (12, 2), (5, 5)])
def test_groups_of_heads(attention: Attention, heads: tuple[int, int]) -> None:
    """Blocks whose rows are no multiple of those computed together."""
    check(attention, call_of(7, (90,), run_of(0, 50, 40), *heads, head_dim=32))


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(F16, 64), (F16, 40), (Q8_0, 64), (I12, 64), (I12, 96), (I12, 80), (I12, 6), (I12, 512)],
    ids=str,
)
@pytest.mark.parametrize("tokens", [(90, 40), (128, 2)], ids=str)
def test_storage(
    attention: Attention, dtype: DType, head_dim: int, tokens: tuple[int, int]
) -> None:
    """Pages of every type, read by many queries and by few."""
    check(attention, call_of(8, (130,), run_of(0, *tokens), 4, 2, head_dim, dtype=dtype))


@pytest.mark.parametrize("window", [1, 63, 64, 65, 1030])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_windows_and_soft_caps(attention: Attention, window: int, soft_cap: float) -> None:
    """Windows that cut tiles and spans."""
    tokens = (*run_of(0, 1000, 6), *run_of(0, 2060, 30), (1, 5), (0, 1023), (0, 1024))
    call = call_of(9, (2100, 6), tokens, 2, 1, 32, window=window, soft_cap=soft_cap)
    check(attention, call)


def test_spans_are_folded_before_they_are_merged(attention: Attention) -> None:
    """Contexts beyond one span, with strong keys in each."""
    call = call_of(10, (2300,), (*run_of(0, 2040, 20), (0, 2299)), 2, 1, 32)
    keys = call.sequences[0].keys.copy()
    keys[::517] *= 30
    check(attention, replace(call, sequences=(replace(call.sequences[0], keys=keys),)))


def test_sinks(attention: Attention) -> None:
    """Weak, strong and broken sinks; a head without one has the lowest."""
    sinks = np.array([0.5, -30.0, 4000.0, np.nan, np.inf, -np.inf], np.float32)
    call = call_of(11, (90, 1100), (*run_of(0, 60, 9), (1, 1099)), 6, 3, 32, sinks=sinks)
    check(attention, call)


def test_broken_rows_break_their_own_outputs(attention: Attention) -> None:
    """NaN and infinity in queries, keys and values, and magnitudes beyond and below 2^40."""
    call = call_of(12, (1100,), (*run_of(0, 55, 30), (0, 1050)), 4, 2, 32, window=70)
    q, keys, values = (
        call.q.copy(),
        *(x.copy() for x in (call.sequences[0].keys, call.sequences[0].values)),
    )
    q[3, 40], q[5, 7], q[8, 100] = np.nan, np.inf, 2.0**40
    q[9, :32], q[10, :32] = 0.0, 2.0**-41
    keys[60, 0, 5], keys[1000, 1, 2], values[70, 1, 31] = np.nan, -np.inf, np.inf
    values[20:24], keys[24:26], keys[26], values[27] = 0.0, 2.0**-42, -(2.0**39.5), 2.0**39
    values[30], keys[31] = 2.0**-40, 2.0**-140
    check(attention, replace(call, q=q, sequences=(Sequence(keys, values),)))


def test_scores_beyond_2_to_the_20_break_a_query(attention: Attention) -> None:
    """In the tile that holds the key, visible or not to others."""
    call = call_of(13, (80,), run_of(0, 40, 30), 2, 1, 32)
    keys = call.sequences[0].keys.copy()
    keys[50] *= 1e6
    check(attention, replace(call, sequences=(replace(call.sequences[0], keys=keys),)))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(F32, 17), (F16, 40), (Q8_0, 64), (I12, 64), (I12, 6)], ids=str
)
def test_pages_are_written(attention: Attention, dtype: DType, head_dim: int, workers: int) -> None:
    """Every byte of the pages, also those of rows that are broken, tiny or rounded up."""
    kv_heads, pages = 3, 5
    rng = np.random.default_rng(head_dim)
    positions = [0, 1, 15, 16, 40, 3]
    query = np.array([(0, 0, position, 0) for position in positions], np.int32)
    page_table = rng.permutation(pages)[:3].astype(np.int32)[None]
    k, v = rng.standard_normal((2, len(query), kv_heads * head_dim), dtype=np.float32)
    k[0, 2], v[1, 1], k[2, 3], v[3] = np.nan, np.inf, 2.0**40, 2.0**-41
    k[4], v[5, 0], v[5, 1:head_dim] = -0.0, 1.99999, 0.5
    nbytes = pages * 2 * PAGE_TOKENS * kv_heads * dtype.row_bytes(head_dim)
    shape = (pages, 2, PAGE_TOKENS, kv_heads, head_dim)
    got, expected = (page_view(np.full(nbytes, UNUSED, np.uint8), dtype, shape) for _ in range(2))
    sizes = (len(query), kv_heads * head_dim, PAGE_TOKENS, head_dim)
    operands = (k, v, query, page_table, got)
    attention.launch(packet("kv_write_batched", operands, sizes), dtype, workers)
    kv_write_batched(
        k=k,
        v=v,
        query=query,
        page_table=page_table,
        kv=expected,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    if dtype in (F32, F16):
        assert np.array_equal(got, expected, equal_nan=True)
    else:
        assert got.tobytes() == expected.tobytes()


def test_parts_take_little_beside_the_pages() -> None:
    """Tiles where a context is short or many workers want them, else spans."""
    assert part_slots(100, parts=2) == 2
    assert part_slots(1024, parts=2) == 16
    assert part_slots(32768, parts=2) == 32
    assert part_slots(32768, parts=64) == 64
