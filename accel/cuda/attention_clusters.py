"""Norms and rotation of heads, the write of keys and values, and attention over I12 or coded pages
as one launch for up to four tokens, in which a cluster of blocks computes a span.

The run of ops is that of ``accel.cuda.head_rows``, then UNPACK_PAGES of coded pages, which the
kernel does not need, ``flash_attn_part`` and ``flash_attn``, in whatever family."""

from __future__ import annotations

from accel.cuda import attention
from accel.cuda.device import Device
from accel.cuda.head_rows import HeadRun, head_macros, head_run
from accel.cuda.runs import are_unread, operand_indices, operand_of, result, size_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.cuda.unpacked_pages import UNPACK_PAGES
from accel.packets.packet import aligned
from contract.dtypes import I12, DType

MIN_CAPABILITY = (9, 0)
"""Clusters and copies that count their bytes need this compute capability."""
MAX_TOKENS = 4
"""Most tokens of a bucket whose attention splits contexts."""
ROOM_FOR_ALL = 0.75
"""Share of the clusters that would fit by their blocks alone. Each cluster lies within one part of
the device, so fewer run at once; one that waits for another to end costs more than one that
computes two spans. With several tokens most of their blocks end at once."""
SHARED_NAMES = ("kv", "page_table", "query")
"""Operands that both runs of ops share."""


def attention_clusters_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces the whole run by one launch, without sinks or a soft cap."""
    run = head_run(ops)
    if run is None or device.capability < MIN_CAPABILITY or not _agrees(ops, run):
        return None
    at = run.length + run.rotated
    part, dtype = ops[at], ops[run.write].dtype
    assert dtype is not None
    sizes = part.max_sizes()
    head_dim, tokens = sizes["head_dim"], sizes["tokens"]
    warps = block_warps(head_dim, tokens)
    rope = ops[run.q_rope].max_sizes()
    turns_halves = bool(rope["neox"]) and 2 * rope["rotary_pairs"] == head_dim
    nbytes = block_bytes(head_dim, warps, turns_halves, dtype)
    if nbytes > device.shared_bytes:
        return None
    blocks = attention.SPAN_TILES * attention.TILE_WARPS // warps
    at_once = min(attention.MAX_WARPS // warps, device.shared_bytes // nbytes)
    units = tokens * attention.head_groups(part)
    room = device.multiprocessors * at_once // blocks
    if tokens == 1:
        room = int(room * ROOM_FOR_ALL)
    clusters = min(units * attention.max_spans(part), max(1, room))
    macros = {
        "DTYPE": dtype.ggml_id,
        "WARPS": warps,
        "BLOCKS": at_once,
        "TOKENS": tokens,
        "GRID": clusters * blocks,
        "ALL_HEADS": sizes["heads"],
        "KV_HEADS": sizes["kv_heads"],
        "HEAD_DIM": head_dim,
        "WHOLE_TURN": int(turns_halves),
        "PART": at,
        **operand_indices(ops, at, "PARTS_AT=parts"),
        **operand_indices(ops, at + 1, "Y_AT=y"),
        **head_macros(ops, run),
        **size_indices("flash_attn_part", "window", "max_parts", "scale"),
    }
    launch = KernelLaunch("attention_clusters", (clusters * blocks,), warps * 32, nbytes, macros)
    return Replacement(at + 2, (launch,), aligned(4 * units * blocks))


def block_warps(head_dim: int, tokens: int) -> int:
    """Warps of a block, four for every tile. Small blocks end sooner; with several tokens most
    blocks are alone, so large ones are faster, except for wide heads, whose tiles are large."""
    return 8 if tokens == 1 or head_dim > 128 else 16


def block_bytes(head_dim: int, warps: int, turns_halves: bool, dtype: DType = I12) -> int:
    """Shared memory of ``attention_clusters.cu``: tiles; of every warp a row, unless
    ``turns_halves``, a barrier and a count; and a flag."""
    row = 0 if turns_halves else 4 * head_dim
    return attention.groups_bytes(head_dim, warps, 1, dtype) + warps * (row + 8 + 4) + 16


def _agrees(ops: Remaining, run: HeadRun) -> bool:
    """Whether attention of the run's results follows and no other op reads them. The kernel reads
    some operands before the launch before it has ended, so no op of the step may write those."""
    at = run.length + run.rotated
    if [op.name for op in ops[at : at + 2]] != ["flash_attn_part", "flash_attn"]:
        return False
    write, (part, merge) = ops[run.write], ops[at : at + 2]
    pages, kv = ops[run.length] if run.rotated else part, operand_of(part, "kv")
    if run.rotated and (pages.device is not UNPACK_PAGES or kv != result(pages)):
        return False
    sizes, rope = part.max_sizes(), ops[run.k_rope].max_sizes()
    early = [operand_of(write, name) for name in SHARED_NAMES]
    if sizes["tokens"] > MAX_TOKENS:
        return False
    writers = [op for op in ops.step if op is not write]
    written = {name for op in writers for name in op.results()}
    return (
        attention.plain_parts(part, merge)
        and operand_of(part, "q") == result(ops[run.q_last])
        and early == [operand_of(pages, name) for name in SHARED_NAMES]
        and not any(tensor is None or tensor.buffer in written for tensor in early)
        and (sizes["head_dim"], sizes["kv_heads"]) == (rope["head_dim"], rope["heads"])
        and 2 * rope["rotary_pairs"] <= sizes["head_dim"]
        and are_unread(ops, at + 2, (result(write), result(merge), kv))
    )
