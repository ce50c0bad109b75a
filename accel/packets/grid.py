"""How many work-groups the launch of one packet is worth on a device that is not a CPU.

Every op is right with any number of groups: these are the units ``kernels`` take in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from accel.packets.layouts import LANES
from accel.packets.packet import OPS
from contract.arithmetic import SEGMENT
from contract.dtypes import BF16, F16, F32

FLOATS = (F32.ggml_id, F16.ggml_id, BF16.ggml_id)
SLOTS = 8
"""Tokens a group of ``kernels/matmul_group.h`` takes at a time."""
QUANTIZED_SEGMENTS = 16
"""Segments a group of ``kernels/quantize_activation.cl`` takes at a time."""
GROUP_QUERIES = 8
GROUP_CHANNELS = 1024
"""Queries a group of ``kernels/attention_group.h`` takes at a time, and channels of all of them."""
STATE_ROWS = 16
"""Rows of a head's state a group of ``kernels/ssm_delta_net.cl`` takes."""

Sizes = list[int]


def launch_groups(packet: np.void, group_size: int, most: int) -> int:
    """Work-groups for ``packet``, from 1 to ``most``."""
    name = OPS[packet["op"]]
    sizes: Sizes = packet["size"].tolist()
    if name == "matmul":
        groups = _product_units(sizes, int(packet["dtype"]))
    elif name in GROUP_UNITS:
        groups = GROUP_UNITS[name](sizes)
    else:
        items = ITEM_UNITS.get(name, _sixteens)(sizes)
        groups = -(-items // group_size)
    return max(1, min(groups, most))


def _product_units(sizes: Sizes, dtype: int) -> int:
    tokens, rows = sizes[:2]
    if dtype in FLOATS:
        return tokens * rows
    chunks = sizes[5] if sizes[3] else -(-tokens // SLOTS)
    return -(-rows // LANES) * chunks


def _head_blocks(sizes: Sizes) -> int:
    """Heads that read one KV head, as many at a time as a group takes."""
    heads, kv_heads, head_dim = sizes[1:4]
    return kv_heads * -(-(heads // kv_heads) // min(GROUP_QUERIES, GROUP_CHANNELS // head_dim))


def _sixteens(sizes: Sizes) -> int:
    return sizes[0] * -(-sizes[1] // 16)


GROUP_UNITS: Mapping[str, Callable[[Sizes], int]] = {
    "rms_norm": lambda s: s[0] * s[1],
    "quantize_activation": lambda s: -(-s[0] * -(-s[1] // SEGMENT) // QUANTIZED_SEGMENTS),
    "flash_attn_part": lambda s: s[0] * s[5] * _head_blocks(s),
    "flash_attn_batched": lambda s: s[0] * _head_blocks(s),
    "argmax_part": lambda s: s[0] * s[2],
    "argmax": lambda s: s[0],
    "sample_part": lambda s: s[0] * s[2],
    "sample": lambda s: s[0],
    "ssm_delta_inputs": lambda s: 2 * s[0] * s[1],
    "ssm_delta_net": lambda s: s[2] * -(-s[3] // STATE_ROWS),
    "ssm_gated_norm": lambda s: s[0] * s[1],
    "expert_topk": lambda s: s[0],
    "expert_group": lambda s: 1,
}
"""Units of ops that a whole group works on."""

ITEM_UNITS: Mapping[str, Callable[[Sizes], int]] = {
    "feed_tokens": lambda s: s[0],
    "embed": lambda s: s[0] * s[1],
    "select_rows": lambda s: s[0] * s[1],
    "rope": lambda s: s[0] * s[1] * -(-s[4] // 16),
    "kv_write_batched": lambda s: 2 * s[0] * s[1],
    "flash_attn": lambda s: s[0] * s[1] * s[2],
    "ssm_conv1d": lambda s: s[1],
}
"""Units of ops whose items work alone; the other ops have units of sixteen columns or less."""
