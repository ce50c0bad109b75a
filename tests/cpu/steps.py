"""Random attention steps: several slots, pages in random order, garbage where nothing is stored."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import F32, DType
from contract.spec import KV
from harness.parity.operands import broken_pages
from reference.cpu.attention import AttentionShape, paged_attention
from reference.exact.kv_storage import store
from reference.ops.flash_attn_batched import flash_attn_batched

MAX_POSITION = 140


@dataclass(frozen=True, slots=True)
class Step:
    """Operands of one attention node."""

    q: NDArray[np.float32]
    kv: NDArray[Any]
    page_table: NDArray[np.int32]
    query: NDArray[np.int32]
    shape: AttentionShape
    sinks: NDArray[np.float32] | None = None

    def by_definition(self) -> NDArray[np.float32]:
        """The output of the opcode's definition."""
        shape = self.shape
        with np.errstate(all="ignore"):
            return flash_attn_batched(
                q=self.q, kv=self.kv, page_table=self.page_table, query=self.query,
                heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
                scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap, sinks=self.sinks,
            )  # fmt: skip

    def by_kernel(self, threads: int = 1) -> NDArray[np.float32]:
        """The output of the CPU tier's kernel, into memory full of NaN."""
        out = np.full_like(self.q, np.nan)
        operands = self.q, self.kv, self.page_table, self.query, self.shape
        paged_attention(*operands, out, self.sinks, threads)
        return out


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """== everywhere, NaN meeting NaN."""
    return bool(((a == b) | (np.isnan(a) & np.isnan(b))).all())


def make_step(
    seed: int,
    tokens: list[tuple[int, int]],
    shape: AttentionShape,
    dtype: DType = F32,
    sinks: bool = False,
) -> Step:
    """A step of (slot, position) tokens over a pool that is NaN outside the stored positions."""
    rng = np.random.default_rng(seed)
    slots = 1 + max(slot for slot, _ in tokens)
    slot_pages = max(position for _, position in tokens) // PAGE_TOKENS + 1
    pool = slots * slot_pages + 2
    page_table = rng.permutation(pool)[: slots * slot_pages].reshape(slots, slot_pages)
    pages = (pool, 2, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    kv = broken_pages(dtype, pages)
    for slot in range(slots):
        length = 1 + max((p for s, p in tokens if s == slot), default=-1)
        page = page_table[slot].repeat(PAGE_TOKENS)[:length]
        rows = rng.standard_normal((2, length, *pages[3:]), dtype=np.float32)
        store(kv, page, np.arange(length) % PAGE_TOKENS, *rows)
    query = np.array([(0, slot, position, 0) for slot, position in tokens], np.int32)
    q = rng.standard_normal((len(tokens), shape.heads * shape.head_dim), dtype=np.float32)
    scores = 3 * rng.standard_normal(shape.heads, dtype=np.float32) if sinks else None
    return Step(q, kv, page_table.astype(np.int32), query, shape, scores)


@st.composite
def shapes(draw: st.DrawFn) -> AttentionShape:
    """Head layouts, windows and soft caps."""
    kv_heads = draw(st.integers(1, 2))
    return AttentionShape(
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 16, 24, 40, 64])),
        scale=draw(st.sampled_from([1.0, 0.125, 0.3])),
        window=draw(st.sampled_from([0, 0, 1, 5, 63, 64, 65, 100])),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 3.0, 50.0])),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Chunks of several slots, cut and interleaved."""
    tokens: list[tuple[int, int]] = []
    starts: dict[int, int] = {}
    for _ in range(draw(st.integers(1, 4))):
        slot = draw(st.integers(0, 2))
        first = starts.get(slot, draw(st.sampled_from([0, 3, 15, 16, 60, 63, 64, 100, 127])))
        count = min(draw(st.integers(1, 8)), MAX_POSITION - first)
        tokens += [(slot, first + index) for index in range(count)]
        starts[slot] = first + count
    shape = draw(shapes())
    dtypes = [dtype for dtype in KV if shape.head_dim % dtype.block_elements == 0]
    dtype, sinks = draw(st.sampled_from(dtypes)), draw(st.booleans())
    return make_step(draw(st.integers(0, 2**32 - 1)), tokens, shape, dtype, sinks)
