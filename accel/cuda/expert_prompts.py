"""Launches for experts of the many tokens of a prompt, on devices with products of warp groups.

The router is a tiled product. Packed tokens are copied to rows sorted by expert, so that each
expert multiplies whole groups of eight pairs. The shared expert is a product like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from accel.cuda.device import Device
from accel.cuda.expert_block import ExpertBlock
from accel.cuda.expert_groups import CHUNK_WORDS, order_launch, total_launch
from accel.cuda.group_shapes import MAX_PARTED_TOKENS, SUM_BYTES, TOKEN_BYTES, group_shape
from accel.cuda.matrices import group_launch, has_groups, product_rows
from accel.cuda.packed_tiles import UNIT_COLUMNS, unit_count
from accel.cuda.packing import MAX_FOUR_WARPS, pack_fours
from accel.cuda.products import Run
from accel.cuda.runs import operand_indices, size_indices
from accel.cuda.tuned import KernelLaunch
from accel.packets.packet import aligned
from accel.packets.step import Op

SINGLE_WARP_TOKENS = 512
"""Most tokens for which experts are multiplied by single warps."""
CHUNK_PAIRS = 64
"""Most pairs of a token and an expert that a block multiplies."""
GROUP_PAIRS = 8
"""An expert's pairs are rounded up to so many: the columns of one product of a warp group."""
WARPS = 8
GATHER_BLOCKS = 4
"""Blocks that share the copy of a chunk."""
TILE_TOKENS, TILE_ROWS = 64, 32
"""Tokens and rows of the router's weight that a block multiplies."""


@dataclass(frozen=True, slots=True)
class PromptLaunches:
    """The launches of the router and of ``gates``, those of ``downs`` and the sum over experts, and
    the bytes of workspace that one passes to the next."""

    gates: tuple[KernelLaunch, ...]
    downs: tuple[KernelLaunch, ...]
    transient_bytes: int


@dataclass(frozen=True, slots=True)
class _Memory:
    """Offsets in the workspace that launches share: the norms' factors, the table of chunks, packed
    pairs."""

    tokens: int
    pairs: int
    experts: int

    @property
    def chunks(self) -> int:
        return min(self.pairs, self.experts + self.pairs // CHUNK_PAIRS)

    @property
    def table_at(self) -> int:
        return aligned(4 * self.tokens)

    @property
    def packed_at(self) -> int:
        return aligned(self.table_at + 4 * (1 + CHUNK_WORDS * self.chunks + self.pairs))

    def packed(self, units: int) -> tuple[dict[str, int], int]:
        """Macros of packed pairs of so many units, and where they end."""
        groups = min(self.pairs, self.experts + self.pairs // GROUP_PAIRS)
        rows = GROUP_PAIRS * groups * units
        sums_at = self.packed_at + TOKEN_BYTES * rows
        scales_at = sums_at + SUM_BYTES * rows
        offsets = {"PLANES_AT": self.packed_at, "SUMS_AT": sums_at, "SCALES_AT": scales_at}
        return offsets, scales_at + 4 * rows

    def table(self) -> dict[str, int]:
        return {"MAX_CHUNKS": self.chunks, "TABLE_AT": self.table_at // 4}


def prompt_launches(ops: Sequence[Op], block: ExpertBlock, device: Device) -> PromptLaunches | None:
    """The launches of a block of experts; None if tokens are few or the device lacks such
    products."""
    tokens, used = ops[block.norm].count.maximum, ops[block.gates].max_sizes()["used"]
    units = _units(ops, block.gates)
    if tokens <= SINGLE_WARP_TOKENS or not has_groups(device) or units > MAX_FOUR_WARPS:
        return None
    memory = _Memory(tokens, tokens * used, ops[block.router].max_sizes()["rows"])
    table = {**memory.table(), "USED": used}
    gathered, gathered_end = memory.packed(units)
    hidden, hidden_end = memory.packed(_units(ops, block.downs))
    x = Run((block.router,), 0, block.quantize, block.norm)
    gates = Run((block.gates, block.ups), 0, block.quantize, None, (None, None), block.activation)
    downs = Run((block.downs,), 0, block.hidden)
    logit = {**operand_indices(ops, block.gate_logit, "GATE_ROW=weight GATE_LOGIT=y")}
    pairs = memory.chunks * CHUNK_PAIRS
    gate_launches = [
        pack_fours(ops, x, tokens, FACTORS_AT=0, **logit),
        _logits(ops, block),
        _choice(ops, block),
        order_launch(ops, block, {**table, **_order_macros(memory)}),
        _gather(ops, block, memory, {**table, **gathered, "UNITS": units}),
        _products(ops, gates, memory, {**table, **gathered}, device),
    ]
    down_launches = [
        pack_fours(ops, downs, pairs, **table, **hidden, EXPERT_PAIRS=1, CHUNK_PAIRS=CHUNK_PAIRS),
        _products(ops, downs, memory, {**table, **hidden}, device),
    ]
    if block.shared_gate is not None and block.shared_up is not None:
        assert block.shared_down is not None
        both = (block.shared_gate, block.shared_up)
        of_shared = replace(gates, products=both, gate=block.shared_activation)
        gate_launches.append(_single_products(ops, of_shared, device))
        down = replace(downs, products=(block.shared_down,), quantize=block.shared_hidden)
        down_launches += [pack_fours(ops, down, tokens), _single_products(ops, down, device)]
    down_launches.append(total_launch(ops, block))
    return PromptLaunches(tuple(gate_launches), tuple(down_launches), max(gathered_end, hidden_end))


def _units(ops: Sequence[Op], product: int) -> int:
    return unit_count(ops[product].max_sizes()["columns"])


def _order_macros(memory: _Memory) -> dict[str, int]:
    return {"EXPERTS": memory.experts, "CHUNK_ROWS_MAX": CHUNK_PAIRS, "HAS_SHARED": 0}


def _logits(ops: Sequence[Op], block: ExpertBlock) -> KernelLaunch:
    sizes = ops[block.router].max_sizes()
    columns = UNIT_COLUMNS * (TILE_TOKENS + TILE_ROWS)
    macros = {
        "WARPS": WARPS,
        "TILE_TOKENS": TILE_TOKENS,
        "TILE_ROWS": TILE_ROWS,
        "FACTORS_AT": 0,
        **operand_indices(ops, block.norm, "x NORM_WEIGHT=weight"),
        **operand_indices(ops, block.router, "ROUTER=weight LOGITS=y"),
        "PRODUCT": block.router,
        **size_indices("matmul", "rows", "columns"),
    }
    grid = (-(-sizes["rows"] // TILE_ROWS), -(-sizes["tokens"] // TILE_TOKENS))
    return KernelLaunch(
        "expert_logits", grid, 32 * WARPS, 4 * (columns + TILE_TOKENS * TILE_ROWS), macros
    )


def _choice(ops: Sequence[Op], block: ExpertBlock) -> KernelLaunch:
    sizes = ops[block.router].max_sizes()
    macros = {
        "WARPS": WARPS,
        "EXPERT_SEGMENTS": unit_count(sizes["rows"]),
        **operand_indices(ops, block.router, "LOGITS=y"),
        **operand_indices(ops, block.topk, "ids weights"),
        "PRODUCT": block.router,
        "TOPK": block.topk,
        **size_indices("matmul", "rows"),
        **size_indices("expert_topk", "used", "renormalize"),
    }
    return KernelLaunch("expert_choice", (-(-sizes["tokens"] // WARPS),), 32 * WARPS, 0, macros)


def _gather(
    ops: Sequence[Op], block: ExpertBlock, memory: _Memory, macros: dict[str, int]
) -> KernelLaunch:
    macros = {"WARPS": WARPS, **operand_indices(ops, block.quantize, "m scale sums"), **macros}
    return KernelLaunch("expert_gather", (memory.chunks, GATHER_BLOCKS), 32 * WARPS, 0, macros)


def _products(
    ops: Sequence[Op], run: Run, memory: _Memory, macros: dict[str, int], device: Device
) -> KernelLaunch:
    """Products of packed pairs with the matrices of their experts."""
    product, numbers = ops[run.products[0]], tuple(range(len(run.products)))
    rows = product_rows(ops, run, numbers)
    assert product.dtype is not None
    many = max(memory.pairs, MAX_PARTED_TOKENS + 1)
    shape = group_shape(product.dtype, product.max_sizes()["columns"], many, rows, device)
    launch = group_launch(ops, run, numbers, shape, device)
    blocks = shape.row_blocks(rows) * memory.chunks
    return replace(
        launch,
        grid=(min(blocks, device.multiprocessors), 1, 1),
        shared_bytes=launch.shared_bytes + 2 * 4 * (CHUNK_PAIRS + 1),
        macros={**launch.macros, **macros, "EXPERT_PAIRS": 1},
    )


def _single_products(ops: Sequence[Op], run: Run, device: Device) -> KernelLaunch:
    """Products of all tokens with the same matrices."""
    product, numbers = ops[run.products[0]], tuple(range(len(run.products)))
    rows = product_rows(ops, run, numbers)
    sizes = product.max_sizes()
    assert product.dtype is not None
    shape = group_shape(product.dtype, sizes["columns"], sizes["tokens"], rows, device)
    return group_launch(ops, run, numbers, shape, device)
