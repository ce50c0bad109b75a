"""The layout of an exported plan and of its weights file, as ``abi/plan_file.h`` reads them."""

from __future__ import annotations

from accel.native.variants import WORDS
from contract.records import record

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
HEADER = record(
    "S8 magic, u4 abi header_bytes, u8 file_bytes, u1 digest[32] weights_digest[32], "
    f"u8 weights_bytes needs[{WORDS}], S16 machine, S32 variant, S96 kernels, S24 kernels_digest, "
    f"S256 weights, S96 model, S16 kv_dtype, u4 {' '.join(COUNTS)}, u8 {' '.join(OFFSETS)}"
)
BUFFER_RECORD = record("S160 name, u8 bytes offset, u4 memory reserved")
BUCKET_RECORD = record("u4 tokens rows, u8 packets_offset packets")
WEIGHTS_HEADER = record("S8 magic, u4 abi reserved, u8 bytes, u1 digest[32]")
DIGESTED_FROM = HEADER.fields["weights_digest"][1] if HEADER.fields else 0
"""The digest of a plan covers all bytes from here on."""
