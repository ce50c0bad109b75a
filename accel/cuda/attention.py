"""Rules for attention over I12 pages.

Up to four tokens are one launch that computes parts of the context and merges them. With some more
tokens a block takes each one; with many a block takes several rows."""

from __future__ import annotations

from collections.abc import Callable

from accel.cuda.device import Device
from accel.cuda.packed_tiles import UNIT_COLUMNS
from accel.cuda.runs import are_unread, decodes, operand_indices, operand_of, result, size_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.packet import aligned
from accel.packets.step import Op
from contract.arithmetic import KV_SPAN, KV_TILE, PAGE_TOKENS
from contract.dtypes import I12, ROTATED_KV, DType

HEAD_DIMS = (64, 128, 256)
HEADS = 4
"""Most heads of a KV head that a block computes."""
SPAN_TILES = KV_SPAN // KV_TILE
THREADS = SPAN_TILES * 32
"""Threads of a block: a warp for every tile of a span."""
FLAG_BYTES = 16
"""Shared memory for the flag by which blocks that split a context learn which of them is last."""


def attention_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces ``flash_attn_part`` and the ``flash_attn`` after it, without sinks or a soft cap."""
    if len(ops) < 2 or (ops[0].name, ops[1].name) != ("flash_attn_part", "flash_attn"):
        return None
    part, merge = ops[:2]
    sizes = part.max_sizes()
    if not plain_parts(part, merge) or not are_unread(ops, 2, (result(merge),)):
        return None
    head_dim, groups, spans = sizes["head_dim"], head_groups(part), max_spans(part)
    macros = {
        "DTYPE": I12.ggml_id,
        "HEAD_DIM": head_dim,
        **operand_indices(ops, 0, "Q_AT=q KV_AT=kv PAGES_AT=page_table"),
        **operand_indices(ops, 0, "QUERY_AT=query PARTS_AT=parts"),
        **operand_indices(ops, 1, "Y_AT=y"),
        **size_indices("flash_attn_part", "heads", "kv_heads", "window", "max_parts", "scale"),
    }
    grid = (min(sizes["tokens"] * groups * spans, device.multiprocessors),)
    launch = KernelLaunch(
        "attention_spans", grid, THREADS, tiles_bytes(head_dim, SPAN_TILES) + FLAG_BYTES, macros
    )
    return Replacement(2, (launch,), aligned(4 * sizes["tokens"] * groups))


def plain_parts(part: Op, merge: Op) -> bool:
    """Whether the tuned kernels support this ``flash_attn_part`` and its ``flash_attn``, or an op
    that is both."""
    soft_cap = part.reals[part.device.reals.index("soft_cap")]
    known = part.dtype == I12 and part.max_sizes()["head_dim"] in HEAD_DIMS
    return known and not soft_cap and operand_of(merge, "sinks") is None


def head_groups(part: Op) -> int:
    """Groups of up to HEADS heads that share a KV head, for all KV heads."""
    sizes = part.max_sizes()
    return sizes["kv_heads"] * -(-(sizes["heads"] // sizes["kv_heads"]) // HEADS)


def max_spans(part: Op) -> int:
    """Most spans of a slot's context."""
    pages = operand_of(part, "page_table")
    assert pages is not None
    return -(-pages.columns * PAGE_TOKENS // KV_SPAN)


def tiles_bytes(head_dim: int, warps: int) -> int:
    """Bytes of shared memory that ``attention_tiles.h`` needs: queries in two parts and their
    factors; for every warp, weights in two parts; for every tile of a span, U, l and o of rule
    R6."""
    queries, units = HEADS * 2 * head_dim, 32
    return queries + units + HEADS * (warps * 2 * KV_TILE + SPAN_TILES * (8 + 4 * head_dim))


MAX_SINGLE_TOKENS = 64
"""Most tokens for which a block takes each token by itself in any step: few tokens are mostly of
different slots. So are more where sequences decode."""
TILE_WARPS = 4
"""Warps that share a tile."""
TOKEN_STAGES = 2
MAX_WARPS = 16
"""Most warps of all blocks of a multiprocessor."""


def attention_tokens_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces ``flash_attn_batched`` of few tokens or of sequences that decode, without sinks or a
    soft cap."""
    launch = attention_tokens(ops, device)
    return None if launch is None else Replacement(1, (launch,))


def attention_tokens(
    ops: Remaining, device: Device, quantize: int | None = None
) -> KernelLaunch | None:
    """The launch for few tokens. With ``quantize``, the index of a ``quantize_activation``, it also
    writes the results of that op."""
    if not _plain_batch(ops[0]):
        return None
    sizes = ops[0].max_sizes()
    if not (sizes["tokens"] <= MAX_SINGLE_TOKENS or decodes(ops, sizes["tokens"])):
        return None
    units = sizes["tokens"] * head_groups(ops[0])
    warps = token_warps(sizes["head_dim"], units, device)
    nbytes = groups_bytes(sizes["head_dim"], warps, TOKEN_STAGES)
    if nbytes > device.shared_bytes:
        return None
    at_once = min(MAX_WARPS // warps, device.shared_bytes // nbytes)
    macros = {
        "WARPS": warps,
        "BLOCKS": at_once,
        **operand_indices(ops, quantize, "M_AT=m SCALE_AT=scale SUMS_AT=sums"),
        **_batch_macros(ops),
    }
    grid = (min(units, device.multiprocessors * at_once),)
    return KernelLaunch("attention_tokens", grid, warps * 32, nbytes, macros)


def groups_are_units(op: Op) -> bool:
    """Whether the heads of a block are whole units of the product that follows."""
    sizes = op.max_sizes()
    sharing = sizes["heads"] // sizes["kv_heads"]
    group = min(sharing, HEADS)
    return sharing % group == 0 and group * sizes["head_dim"] % UNIT_COLUMNS == 0


def token_warps(head_dim: int, units: int, device: Device) -> int:
    """Warps of a block. Many warps take several tiles at once; where there are more units than
    multiprocessors, several small blocks run on each instead."""
    if units > device.multiprocessors:
        return TILE_WARPS
    fitting = (
        warps
        for warps in (16, 8)
        if groups_bytes(head_dim, warps, TOKEN_STAGES) <= device.shared_bytes
    )
    return next(fitting, TILE_WARPS)


def groups_bytes(head_dim: int, warps: int, stages: int, dtype: DType = I12) -> int:
    """Bytes of shared memory that ``attention_group.h`` needs: queries in two parts and their
    factors; for every tile in progress, weights in two parts, p, maxima of pages, its records of
    ``dtype``, and U, l and o of rule R6."""
    apart = 16 if dtype in ROTATED_KV else 0
    groups, queries = warps // TILE_WARPS, HEADS * 2 * (head_dim + apart) + 32
    record = 2 * KV_TILE * dtype.row_bytes(head_dim)
    of_head = (2 * KV_TILE + 16) + 4 * (KV_TILE + 8) + 4 * 4
    found = groups * HEADS * (8 + 4 * (head_dim + 8))
    return queries + found + groups * (HEADS * of_head + stages * record)


BLOCK_WARPS = 4
BLOCK_ROWS = 16 * BLOCK_WARPS
BLOCK_STAGES = 2
MAX_CHANNELS = 128
"""Most channels of a head that a block computes."""
BLOCKS_PER_MULTIPROCESSOR = 2
Q_FLOATS, Y_FLOATS = 4, 2
"""Floats that are read and written at a time."""


def attention_blocks_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces ``flash_attn_batched`` without sinks or a soft cap."""
    blocks = device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR
    shape = BLOCK_ROWS, BLOCK_WARPS, blocks
    return _of_rows(ops, device, "attention_blocks", shape, block_shared_bytes)


GROUP_CAPABILITY = (9, 0)
"""The compute capability with products of warp groups."""
GROUP_WARPS, SUPPLY_WARPS = 8, 4
"""Warps of a block that multiply, and warps that load tiles."""
GROUP_ROWS = 16 * GROUP_WARPS
RECORD_ALIGNMENT = 128


def attention_groups_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces ``flash_attn_batched`` without sinks or a soft cap, by products of warp groups."""
    if device.capability != GROUP_CAPABILITY:
        return None
    shape = GROUP_ROWS, GROUP_WARPS + SUPPLY_WARPS, device.multiprocessors
    return _of_rows(ops, device, "attention_groups", shape, group_shared_bytes)


def _of_rows(
    ops: Remaining,
    device: Device,
    entry: str,
    shape: tuple[int, int, int],
    shared_bytes: Callable[[int, int], int],
) -> Replacement | None:
    """Replaces ``flash_attn_batched`` by a launch of kernel ``entry``, of which a block takes
    several rows. ``shape`` are most rows and the warps of a block, and most blocks."""
    max_rows, warps, max_blocks = shape
    op = ops[0]
    if not _plain_batch(op):
        return None
    sizes = op.max_sizes()
    head_dim, tokens, kv_heads = sizes["head_dim"], sizes["tokens"], sizes["kv_heads"]
    if sizes["heads"] // kv_heads > max_rows:
        return None
    q, y = operand_of(op, "q"), result(op)
    assert q is not None
    assert y is not None
    nbytes = shared_bytes(head_dim, tokens)
    if not (q.begins_at(Q_FLOATS) and y.begins_at(Y_FLOATS)) or nbytes > device.shared_bytes:
        return None
    macros = {"MAX_TOKENS": tokens, **_batch_macros(ops)}
    grid = (min(tokens * kv_heads * (head_dim // min(head_dim, MAX_CHANNELS)), max_blocks),)
    return Replacement(1, (KernelLaunch(entry, grid, warps * 32, nbytes, macros),))


def group_shared_bytes(head_dim: int, tokens: int) -> int:
    """Shared memory of ``attention_groups.cu``: tiles as stored, three planes of keys and two of
    the block's channels of values, three floats a position, sums of all rows or low parts of their
    queries, barriers, and a bit a token."""
    record = -(-PAGE_TOKENS * (3 * head_dim + 2) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    channels, whole = min(head_dim, MAX_CHANNELS), head_dim <= MAX_CHANNELS
    stored_stages, plane_stages = (3, 2) if whole else (2, 1)
    stored = stored_stages * KV_TILE // PAGE_TOKENS * record
    planes = KV_TILE * (plane_stages * (3 * head_dim + 2 * channels) + 2 * 3 * 4)
    rows = stored + planes + GROUP_ROWS * (4 * head_dim if whole else head_dim)
    used = max(rows, groups_bytes(head_dim, GROUP_WARPS, TOKEN_STAGES))
    return used + 8 * (stored_stages + 4) + 4 * -(-tokens // 32)


def block_shared_bytes(head_dim: int, tokens: int) -> int:
    """Shared memory of ``attention_blocks.cu``: tiles as stored, of one tile the low parts of keys
    and of a block's channels of values, three floats a position, and a bit a token."""
    stages = BLOCK_STAGES * KV_TILE * (3 * head_dim + 2)
    low = KV_TILE * (head_dim + min(head_dim, MAX_CHANNELS))
    return stages + low + 3 * 4 * KV_TILE + 4 * -(-tokens // 32)


def _plain_batch(op: Op) -> bool:
    """Whether the op is a ``flash_attn_batched`` that the tuned kernels support."""
    return op.name == "flash_attn_batched" and plain_parts(op, op)


def _batch_macros(ops: Remaining) -> dict[str, int]:
    """Macros of all kernels for ``flash_attn_batched``."""
    return {
        "DTYPE": I12.ggml_id,
        "HEAD_DIM": ops[0].max_sizes()["head_dim"],
        **operand_indices(ops, 0, "Q_AT=q KV_AT=kv PAGES_AT=page_table QUERY_AT=query Y_AT=y"),
        **size_indices("flash_attn_batched", "heads", "kv_heads", "window", "scale"),
    }
