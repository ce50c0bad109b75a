"""Pages copied, saved and loaded in the queue of steps: the same bytes, on every tier."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import F32, KV_DTYPES, DType
from contract.execution import ExecutableGraph
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.inputs import pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.records import QUERY_TOKEN
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, Tier
from reference.memory import row_copies
from reference.memory.page_copies import PageCopies
from reference.memory.row_copies import LOADS_IN_FLIGHT
from tests.memory.recurrent_layers import graph as recurrent_layers
from tests.memory.test_recurrent import WAYS, open_way

PAGES = 5
HEADS = {"state.kv[0]": (2, 64), "state.kv[1]": (1, 32)}
"""Heads and their size in each pool."""
MOST = ShapeKey(PAGE_TOKENS, 0)


def writer(kv_dtype: DType) -> Graph:
    """Keys and values of a step's tokens into two pools."""
    builder = GraphBuilder("write pages")
    query = builder.request("request.query", "tokens", 4)
    page_table = builder.request("request.page_table", 1, PAGES)
    for name, (heads, size) in HEADS.items():
        kv = builder.buffer(name, BufferKind.STATE, kv_dtype, (PAGES, 2, PAGE_TOKENS, heads, size))
        k, v = (
            builder.buffer(f"{part}.{name}", BufferKind.REQUEST, F32, ("tokens", heads * size))
            for part in "kv"
        )
        builder.emit(
            Opcode.KV_WRITE_BATCHED, k=k, v=v, query=query, page_table=page_table, kv=kv,
            kv_heads=heads, head_dim=size,
        )  # fmt: skip
    return builder.build()


class Pools:
    """The pools of ``writer`` on a tier, steps that write them and the copies under test."""

    def __init__(self, tier: Tier, kv_dtype: DType) -> None:
        self.tier = tier
        self.graph = writer(kv_dtype)
        self.buffers: dict[str, Buffer] = {
            decl.name: tier.alloc(decl, buffer_bytes(decl, MOST))
            for decl in self.graph.of_kind(BufferKind.STATE)
        }
        self._executable = ExecutableGraph(tier, self.graph, self.buffers, MOST)
        self.copies = PageCopies(tier, self.graph, self.buffers)
        self.fence: Fence | None = None

    def write(self, page: int, seed: int) -> None:
        """Submit a step that fills a page with what ``seed`` says; waits for nothing."""
        rng = np.random.default_rng(seed)
        query = np.array([(0, 0, place, 0) for place in range(PAGE_TOKENS)], QUERY_TOKEN)
        inputs: dict[str, NDArray[np.void] | NDArray[np.float32] | NDArray[np.int32]] = {
            "request.query": query,
            "request.page_table": np.full((1, PAGES), page, np.int32),
        }
        for name, (heads, size) in HEADS.items():
            for part in "kv":
                values = rng.standard_normal((PAGE_TOKENS, heads * size), dtype=np.float32)
                inputs[f"{part}.{name}"] = values
        self.fence = self._executable.replay(pack_inputs(self._executable.inputs, MOST, inputs))

    def read(self) -> list[bytes]:
        """What each page holds in all pools, when everything submitted is done."""
        self.write(PAGES - 1, 0)
        self.tier.wait(self.fence)
        parts = []
        for buffer in self.buffers.values():
            size = buffer.nbytes // PAGES
            parts.append([self.tier.read(buffer, p * size, size).tobytes() for p in range(PAGES)])
        return [b"".join(page) for page in zip(*parts, strict=True)]

    def close(self) -> None:
        """Free all buffers, once no step uses them any more."""
        if self.fence is not None:
            self.tier.wait(self.fence)
        self.copies.close()
        for buffer in self.buffers.values():
            self.tier.free(buffer)


@pytest.fixture(scope="module", params=WAYS)
def tier(request) -> Iterator[Tier]:
    with open_way(request.param) as opened:
        yield opened


@pytest.fixture(params=KV_DTYPES, ids=str)
def pools(tier, request) -> Iterator[Pools]:
    built = Pools(tier, request.param)
    yield built
    built.close()


def written(pools: Pools, *seeds: int) -> list[bytes]:
    """What pages filled with ``seeds`` hold."""
    for page, seed in enumerate(seeds):
        pools.write(page, seed)
    return pools.read()[: len(seeds)]


def test_a_copy_has_the_bytes_its_source_has_at_that_point_of_the_queue(pools):
    one, two, three = written(pools, 1, 2, 3)
    assert len({one, two, three}) == 3
    pools.copies.copy(0, 3)
    pools.write(0, 2)
    pools.copies.copy(0, 1)
    pools.copies.copy(2, 0)
    assert pools.read()[:4] == [three, two, three, one]


def test_a_saved_page_comes_back_after_its_page_was_given_away(pools):
    """Saved, overwritten by steps that nobody waits for, loaded elsewhere, twice."""
    one, two, three = written(pools, 1, 2, 3)
    pools.write(1, 3)
    saved = pools.copies.save(0)
    pools.write(0, 2)
    again = pools.copies.save(0)
    pools.write(0, 3)
    pools.copies.load(saved, 1)
    pools.copies.load(again, 2)
    pools.copies.load(saved, 3)
    assert pools.read()[:4] == [three, one, two, one]
    assert saved.bytes().nbytes == pools.copies.page_bytes == len(one)


def test_a_step_after_a_load_writes_into_what_was_loaded(pools):
    """The order of the queue in the other direction."""
    one, two = written(pools, 1, 2)
    saved = pools.copies.save(0)
    pools.copies.load(saved, 1)
    pools.write(1, 2)
    pools.copies.copy(1, 2)
    assert pools.read()[:3] == [one, two, two]


def test_any_bits_survive(pools):
    """Bytes that are no numbers: infinities, NaN that signal, denormals."""
    pools.read()
    rng = np.random.default_rng(5)
    for buffer in pools.buffers.values():
        words = rng.choice(
            np.array([0x7F800001, 0xFFC12345, 0x00000001, 0x80000000, 0x7F800000], np.uint32),
            buffer.nbytes // 4,
        )
        pools.tier.write(buffer, 0, words.view(np.uint8))
    before = pools.read()
    pools.copies.copy(0, 1)
    pools.copies.load(pools.copies.save(2), 3)
    after = pools.read()
    assert after[:4] == [before[0], before[0], before[2], before[2]]


def test_more_pages_than_are_under_way_at_once_come_in_order(pools):
    one, two = written(pools, 1, 2)
    saved = [pools.copies.save(page) for page in (0, 1)]
    for index in range(2 * LOADS_IN_FLIGHT + 1):
        pools.copies.load(saved[index % 2], 2 + index % 2)
    assert pools.read()[:4] == [one, two, one, two]


def test_no_copy_lowers_anything(pools):
    """All of it was, when the copies were made."""
    graphs = (pools.copies._copy, pools.copies._save, pools.copies._load)
    recorded = [graph.recorded for graph in graphs]
    assert all(recorded)
    pools.copies.copy(0, 1)
    pools.copies.load(pools.copies.save(1), 2)
    assert recorded == [graph.recorded for graph in graphs]


def test_a_page_there_is_not_is_a_broken_caller(pools):
    with pytest.raises(AssertionError, match=f"page {PAGES} is not one of"):
        pools.copies.copy(0, PAGES)
    with pytest.raises(AssertionError, match="to itself"):
        pools.copies.copy(1, 1)


def test_a_graph_without_pools_has_no_pages(tier):
    with pytest.raises(ValueError, match="no KV pools"):
        PageCopies(tier, recurrent_layers(1), {})


def test_pages_loaded_together_are_those_loaded_one_by_one(pools, monkeypatch):
    """Two submissions of two pages, then one of the page that is left."""
    monkeypatch.setattr(row_copies, "BLOCK_ROWS", 2)
    one, two, three = written(pools, 1, 2, 3)
    saved = [pools.copies.save(page) for page in (2, 1, 0)]
    pools.write(1, 3)
    pools.copies.load_all([*saved, *saved[:2]], [0, 1, 2, 3, 1])
    assert pools.read()[:4] == [three, two, one, three]
    pools.copies.load_all(saved[2:], [3])
    assert pools.read()[3] == one


def test_several_pages_are_loaded_by_one_submission(pools, monkeypatch):
    """The property above is about something."""
    monkeypatch.setattr(row_copies, "BLOCK_ROWS", 2)
    written(pools, 1, 2, 3)
    saved = [pools.copies.save(page) for page in range(3)]
    pools.copies.load_all(saved, [0, 1, 2])
    block = pools.copies._load_rows
    assert block is not None
    assert block.recorded == (ShapeKey(0, 2),)
