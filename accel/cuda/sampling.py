"""Rules for SAMPLE with several blocks a row, see ``kernels/sample_part.cu`` and
``kernels/sample_row.h``."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.runs import ABSENT
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.kernels.source import GROUP_SIZE

MAX_PART_BLOCKS = 1 << 12
THREADS = 512
BINS = 2048
MAX_PARTS = 128
MIN_PARTS = 4
BLOCKS_PER_MULTIPROCESSOR = 2
MAX_VOCABULARY = 1 << 19
"""Most tokens for which sums of halves of weights stay below 2^32."""
LISTED_NEAR, LISTED_BYTES = 4096, 12
SUMS_BYTES = 16
PART_TALLY_BYTES, TALLY_BYTES = 16 * BINS, 12 * BINS


def largest_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces the op that finds the largest values."""
    op = ops[0]
    if op.name != "sample_part":
        return None
    sizes = op.max_sizes()
    blocks = max(1, min(sizes["rows"] * sizes["parts"], MAX_PART_BLOCKS))
    launch = KernelLaunch("sample_part", (blocks,), GROUP_SIZE, 0, op="sample_part")
    return Replacement(1, (launch,))


def sampling_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces SAMPLE after the op that finds the largest values."""
    op = ops[0]
    if op.name != "sample":
        return None
    sizes = op.max_sizes()
    rows = sizes["rows"]
    if sizes["vocab"] > MAX_VOCABULARY:
        return None
    blocks = BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors
    parts = max(MIN_PARTS, min(MAX_PARTS, blocks // max(1, rows)))
    macros = {"THREADS": THREADS, "PARTS": parts, "LOGITS_AT": ABSENT, "RING_AT": ABSENT}
    drawn = THREADS // 32 * SUMS_BYTES + 12 * THREADS + 16 + 8 * parts + 16
    shared = {"sample_bins": PART_TALLY_BYTES, "sample_draw": drawn + LISTED_NEAR * LISTED_BYTES}
    launches = [
        KernelLaunch(entry, (parts, rows), THREADS, nbytes, macros, op="sample")
        for entry, nbytes in shared.items()
    ]
    return Replacement(1, tuple(launches), rows * _row_bytes(parts))


def _row_bytes(parts: int) -> int:
    """Bytes of a ROW_STATE: tally, bounds, weights of parts and two counts."""
    return TALLY_BYTES + 3 * SUMS_BYTES + 16 + 8 * parts + 8
