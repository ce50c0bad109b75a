"""The layout of an exported plan and of its weights file, as ``abi/plan_file.h`` reads them."""

from __future__ import annotations

import numpy as np

from accel.native.variants import WORDS

ABI = 1
"""ZINC_RT_ABI of ``zinc_rt.h``."""
PLAN_MAGIC = b"ZINCPLAN"
WEIGHTS_MAGIC = b"ZINCWGTS"
WEIGHTS_SUFFIX = ".weights"
WEIGHTS_HEADER_BYTES = 4096
MAX_BUFFERS = 1 << 16
ZEROED, FROM_WEIGHTS = 0, 1
ABSENT_OFFSET = 0xFFFF_FFFF_FFFF_FFFF

COUNTS = (
    *("arithmetic", "slots", "context", "pages", "slot_pages", "page_positions"),
    *("tokens", "rows", "vocab", "recent", "ring_events", "workers", "recurrent"),
    *("packet_bytes", "operands", "operand_offset", "ops", "ring", "logits"),
    *("event_bytes", "event_token", "buffers", "buckets", "reserved"),
)
OFFSETS = (
    *("scratch_bytes", "own_bytes", "input_bytes"),
    *("query", "output_rows", "sampling", "page_table", "buffers_offset", "buckets_offset"),
)
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("abi", "<u4"),
        ("header_bytes", "<u4"),
        ("file_bytes", "<u8"),
        ("digest", "u1", (32,)),
        ("weights_digest", "u1", (32,)),
        ("weights_bytes", "<u8"),
        ("needs", "<u8", (WORDS,)),
        ("machine", "S16"),
        ("variant", "S32"),
        ("kernels", "S96"),
        ("kernels_digest", "S24"),
        ("weights", "S256"),
        ("model", "S96"),
        ("kv_dtype", "S16"),
        *((name, "<u4") for name in COUNTS),
        *((name, "<u8") for name in OFFSETS),
    ]
)
BUFFER_RECORD = np.dtype(
    [("name", "S160"), ("bytes", "<u8"), ("offset", "<u8"), ("memory", "<u4"), ("reserved", "<u4")]
)
BUCKET_RECORD = np.dtype(
    [("tokens", "<u4"), ("rows", "<u4"), ("packets_offset", "<u8"), ("packets", "<u8")]
)
WEIGHTS_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("abi", "<u4"),
        ("reserved", "<u4"),
        ("bytes", "<u8"),
        ("digest", "u1", (32,)),
    ]
)
DIGESTED_FROM = HEADER.fields["weights_digest"][1] if HEADER.fields else 0
"""The digest of a plan covers all bytes from here on."""
