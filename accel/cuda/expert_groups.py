"""Launches for experts of many tokens: tokens of one expert are multiplied together, in chunks of a
table that the device computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.cuda.device import Device
from accel.cuda.expert_block import ExpertBlock, formats_of, gate_macros
from accel.cuda.packed_tiles import UNIT_ROWS, unit_bytes, unit_count
from accel.cuda.runs import operand_indices, size_indices
from accel.cuda.tuned import KernelLaunch
from accel.packets.step import Op
from contract.dtypes import DType

FEW_TOKENS = 4
"""Most tokens for which each token computes its experts by itself."""
ROUTER_TOKENS = 8
"""Tokens of a block of the router in steps of more than FEW_TOKENS."""
SPAN_UNITS = 4
CHUNK_UNITS = 2
"""Units that a warp copies at a time."""
SLOTS = 1
BLOCK_WARPS = 16
DOWN_SHAPES = tuple(
    (n, warps, slots) for n, warps in ((2, 8), (1, 16)) for slots in (6, 5, 4, 3, 2)
)
DOWN_TILES = 2
"""Tiles of a warp for each chunk of FOUR_ROWS tokens, whose h all blocks convert to integers."""
FEW_GATES_SHAPES = tuple(
    (n, warps, slots) for n, warps in ((2, 16), (1, 16), (1, 8)) for slots in (4, 3, 2)
)
"""Blocks of a multiprocessor, warps of a block and units that a warp copies ahead, of launches that
pass over chunks, tried in this order."""
BARRIER_BYTES = 8
RESERVED_BYTES = 1024
"""Shared memory that the device reserves for each block."""
ROW_BYTES, ROW_PADDING = 512 + 32 + 4, 64
"""Shared memory of a token and unit, of a chunk of more than FOUR_ROWS tokens with padding."""
FOUR_ROWS = 4
"""Tokens of a chunk whose products have both parts of each as columns."""
CHUNK_WORDS = 4
ORDER_THREADS = 1024
TOTAL_THREADS = 256
FOUR_ROWS_TOKENS = 256
"""Most tokens of a step whose chunks have FOUR_ROWS, if those fit."""
CHUNK_TOKENS = 24
"""Tokens of other chunks."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Tokens of a chunk, most chunks of a step, and the word offset and the words of the table."""

    tokens: int
    chunks: int
    table_at: int
    table_words: int


def router_tokens(router: Op) -> int:
    """Tokens of a block of the router."""
    return FEW_TOKENS if router.count.maximum <= FEW_TOKENS else ROUTER_TOKENS


def router_words(ops: Sequence[Op], block: ExpertBlock) -> int:
    """Words of workspace in which the router counts its blocks."""
    return -(-ops[block.norm].count.maximum // router_tokens(ops[block.router]))


def grouping(ops: Sequence[Op], block: ExpertBlock, device: Device) -> Grouping | None:
    """How the tokens of a step are grouped; None where they are few or do not fit."""
    tokens = ops[block.norm].count.maximum
    if tokens <= FEW_TOKENS:
        return None
    few = _grouping(ops, block, FOUR_ROWS, device) if tokens <= FOUR_ROWS_TOKENS else None
    return few or _grouping(ops, block, CHUNK_TOKENS, device)


def _grouping(ops: Sequence[Op], block: ExpertBlock, rows: int, device: Device) -> Grouping | None:
    tokens, pairs = ops[block.norm].count.maximum, _pairs(ops, block)
    experts = ops[block.router].max_sizes()["rows"]
    chunks = min(pairs, experts + pairs // rows)
    if block.shared_gate is not None:
        chunks += -(-tokens // rows)
    if rows == FOUR_ROWS:
        if _few_gates_shape(ops, block, (rows, chunks), device) is None:
            return None
    elif (
        _spans(ops, block) > BLOCK_WARPS // 2 or _gate_bytes(ops, block, rows) > device.shared_bytes
    ):
        return None
    if _down_shape(ops, block, (rows, chunks), device) is None:
        return None
    words = 1 + CHUNK_WORDS * chunks + pairs
    return Grouping(rows, chunks, router_words(ops, block), words)


def _pairs(ops: Sequence[Op], block: ExpertBlock) -> int:
    return ops[block.norm].count.maximum * ops[block.gates].max_sizes()["used"]


def grouped_launches(
    ops: Sequence[Op], block: ExpertBlock, grouped: Grouping, device: Device
) -> tuple[tuple[KernelLaunch, ...], tuple[KernelLaunch, ...]]:
    """The launches after the router: those that make h, and those that use it."""
    macros = {
        "HELD_UNITS": 1,
        "USED": ops[block.gates].max_sizes()["used"],
        "EXPERTS": ops[block.router].max_sizes()["rows"],
        "CHUNK_ROWS_MAX": grouped.tokens,
        "MAX_CHUNKS": grouped.chunks,
        "TABLE_AT": grouped.table_at,
    }
    gates = _few_gates if grouped.tokens == FOUR_ROWS else _gates
    return (
        (order_launch(ops, block, macros), gates(ops, block, grouped, macros, device)),
        (_downs(ops, block, grouped, macros, device), total_launch(ops, block)),
    )


def _spans(ops: Sequence[Op], block: ExpertBlock) -> int:
    return -(-_units(ops[block.gates]) // SPAN_UNITS)


def _units(product: Op) -> int:
    return unit_count(product.max_sizes()["columns"])


def _tiles(product: Op) -> int:
    return -(-product.max_sizes()["rows"] // UNIT_ROWS)


def _block_bytes(units: int, rows: int, warps: int, formats: Sequence[DType]) -> int:
    ring = SLOTS * (CHUNK_UNITS * max(map(unit_bytes, formats)) + BARRIER_BYTES)
    return units * rows * (ROW_BYTES + ROW_PADDING) + warps * ring


def _gate_tiles(ops: Sequence[Op], block: ExpertBlock) -> int:
    return BLOCK_WARPS // (2 * _spans(ops, block))


def _gate_warps(ops: Sequence[Op], block: ExpertBlock) -> int:
    return 2 * _spans(ops, block) * _gate_tiles(ops, block)


def _gate_bytes(ops: Sequence[Op], block: ExpertBlock, rows: int) -> int:
    formats = formats_of(ops, block.gates, block.shared_gate)
    warps = _gate_warps(ops, block)
    return _block_bytes(_units(ops[block.gates]), rows, warps, formats)


@dataclass(frozen=True, slots=True)
class _PassingBlocks:
    """Blocks that pass over chunks: the grid, warps and shared memory of each, and macros."""

    grid: tuple[int, int]
    warps: int
    shared_bytes: int
    macros: dict[str, int]


def _down_shape(
    ops: Sequence[Op], block: ExpertBlock, work: tuple[int, int], device: Device
) -> _PassingBlocks | None:
    formats = formats_of(ops, block.downs, block.shared_down)
    tiles = DOWN_TILES if work[0] == FOUR_ROWS else 1
    return _passing(ops[block.downs], formats, work, DOWN_SHAPES, device, tiles)


def _few_gates_shape(
    ops: Sequence[Op], block: ExpertBlock, work: tuple[int, int], device: Device
) -> _PassingBlocks | None:
    formats = formats_of(ops, block.gates, block.shared_gate)
    return _passing(ops[block.gates], formats, work, FEW_GATES_SHAPES, device)


def _passing(
    product: Op,
    formats: Sequence[DType],
    work: tuple[int, int],
    shapes: Sequence[tuple[int, int, int]],
    device: Device,
    tiles: int = 1,
) -> _PassingBlocks | None:
    """``work`` are the tokens of a chunk, and chunks; ``tiles`` those of a warp for each chunk.
    None if shared memory is too small."""
    rows, chunks = work
    slot_bytes = max(map(unit_bytes, formats))
    of_rows = rows * ROW_BYTES * 2 if rows == FOUR_ROWS else rows * (ROW_BYTES + ROW_PADDING)
    for at_once, warps, slots in shapes:
        columns = -(-_tiles(product) // (warps * tiles))
        at_a_time = min(chunks, max(1, at_once * device.multiprocessors // columns))
        of_block = -(-chunks // at_a_time)
        ring = warps * slots * (slot_bytes + BARRIER_BYTES)
        table = of_block * 4 * (CHUNK_WORDS + rows)
        nbytes = _units(product) * of_rows + ring + table
        if at_once * (nbytes + RESERVED_BYTES) <= device.shared_bytes + RESERVED_BYTES:
            macros = {"SLOTS": slots, "SLOT_BYTES": slot_bytes, "CHUNKS": of_block}
            macros["TILES"] = tiles
            of_warps = {"WARPS": warps, "BLOCKS_AT_ONCE": at_once}
            return _PassingBlocks((columns, at_a_time), warps, nbytes, macros | of_warps)
    return None


def order_launch(ops: Sequence[Op], block: ExpertBlock, macros: dict[str, int]) -> KernelLaunch:
    """Groups tokens by expert."""
    macros = {
        "HAS_SHARED": int(block.shared_gate is not None),
        **macros,
        "THREADS": ORDER_THREADS,
        **operand_indices(ops, block.topk, "ids"),
        "TOPK": block.topk,
    }
    return KernelLaunch(
        "expert_order", (1,), ORDER_THREADS, 4 * (4 * macros["EXPERTS"] + 1), macros
    )


def _gates(
    ops: Sequence[Op], block: ExpertBlock, grouped: Grouping, macros: dict[str, int], device: Device
) -> KernelLaunch:
    gates, tiles = ops[block.gates], _gate_tiles(ops, block)
    nbytes = _gate_bytes(ops, block, grouped.tokens)
    macros = {
        **macros,
        "SPANS": _spans(ops, block),
        "TILES": tiles,
        "SLOTS": SLOTS,
        "UNITS": _units(gates),
        **gate_macros(ops, block),
        **size_indices("matmul", "rows"),
        **size_indices("swiglu", "activation"),
    }
    grid = (-(-_tiles(gates) // tiles), grouped.chunks)
    return KernelLaunch("expert_group_gates", grid, 32 * _gate_warps(ops, block), nbytes, macros)


def _few_gates(
    ops: Sequence[Op], block: ExpertBlock, grouped: Grouping, macros: dict[str, int], device: Device
) -> KernelLaunch:
    shape = _few_gates_shape(ops, block, (grouped.tokens, grouped.chunks), device)
    assert shape is not None
    macros = {
        **macros,
        **shape.macros,
        "UNITS": _units(ops[block.gates]),
        **gate_macros(ops, block),
        **size_indices("matmul", "rows"),
        **size_indices("swiglu", "activation"),
    }
    return KernelLaunch(
        "expert_few_gates", shape.grid, 32 * shape.warps, shape.shared_bytes, macros
    )


def _downs(
    ops: Sequence[Op], block: ExpertBlock, grouped: Grouping, macros: dict[str, int], device: Device
) -> KernelLaunch:
    shape = _down_shape(ops, block, (grouped.tokens, grouped.chunks), device)
    assert shape is not None
    first, second = formats_of(ops, block.downs, block.shared_down)
    macros = {
        **macros,
        **shape.macros,
        "UNITS": _units(ops[block.downs]),
        "FORMAT_ID": first.ggml_id,
        "SHARED_FORMAT": second.ggml_id,
        **operand_indices(ops, block.hidden, "H=x"),
        **operand_indices(ops, block.downs, "DOWNS=weight y"),
        **operand_indices(ops, block.shared_hidden, "SHARED_H=x"),
        **operand_indices(ops, block.shared_down, "SHARED_DOWN=weight SHARED_Y=y"),
        "PRODUCT": block.downs,
        **size_indices("matmul", "rows", "columns"),
    }
    return KernelLaunch(
        "expert_group_downs", shape.grid, 32 * shape.warps, shape.shared_bytes, macros
    )


def total_launch(ops: Sequence[Op], block: ExpertBlock) -> KernelLaunch:
    """The sum of what experts make of a token."""
    total = ops[block.total]
    sizes = total.max_sizes()
    macros = {
        "THREADS": TOTAL_THREADS,
        "USED": sizes["used"],
        **operand_indices(ops, block.downs, "PRODUCTS=y"),
        **operand_indices(ops, block.topk, "ids weights"),
        **operand_indices(ops, block.total, "expert_scale residual"),
        **operand_indices(ops, block.shared_down, "SHARED_Y=y"),
        **operand_indices(ops, block.gate_logit, "GATE_LOGIT=y"),
        **operand_indices(ops, block.end, "y"),
        "TOTAL": block.total,
        **size_indices("expert_sum", "width"),
    }
    grid = (-(-sizes["width"] // TOTAL_THREADS), sizes["tokens"])
    return KernelLaunch("expert_total", grid, TOTAL_THREADS, 0, macros)
