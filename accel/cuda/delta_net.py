"""Delta-net layers: what lies between their products, as one launch for few tokens; for many,
kernels for the convolution and for the recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from accel.cuda.device import Device
from accel.cuda.runs import nobody_reads, operand_index, operand_of, result, size_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.step import Op, Tensor

FEW_TOKENS = 64
STATE_SIZES = (32, 64, 128)
"""Keys of a row that eight lanes hold in registers."""
MOST_HISTORY = 7
MOST_WARPS, SLOTS_WARPS = 16, 8
"""Of a block that has one state, and of one through which states pass."""
ALONE_TOKENS = 4
"""So many that every state has a block."""
ROWS_AT_ONCE = 4
"""Of a warp."""
CHUNK_SETS = 1
"""Times so many rows that a warp copies and computes at a time."""
SLOTS = (4, 3, 2)
"""Chunks of a warp in shared memory."""
BLOCKS_AT_ONCE = (2, 1)
"""Of a multiprocessor."""
GROUP_TOKENS = (4, 2, 1)
"""Of a slot that are computed in one pass over its states."""
FACTOR_BYTES = 12
"""Of a token and value head."""
RESERVED_BYTES = 1024
"""Of shared memory, by the device for each block."""
CONV_THREADS = 256
CONV_TOKENS = 32
ROW_WARPS, ROW_SETS = 8, 1
"""Of a block of the recurrence; each warp has so many times four rows."""
STAGE_TOKENS = 8
AROUND_WARPS = 8
"""Of a block that takes a token before or behind the recurrence."""
RUN = ("ssm_conv1d", "ssm_delta_inputs", "ssm_delta_net", "ssm_gated_norm")
CONV, INPUTS_OP, NET, NORM = range(len(RUN))


def delta_step_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Convolution, recurrence and gated norm of few tokens."""
    if tuple(op.name for op in ops[: len(RUN)]) != RUN or not _follow_each_other(ops):
        return None
    conv, net, norm = ops[CONV], ops[NET], ops[NORM]
    sizes = net.most_sizes()
    size, tokens = sizes["state_size"], sizes["tokens"]
    history = conv.most_sizes()["history"]
    if tokens > FEW_TOKENS or size not in STATE_SIZES or not 0 < history <= MOST_HISTORY:
        return None
    heads = 2 * sizes["key_heads"] + sizes["value_heads"]
    if conv.most_sizes()["channels"] != heads * size or norm.most_sizes()["width"] != size:
        return None
    if norm.most_sizes()["heads"] != sizes["value_heads"]:
        return None
    if not nobody_reads(ops, len(RUN), [result(norm), *map(_state, (conv, net))]):
        return None
    passing = _passing(ops, device) if tokens > ALONE_TOKENS else None
    if passing is not None:
        return Replacement(len(RUN), (passing,))
    return Replacement(len(RUN), (_standing(ops),), 4 * tokens * sizes["key_heads"])


def _standing(ops: Remaining) -> KernelLaunch:
    """A block for every state."""
    sizes = ops[NET].most_sizes()
    size, tokens = sizes["state_size"], sizes["tokens"]
    warps = min(MOST_WARPS, size // ROWS_AT_ONCE)
    return KernelLaunch(
        "delta_step.cu",
        "delta_step",
        (sizes["value_heads"], tokens, 1),
        (32 * warps, 1, 1),
        4 * 4 * size + FACTOR_BYTES + 4,
        {"WARPS": warps, **_places(ops)},
    )


def _passing(ops: Remaining, device: Device) -> KernelLaunch | None:
    """As many blocks as run at once, through which the states pass; None where shared memory is too
    small."""
    sizes = ops[NET].most_sizes()
    size, tokens, key_heads = sizes["state_size"], sizes["tokens"], sizes["key_heads"]
    warps = min(SLOTS_WARPS, size // ROWS_AT_ONCE)
    rows = ROWS_AT_ONCE * min(CHUNK_SETS, size // warps // ROWS_AT_ONCE)
    sharers = sizes["value_heads"] // key_heads
    for at_once, slots, group in product(BLOCKS_AT_ONCE, SLOTS, GROUP_TOKENS):
        of_token = 4 * (2 + 2 * sharers) * size + FACTOR_BYTES * sharers
        ring = warps * slots * (4 * rows * size + 8)
        nbytes = ring + group * of_token + 4 * (3 * tokens + 1)
        if at_once * (nbytes + RESERVED_BYTES) <= device.shared_bytes + RESERVED_BYTES:
            break
    else:
        return None
    blocks = max(1, at_once * device.multiprocessors // key_heads)
    return KernelLaunch(
        "delta_slots.cu",
        "delta_slots",
        (key_heads, min(tokens, blocks), 1),
        (32 * warps, 1, 1),
        nbytes,
        {
            "WARPS": warps,
            "BLOCKS_AT_ONCE": at_once,
            "SHARERS": sharers,
            "MOST_TOKENS": tokens,
            "GROUP_TOKENS": group,
            "SLOTS": slots,
            "CHUNK_SETS": rows // ROWS_AT_ONCE,
            **_places(ops),
        },
    )


def _places(ops: Remaining) -> dict[str, int]:
    """Macros of both kernels."""
    return {
        "STATE_SIZE": ops[NET].most_sizes()["state_size"],
        "HISTORY": ops[CONV].most_sizes()["history"],
        "X": operand_index(ops, CONV, "x"),
        "CONV_WEIGHT": operand_index(ops, CONV, "weight"),
        "QUERY": operand_index(ops, CONV, "query"),
        "CONV_STATE": operand_index(ops, CONV, "state"),
        "ALPHA": operand_index(ops, INPUTS_OP, "alpha"),
        "BETA": operand_index(ops, INPUTS_OP, "beta"),
        "DECAY": operand_index(ops, INPUTS_OP, "decay"),
        "DT_BIAS": operand_index(ops, INPUTS_OP, "dt_bias"),
        "STATE": operand_index(ops, NET, "state"),
        "GATE": operand_index(ops, NORM, "gate"),
        "NORM_WEIGHT": operand_index(ops, NORM, "weight"),
        "Y": operand_index(ops, NORM, "y"),
        "INPUTS_OP": INPUTS_OP,
        "NET": NET,
        "NORM": NORM,
        **size_indices("ssm_delta_inputs", "eps", "query_scale"),
        **size_indices("ssm_gated_norm", "eps"),
        **size_indices("ssm_delta_net", "key_heads", "value_heads", "grouped"),
    }


def _follow_each_other(ops: Sequence[Op]) -> bool:
    conv, inputs, net, norm = ops[: len(RUN)]
    mixed = operand_of(conv, "y")
    return (
        operand_of(inputs, "x") == mixed == operand_of(net, "x")
        and operand_of(net, "qk") == operand_of(inputs, "qk")
        and operand_of(net, "gates") == operand_of(inputs, "gates")
        and operand_of(net, "query") == operand_of(conv, "query")
        and operand_of(norm, "x") == operand_of(net, "y")
    )


def _state(op: Op) -> Tensor | None:
    return operand_of(op, "state")


def conv_rule(ops: Remaining, device: Device) -> Replacement | None:
    """The convolution of many tokens."""
    op = ops[0]
    if op.name != "ssm_conv1d":
        return None
    sizes = op.most_sizes()
    if sizes["tokens"] <= 1 or not 0 < sizes["history"] <= MOST_HISTORY:
        return None
    macros = {
        "HISTORY": sizes["history"],
        "THREADS": CONV_THREADS,
        "CONV_TOKENS": CONV_TOKENS,
        "X": operand_index(ops, 0, "x"),
        "WEIGHT": operand_index(ops, 0, "weight"),
        "QUERY": operand_index(ops, 0, "query"),
        "STATE": operand_index(ops, 0, "state"),
        "Y": operand_index(ops, 0, "y"),
        "CONV": 0,
        **size_indices("ssm_conv1d", "channels"),
    }
    grid = -(-sizes["channels"] // CONV_THREADS), -(-sizes["tokens"] // CONV_TOKENS), 1
    launches = tuple(
        KernelLaunch(
            "delta_conv.cu",
            "delta_conv",
            grid,
            (CONV_THREADS, 1, 1),
            4 * CONV_TOKENS * sizes["history"],
            {**macros, "STORES": stores},
        )
        for stores in (0, 1)
    )
    return Replacement(1, launches)


def recurrence_rule(ops: Remaining, device: Device) -> Replacement | None:
    """The recurrence of many tokens."""
    op = ops[0]
    if op.name != "ssm_delta_net":
        return None
    sizes = op.most_sizes()
    size, rows = sizes["state_size"], ROW_WARPS * ROW_SETS * ROWS_AT_ONCE
    if size not in STATE_SIZES or size % rows or not _aligned(op):
        return None
    token_floats = 2 * size + rows + 4
    launch = KernelLaunch(
        "delta_rows.cu",
        "delta_rows",
        (sizes["value_heads"], size // rows, 1),
        (32 * ROW_WARPS, 1, 1),
        4 * 2 * STAGE_TOKENS * token_floats,
        {
            "STATE_SIZE": size,
            "WARPS": ROW_WARPS,
            "ROW_SETS": ROW_SETS,
            "STAGE_TOKENS": STAGE_TOKENS,
            "X": operand_index(ops, 0, "x"),
            "QK": operand_index(ops, 0, "qk"),
            "GATES": operand_index(ops, 0, "gates"),
            "QUERY": operand_index(ops, 0, "query"),
            "STATE": operand_index(ops, 0, "state"),
            "Y": operand_index(ops, 0, "y"),
            "NET": 0,
            **size_indices("ssm_delta_net", "key_heads", "value_heads", "grouped"),
        },
    )
    return Replacement(1, (launch,))


def gated_norm_rule(ops: Remaining, device: Device) -> Replacement | None:
    """What stands behind the recurrence of many tokens."""
    op = ops[0]
    if op.name != "ssm_gated_norm" or op.most_sizes()["width"] not in STATE_SIZES:
        return None
    return _by_tokens(
        ops,
        "delta_norm",
        {
            "STATE_SIZE": op.most_sizes()["width"],
            "NORM": 0,
            **{name.upper(): operand_index(ops, 0, name) for name in ("x", "gate", "weight", "y")},
            **size_indices("ssm_gated_norm", "heads", "eps"),
        },
    )


def _by_tokens(ops: Remaining, entry: str, macros: dict[str, int]) -> Replacement:
    """A block for every token."""
    grid = ops[0].most_sizes()["tokens"], 1, 1
    launch = KernelLaunch(
        f"{entry}.cu", entry, grid, (32 * AROUND_WARPS, 1, 1), 0, {"WARPS": AROUND_WARPS, **macros}
    )
    return Replacement(1, (launch,))


def _aligned(op: Op) -> bool:
    """Whether rows can be copied 16 bytes at a time."""
    tensors = [operand_of(op, name) for name in ("x", "qk")]
    return all(one is not None and one.start % 4 == 0 and one.stride % 4 == 0 for one in tensors)
