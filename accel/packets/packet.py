"""The packet an op receives, as the device reads it, and the list of ops."""

from __future__ import annotations

import numpy as np

OPERANDS = 8
SIZES = 12
REALS = 4

PACKET = np.dtype(
    [
        ("op", "<u4"),
        ("wait", "<u4"),
        ("everyone", "<u4"),
        ("split_columns", "<u4"),
        ("dtype", "<u4"),
        ("layout", "<u4"),
        ("reserved", "<u4", (2,)),
        ("operand", "<u8", (OPERANDS,)),
        ("stride", "<u4", (OPERANDS,)),
        ("size", "<i4", (SIZES,)),
        ("real", "<f4", (REALS,)),
    ]
)
"""Mirrored by ``PACKET`` of ``kernels/packet.h``, which says what the fields mean."""

OPS = (
    "embed",
    "select_rows",
    "rms_norm",
    "quantize_activation",
    "matmul",
    "rope",
    "kv_write_batched",
    "flash_attn_part",
    "flash_attn",
    "flash_attn_batched",
    "add",
    "mul",
    "scale",
    "bias_add",
    "soft_cap",
    "swiglu",
    "argmax_part",
    "argmax",
    "sample_part",
    "sample",
    "stream_out",
    "feed_tokens",
    "load_request_state",
    "store_request_state",
    "verify_k",
    "scale_columns",
    "ssm_conv1d",
    "ssm_delta_inputs",
    "ssm_delta_net",
    "ssm_gated_norm",
    "expert_topk",
    "expert_group",
    "expert_sum",
    "gated_add",
)
"""Names of the ops; ``packet.op`` is an index of this list."""

ABSENT = 0xFFFF_FFFF_FFFF_FFFF
OWN_MEMORY = 1 << 63
SCRATCH_MEMORY = 1 << 62
BANK_SHIFT = 56
BANKS = 16
COLUMN_GRANULE = 32
"""Constants of ``kernels/packet.h``."""

ALIGNMENT = 256
"""Bytes; of whatever lies in device memory."""


def aligned(nbytes: int) -> int:
    """What ``nbytes`` take of a bank."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
