"""A block of experts of one to four tokens as one launch, whose blocks exchange floats: see
``kernels/expert_token.cu``."""

from __future__ import annotations

from collections.abc import Sequence

from accel.cuda.device import Device
from accel.cuda.expert_block import ExpertBlock, formats_of
from accel.cuda.packed_tiles import UNIT_ROWS, unit_bytes, unit_count
from accel.cuda.runs import operand_indices, size_indices
from accel.cuda.tuned import KernelLaunch
from accel.packets.packet import aligned
from accel.packets.step import Op
from contract.dtypes import DType

MIN_CAPABILITY = (9, 0)
"""Copies have barriers of their own, so that they need not be awaited in the order of requests."""
WARPS, SLOTS = 16, 2
"""Warps of a block, and chunks of gates that each copies ahead."""
MAX_TOKENS, MAX_PAIRS = 4, 32
"""Most tokens, and most pairs of a token and an expert chosen for it, which are bits of a word."""
MAX_HELD_UNITS = 2
"""Most units of a row of x, and of both rows of the router, in the registers of a warp."""
CHUNK_UNITS, UNIT_COLUMNS = 2, 256
STATE_BYTES = 256
UNIT_ACTIVATION_BYTES = 512 + 32 + 4
BARRIER_BYTES = 8


def token_launch(ops: Sequence[Op], block: ExpertBlock, device: Device) -> KernelLaunch | None:
    """The launch, None where it does not fit: many tokens, several devices, other widths; or where
    blocks of other processes might take the places of some that others wait for."""
    gates, downs = ops[block.gates], ops[block.downs]
    width, columns = gates.max_sizes()["rows"], gates.max_sizes()["columns"]
    max_tokens = ops[block.norm].count.maximum
    if max_tokens > MAX_TOKENS or block.gathers:
        return None
    if device.capability < MIN_CAPABILITY or device.mps_enabled:
        return None
    if width % UNIT_COLUMNS or -(-unit_count(columns) // CHUNK_UNITS) > WARPS:
        return None
    if block.shared_activation is not None:
        of_shared = ops[block.shared_activation].max_sizes()["activation"]
        if of_shared != ops[block.activation].max_sizes()["activation"]:
            return None
    gate_formats = formats_of(ops, block.gates, block.shared_gate)
    down_formats = formats_of(ops, block.downs, block.shared_down)
    used, experts = gates.max_sizes()["used"], ops[block.router].max_sizes()["rows"]
    choices, segments = used + (block.shared_gate is not None), unit_count(experts)
    units, hidden_units = unit_count(columns), unit_count(downs.max_sizes()["columns"])
    tokens = 1 << (max_tokens - 1).bit_length()
    if tokens > 1 and (tokens * used > MAX_PAIRS or units * tokens > MAX_HELD_UNITS * WARPS):
        return None
    grid = (device.multiprocessors, 1, 1)
    of_block = -(-(tokens * used + choices - used) * (width // UNIT_ROWS) // grid[0])
    fewest = max(1, WARPS // (2 * -(-units // CHUNK_UNITS)))
    shape = tokens, units, hidden_units, segments, choices
    for at_once in (fewest,) if tokens == 1 else range(max(fewest, of_block), fewest - 1, -1):
        nbytes = _memory_bytes(gate_formats, down_formats, at_once, *shape)
        if nbytes <= device.shared_bytes:
            break
    else:
        return None
    bank = 4 * tokens * (segments * UNIT_COLUMNS + 4 + choices * width)
    macros = {
        "WARPS": WARPS,
        "TOKENS": tokens,
        "TILES_AT_ONCE": at_once,
        "SLOTS": SLOTS,
        "HELD_UNITS": 1,
        "UNITS": units,
        "HIDDEN_UNITS": hidden_units,
        "EXPERT_SEGMENTS": segments,
        "USED": used,
        "MEMORY_BYTES": nbytes,
        "WORKSPACE_BYTES": aligned(STATE_BYTES + 2 * bank),
        "GATES_FORMAT": gate_formats[0].ggml_id,
        "SHARED_GATES_FORMAT": gate_formats[1].ggml_id,
        "DOWNS_FORMAT": down_formats[0].ggml_id,
        "SHARED_DOWNS_FORMAT": down_formats[1].ggml_id,
        **_operand_macros(ops, block),
    }
    return KernelLaunch("expert_token", grid, 32 * WARPS, nbytes, macros, waits=True)


def _operand_macros(ops: Sequence[Op], block: ExpertBlock) -> dict[str, int]:
    return {
        **operand_indices(ops, block.norm, "x NORM_WEIGHT=weight"),
        **operand_indices(ops, block.router, "ROUTER=weight"),
        **operand_indices(ops, block.gate_logit, "GATE_ROW=weight"),
        **operand_indices(ops, block.gates, "GATES=weight"),
        **operand_indices(ops, block.ups, "UPS=weight"),
        **operand_indices(ops, block.shared_gate, "SHARED_GATE=weight"),
        **operand_indices(ops, block.shared_up, "SHARED_UP=weight"),
        **operand_indices(ops, block.downs, "DOWNS=weight"),
        **operand_indices(ops, block.shared_down, "SHARED_DOWN=weight"),
        **operand_indices(ops, block.total, "expert_scale residual"),
        **operand_indices(ops, block.end, "y"),
        "NORM": block.norm,
        "PRODUCT": block.router,
        "TOPK": block.topk,
        "DOWNS_PRODUCT": block.downs,
        "ACTIVATION": ops[block.activation].max_sizes()["activation"],
        **size_indices("matmul", "rows", "columns"),
        **size_indices("rms_norm", "eps"),
        **size_indices("expert_topk", "renormalize"),
    }


def _memory_bytes(
    gates: tuple[DType, DType],
    downs: tuple[DType, DType],
    at_once: int,
    tokens: int,
    units: int,
    hidden_units: int,
    segments: int,
    choices: int,
) -> int:
    """Shared memory of a block with the values of ``at_once`` tiles, at least what ``TOKEN_MEMORY``
    of the kernel takes."""
    region = CHUNK_UNITS * max(SLOTS * max(map(unit_bytes, gates)), max(map(unit_bytes, downs)))
    rows = UNIT_ACTIVATION_BYTES * (tokens * units + WARPS * hidden_units) + 16 * (tokens + WARPS)
    of_tile = 2 * -(-units // CHUNK_UNITS) * CHUNK_UNITS
    values = 4 * UNIT_ROWS * tokens * (at_once * of_tile + choices) + 3 * 4 * tokens * units
    choice = 2 * 4 * UNIT_COLUMNS * segments + 4 * (WARPS + 2 * choices + 1)
    distinct = 4 * (1 + 3 * choices)
    of_tokens = values + tokens * (choice + distinct)
    return aligned(WARPS * (region + BARRIER_BYTES * (SLOTS + 1)) + rows + of_tokens)
