"""Attention over I12 pages: of few tokens as one launch, parts of the context and their merge; of
many on blocks of rows."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.runs import nobody_reads, operand_place, result, size_places
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.packet import aligned
from accel.packets.step import Op
from contract.arithmetic import KV_SPAN, KV_TILE, PAGE_TOKENS
from contract.dtypes import I12

HEAD_DIMS = (64, 128, 256)
HEADS = 4
"""Heads of a KV head that a block takes."""
SPAN_TILES = KV_SPAN // KV_TILE
THREADS = SPAN_TILES * 32
"""A warp for every tile of a span."""


def attention_rule(ops: Remaining, device: Device) -> Replacement | None:
    """``flash_attn_part`` and the ``flash_attn`` behind it, without sinks or a soft cap."""
    if len(ops) < 2 or (ops[0].name, ops[1].name) != ("flash_attn_part", "flash_attn"):
        return None
    part, merge = ops[:2]
    sizes = part.most_sizes()
    soft_cap = part.reals[part.device.reals.index("soft_cap")]
    if part.dtype != I12 or sizes["head_dim"] not in HEAD_DIMS or soft_cap:
        return None
    if operand_place(ops, 1, "sinks") >= 0 or not nobody_reads(ops, 2, (result(merge),)):
        return None
    head_dim, sharing = sizes["head_dim"], sizes["heads"] // sizes["kv_heads"]
    groups = sizes["kv_heads"] * -(-sharing // HEADS)
    pages = part.operands[2]
    assert pages is not None
    spans = -(-pages.columns * PAGE_TOKENS // KV_SPAN)
    launch = KernelLaunch(
        "attention_spans.cu",
        "attention_spans",
        (min(sizes["tokens"] * groups * spans, device.multiprocessors), 1, 1),
        (THREADS, 1, 1),
        shared_bytes(head_dim),
        {
            "DTYPE": I12.ggml_id,
            "HEAD_DIM": head_dim,
            "Q_AT": operand_place(ops, 0, "q"),
            "KV_AT": operand_place(ops, 0, "kv"),
            "PAGES_AT": operand_place(ops, 0, "page_table"),
            "QUERY_AT": operand_place(ops, 0, "query"),
            "PARTS_AT": operand_place(ops, 0, "parts"),
            "Y_AT": operand_place(ops, 1, "y"),
            **size_places("flash_attn_part", "heads", "kv_heads", "window", "most_parts", "scale"),
        },
    )
    return Replacement(2, (launch,), aligned(4 * sizes["tokens"] * groups))


def shared_bytes(head_dim: int) -> int:
    """What ``attention_spans.cu`` has in shared memory: queries in two parts, their factors, of
    every warp weights in two parts, U and l and o of its tile, and a flag."""
    queries, units, flag = HEADS * 2 * head_dim, 32, 16
    return queries + units + SPAN_TILES * HEADS * (2 * KV_TILE + 8 + 4 * head_dim) + flag


BLOCK_WARPS = 4
BLOCK_ROWS = 16 * BLOCK_WARPS
BLOCK_STAGES = 2
MOST_CHANNELS = 128
"""Of a head that a block makes."""
BLOCKS_PER_MULTIPROCESSOR = 2
Q_FLOATS, Y_FLOATS = 4, 2
"""Read and written at a time."""


def attention_blocks_rule(ops: Remaining, device: Device) -> Replacement | None:
    """``flash_attn_batched`` without sinks or a soft cap."""
    op = ops[0]
    if op.name != "flash_attn_batched" or op.dtype != I12:
        return None
    sizes = op.most_sizes()
    head_dim, tokens = sizes["head_dim"], sizes["tokens"]
    if head_dim not in HEAD_DIMS or sizes["heads"] // sizes["kv_heads"] > BLOCK_ROWS:
        return None
    if op.reals[op.device.reals.index("soft_cap")] or operand_place(ops, 0, "sinks") >= 0:
        return None
    if not (_rows_begin_at(op, "q", Q_FLOATS) and _rows_begin_at(op, "y", Y_FLOATS)):
        return None
    nbytes = block_shared_bytes(head_dim, tokens)
    if nbytes > device.shared_bytes:
        return None
    parts = head_dim // min(head_dim, MOST_CHANNELS)
    most = device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR
    launch = KernelLaunch(
        "attention_blocks.cu",
        "attention_blocks",
        (min(tokens * sizes["kv_heads"] * parts, most), 1, 1),
        (BLOCK_WARPS * 32, 1, 1),
        nbytes,
        {
            "DTYPE": I12.ggml_id,
            "HEAD_DIM": head_dim,
            "MOST_TOKENS": tokens,
            **{
                f"{name}_AT": operand_place(ops, 0, operand)
                for name, operand in (
                    ("Q", "q"),
                    ("KV", "kv"),
                    ("PAGES", "page_table"),
                    ("QUERY", "query"),
                    ("Y", "y"),
                )
            },
            **size_places("flash_attn_batched", "heads", "kv_heads", "window", "scale"),
        },
    )
    return Replacement(1, (launch,))


def block_shared_bytes(head_dim: int, tokens: int) -> int:
    """What ``attention_blocks.cu`` has in shared memory: tiles as stored, of one the low parts of
    keys and of a block's channels of values, three floats a position, and a bit a token."""
    stages = BLOCK_STAGES * KV_TILE * (3 * head_dim + 2)
    low = KV_TILE * (head_dim + min(head_dim, MOST_CHANNELS))
    return stages + low + 3 * 4 * KV_TILE + 4 * -(-tokens // 32)


def _rows_begin_at(op: Op, name: str, floats: int) -> bool:
    """Whether every row of an operand begins at a multiple of so many floats."""
    names = [operand.name for operand in op.device.operands]
    tensor = op.operands[names.index(name)]
    assert tensor is not None
    return tensor.start % floats == 0 and tensor.stride % floats == 0
