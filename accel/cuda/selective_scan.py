"""The rule for SSM_SCAN, Mamba-2's recurrence: slots pass through different blocks at the same
time."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.runs import operand_indices, operand_of, reads_prompts, size_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement

STATE_SIZES = (32, 64, 128, 256)
"""Elements of a state's row, which eight lanes hold in registers."""
WARPS, WARP_ROWS, LANES = 8, 4, 8
"""Warps of a block, rows of each, lanes of a row."""
GROUP_TOKENS, STAGES = 8, 2
"""Tokens of a stage of shared memory, and stages."""
MAX_PARTS, PROMPT_PARTS = 256, 8
"""Most parts into which a step's slots are divided where sequences decode, and of prompts: each
block looks at all tokens of the step."""


def scan_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces ``ssm_scan``."""
    op = ops[0]
    if op.name != "ssm_scan":
        return None
    sizes = op.max_sizes()
    size, head_dim, tokens = sizes["state_size"], sizes["head_dim"], sizes["tokens"]
    rows, x = WARPS * WARP_ROWS, operand_of(op, "x")
    assert x is not None
    if size not in STATE_SIZES or head_dim % rows or not x.begins_at(4):
        return None
    macros = {
        "STATE_SIZE": size,
        "WARPS": WARPS,
        "STATES": sizes["states"],
        **operand_indices(ops, 0, "x gates skip query state y"),
        "SCAN": 0,
        **size_indices("ssm_scan", "heads", "groups", "head_dim"),
    }
    of_token = 2 * LANES * (size // LANES + 4) + rows + 4
    nbytes = 4 * (STAGES * GROUP_TOKENS * of_token + 3 * 32 * WARPS + WARPS)
    parts = min(tokens, PROMPT_PARTS if reads_prompts(ops, tokens) else MAX_PARTS)
    grid = (sizes["heads"] * head_dim // rows, parts)
    return Replacement(1, (KernelLaunch("scan_rows", grid, 32 * WARPS, nbytes, macros),))
