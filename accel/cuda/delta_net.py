"""Rules for delta-net layers.

With few tokens everything between the products of a layer is one launch; with many there are
kernels for the convolution, the recurrence and the norm. A decay for each key is left to the
kernels of all GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from accel.cuda.device import Device
from accel.cuda.runs import (
    are_unread,
    decodes,
    operand_indices,
    operand_of,
    reads_prompts,
    result,
    size_indices,
)
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.step import Op, Tensor

FEW_TOKENS, DECODING_TOKENS = 64, 512
"""Most tokens for which the states of slots pass through the blocks in any step, and of sequences
that decode."""
STATE_SIZES = (32, 64, 128)
"""Keys of a row, which eight lanes hold in registers."""
MAX_HISTORY = 7
MAX_WARPS, SLOTS_WARPS = 16, 8
"""Most warps of a block that computes one state, and of one that computes many in turn."""
SLOTS_AROUND = 4
"""Warps of the latter that compute what stands before and behind the recurrence."""
ALONE_TOKENS = 4
"""Most tokens for which every state has a block of its own."""
STATE_BUFFERS, STORES_CAPABILITY = 2, (9, 0)
"""States of several tokens in shared memory on their way to global memory, to which they are copied
in the background."""
ROWS_AT_ONCE = 4
"""Rows that a warp computes at once."""
CHUNK_SETS = 1
"""Multiple of ROWS_AT_ONCE that a warp copies and computes at a time."""
SLOTS = (4, 3, 2)
"""Chunks of a warp in shared memory, tried in this order."""
BLOCKS_AT_ONCE = (2, 1)
"""Blocks of a multiprocessor, tried in this order."""
GROUP_TOKENS = (4, 2, 1)
"""Tokens of a slot that one pass over its states computes, tried in this order."""
FACTOR_BYTES = 12
"""Bytes of the factors of a token and value head."""
RESERVED_BYTES = 1024
"""Shared memory that the device reserves for each block."""
CONV_THREADS = 256
CONV_TOKENS, FEW_CONV_TOKENS = 32, 8
"""Tokens of a block of the convolution, and where most are of different slots."""
ROW_WARPS, ROW_LANES, ROW_SETS = 8, 8, 1
"""Warps of a block of the recurrence, lanes of a row, and sets of rows of each warp."""
ROW_TOKENS, ROW_STAGES = 8, 3
"""Tokens of a stage of shared memory, and stages."""
PARTS = 4
"""Parts of the slots, whose tokens different blocks compute in steps of at most DECODING_TOKENS.
More parts are more blocks that have nothing to do in steps without prompts."""
ALL_STEPS, DECODING_STEPS, PROMPT_STEPS = range(3)
"""The steps that a launch is for, as kernels get it: all, those without a prompt, the others."""
AROUND_WARPS = 8
"""Warps of a block that computes heads of a token before or after the recurrence."""
AROUND_BLOCKS = 2
"""Blocks of a multiprocessor that share the heads of few tokens."""
RUN = ("ssm_conv1d", "ssm_delta_inputs", "ssm_delta_net", "ssm_gated_norm")
CONV, INPUTS_OP, NET, NORM = range(len(RUN))
CONV_EXTRAS = ("bias", "input_gate", "output_gate")
"""Operands of a convolution that the launch for few tokens does not have."""


def delta_step_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces convolution, recurrence and gated norm of few tokens, and of sequences that
    decode."""
    if tuple(op.name for op in ops[: len(RUN)]) != RUN or not _are_chained(ops):
        return None
    conv, net, norm = ops[CONV], ops[NET], ops[NORM]
    sizes = net.max_sizes()
    size, tokens = sizes["state_size"], sizes["tokens"]
    history = conv.max_sizes()["history"]
    if tokens > ALONE_TOKENS and reads_prompts(ops, tokens):
        # A pass over the states of a slot computes few of its tokens.
        return None
    if tokens > FEW_TOKENS and not (tokens <= DECODING_TOKENS and decodes(ops, tokens)):
        return None
    if _decays_by_key(ops[NET], sizes):
        return None
    if size not in STATE_SIZES or not 0 < history <= MAX_HISTORY:
        return None
    heads = 2 * sizes["key_heads"] + sizes["value_heads"]
    if any(operand_of(conv, name) is not None for name in CONV_EXTRAS):
        return None
    if conv.max_sizes()["channels"] != heads * size or norm.max_sizes()["width"] != size:
        return None
    if norm.max_sizes()["heads"] != sizes["value_heads"]:
        return None
    if not are_unread(ops, len(RUN), [result(norm), *map(_state, (conv, net))]):
        return None
    if tokens <= ALONE_TOKENS:
        standing = _standing(ops, device)
        return Replacement(len(RUN), (standing,), 4 * tokens * sizes["key_heads"])
    if tokens <= FEW_TOKENS:
        passing = _passing(ops, device, ALL_STEPS)
        return None if passing is None else Replacement(len(RUN), (passing,))
    return _by_step(ops, device)


def _by_step(ops: Remaining, device: Device) -> Replacement | None:
    """Launches for steps without prompts and for others, of which each leaves out the other steps:
    a slot passes through one block, where a prompt would take long."""
    passing = _passing(ops, device, DECODING_STEPS)
    makers = (_conv, _inputs, _recurrence, _gated_norm)
    made = [make(ops, number, device, PROMPT_STEPS) for number, make in enumerate(makers)]
    if passing is None or not all(made):
        return None
    return Replacement(len(RUN), (passing, *(launch for launches in made for launch in launches)))


def _standing(ops: Remaining, device: Device) -> KernelLaunch:
    """The launch with a block for every value head of a slot."""
    sizes = ops[NET].max_sizes()
    size, tokens, heads = sizes["state_size"], sizes["tokens"], sizes["value_heads"]
    warps = min(MAX_WARPS, size // ROWS_AT_ONCE)
    in_background = tokens > 1 and device.capability >= STORES_CAPABILITY
    buffers = STATE_BUFFERS if in_background else 0
    macros = {
        "WARPS": warps,
        "STATES": sizes["states"],
        "MAX_TOKENS": tokens,
        "BUFFERS": buffers,
        **_operand_macros(ops),
    }
    nbytes = 4 * buffers * size * size + tokens * (20 * size + FACTOR_BYTES) + 4
    return KernelLaunch("delta_step", (heads, tokens), 32 * warps, nbytes, macros)


def _passing(ops: Remaining, device: Device, steps: int) -> KernelLaunch | None:
    """The launch, for ``steps``, with as many blocks as run at once, which compute the states in
    turn; None where shared memory is too small."""
    sizes = ops[NET].max_sizes()
    size, tokens, key_heads = sizes["state_size"], sizes["tokens"], sizes["key_heads"]
    warps = min(SLOTS_WARPS, size // ROWS_AT_ONCE)
    rows = ROWS_AT_ONCE * min(CHUNK_SETS, size // warps // ROWS_AT_ONCE)
    sharers = sizes["value_heads"] // key_heads
    # The state after each token of a slot that has several is stored.
    groups = GROUP_TOKENS if sizes["states"] == 1 else GROUP_TOKENS[-1:]
    for at_once, slots, group in product(BLOCKS_AT_ONCE, SLOTS, groups):
        of_token = 4 * (2 + 2 * sharers) * size + FACTOR_BYTES * sharers
        ring = warps * slots * (4 * rows * size + 8)
        nbytes = ring + 2 * group * of_token + 4 * (3 * tokens + -(-tokens // 32) + 1)
        if at_once * (nbytes + RESERVED_BYTES) <= device.shared_bytes + RESERVED_BYTES:
            break
    else:
        return None
    blocks = max(1, at_once * device.multiprocessors // key_heads)
    macros = {
        "WARPS": warps,
        "BLOCKS_AT_ONCE": at_once,
        "SHARERS": sharers,
        "MAX_TOKENS": tokens,
        "GROUP_TOKENS": group,
        "STATES": sizes["states"],
        "SLOTS": slots,
        "CHUNK_SETS": rows // ROWS_AT_ONCE,
        "STEPS": steps,
        **_operand_macros(ops),
    }
    return KernelLaunch(
        "delta_slots", (key_heads, min(tokens, blocks)), 32 * (warps + SLOTS_AROUND), nbytes, macros
    )


def _operand_macros(ops: Remaining) -> dict[str, int]:
    """Macros that both kernels for few tokens share."""
    return {
        "STATE_SIZE": ops[NET].max_sizes()["state_size"],
        "HISTORY": ops[CONV].max_sizes()["history"],
        **operand_indices(ops, CONV, "x CONV_WEIGHT=weight query CONV_STATE=state"),
        **operand_indices(ops, INPUTS_OP, "alpha beta decay dt_bias"),
        **operand_indices(ops, NET, "state"),
        **operand_indices(ops, NORM, "gate NORM_WEIGHT=weight y"),
        "INPUTS_OP": INPUTS_OP,
        "NET": NET,
        "NORM": NORM,
        **size_indices("ssm_delta_inputs", "eps", "query_scale"),
        **size_indices("ssm_gated_norm", "eps"),
        **size_indices("ssm_delta_net", "key_heads", "value_heads", "grouped"),
    }


def _are_chained(ops: Sequence[Op]) -> bool:
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
    """Replaces the convolution of many tokens."""
    return _alone(_conv, "ssm_conv1d", ops, device)


def inputs_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces what stands before the recurrence of many tokens."""
    return _alone(_inputs, "ssm_delta_inputs", ops, device)


def recurrence_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces the recurrence of many tokens."""
    return _alone(_recurrence, "ssm_delta_net", ops, device)


def gated_norm_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces the gated norm after the recurrence of many tokens."""
    return _alone(_gated_norm, "ssm_gated_norm", ops, device)


Launches = tuple[KernelLaunch, ...]


def _alone(
    make: Callable[[Remaining, int, Device, int], Launches],
    name: str,
    ops: Remaining,
    device: Device,
) -> Replacement | None:
    """Replaces the first op by what ``make`` makes of it."""
    launches = make(ops, 0, device, ALL_STEPS) if ops[0].name == name else ()
    return Replacement(1, launches) if launches else None


def _conv(ops: Remaining, number: int, device: Device, steps: int) -> Launches:
    """The launches, for ``steps``, of op ``number``, as of the three below; empty where they do not
    support it."""
    sizes = ops[number].max_sizes()
    if sizes["tokens"] <= 1 or not 0 < sizes["history"] <= MAX_HISTORY:
        return ()
    if 1 < sizes["states"] < sizes["history"]:
        # A token would read values that the second launch has replaced.
        return ()
    each = FEW_CONV_TOKENS if decodes(ops, sizes["tokens"]) else CONV_TOKENS
    macros = {
        "HISTORY": sizes["history"],
        "THREADS": CONV_THREADS,
        "CONV_TOKENS": each,
        "STATES": sizes["states"],
        "STEPS": steps,
        **operand_indices(ops, number, "x weight query state y"),
        **operand_indices(ops, number, " ".join(CONV_EXTRAS)),
        "CONV": number,
        **size_indices("ssm_conv1d", "channels"),
    }
    columns, rows = -(-sizes["channels"] // CONV_THREADS), -(-sizes["tokens"] // each)
    nbytes = 4 * each * sizes["history"]
    return tuple(
        KernelLaunch("delta_conv", grid, CONV_THREADS, nbytes, {**macros, "STORES": stores})
        for stores, grid in enumerate(
            ((columns, rows), (columns, 1 if sizes["states"] > 1 else rows))
        )
    )


def _inputs(ops: Remaining, number: int, device: Device, steps: int) -> Launches:
    sizes = ops[number].max_sizes()
    if sizes["state_size"] not in STATE_SIZES or _decays_by_key(ops[number], sizes):
        return ()
    names = "x alpha beta decay dt_bias qk gates"
    macros = {
        "STATE_SIZE": sizes["state_size"],
        "STEPS": steps,
        "INPUTS_OP": number,
        **operand_indices(ops, number, names),
        **size_indices("ssm_delta_inputs", "key_heads", "value_heads", "eps", "query_scale"),
    }
    heads = 2 * sizes["key_heads"]
    return _by_tokens(sizes["tokens"], device, "delta_inputs", heads, macros)


def _recurrence(ops: Remaining, number: int, device: Device, steps: int) -> Launches:
    op = ops[number]
    sizes = op.max_sizes()
    size, rows = sizes["state_size"], ROW_WARPS * ROW_SETS * 32 // ROW_LANES
    if size not in STATE_SIZES or size % rows or not _aligned(op) or _decays_by_key(op, sizes):
        return ()
    tokens, many = sizes["tokens"], decodes(ops, sizes["tokens"])
    parts = PARTS if tokens <= DECODING_TOKENS else 1
    held = size // ROW_LANES
    token_floats = 2 * ROW_LANES * (held + 4 if held > 4 else held) + rows + 4
    macros = {
        "STATE_SIZE": size,
        "ROW_LANES": ROW_LANES,
        "WARPS": ROW_WARPS,
        "ROW_SETS": ROW_SETS,
        "GROUP_TOKENS": ROW_TOKENS,
        "STAGES": ROW_STAGES,
        "STATES": sizes["states"],
        "PARTS": parts,
        "MAX_TOKENS": tokens if parts > 1 else 0,
        "STEPS": steps,
        **operand_indices(ops, number, "x qk gates query state y"),
        "NET": number,
        **size_indices("ssm_delta_net", "key_heads", "value_heads", "grouped"),
    }
    nbytes = 4 * (ROW_STAGES * ROW_TOKENS * token_floats + (parts > 1) * (tokens + ROW_WARPS))
    if not many:
        # More than half of a multiprocessor's memory: blocks that start while the launch before
        # this one ends would else share the multiprocessors that are free first.
        nbytes = max(nbytes, device.shared_bytes // 2)
    grid = (sizes["value_heads"], size // rows * parts)
    return (KernelLaunch("delta_rows", grid, 32 * ROW_WARPS, nbytes, macros),)


def _gated_norm(ops: Remaining, number: int, device: Device, steps: int) -> Launches:
    sizes = ops[number].max_sizes()
    if sizes["width"] not in STATE_SIZES:
        return ()
    macros = {
        "STATE_SIZE": sizes["width"],
        "STEPS": steps,
        "NORM": number,
        **operand_indices(ops, number, "x gate weight y"),
        **size_indices("ssm_gated_norm", "heads", "eps"),
    }
    return _by_tokens(sizes["tokens"], device, "delta_norm", sizes["heads"], macros)


def _by_tokens(
    tokens: int, device: Device, entry: str, heads: int, macros: dict[str, int]
) -> Launches:
    """A launch with a block for every token, or several where that leaves multiprocessors idle."""
    sharers = AROUND_BLOCKS * device.multiprocessors // tokens
    grid = tokens, max(1, min(sharers, -(-heads // AROUND_WARPS)))
    macros = {"WARPS": AROUND_WARPS, **macros}
    return (KernelLaunch(entry, grid, 32 * AROUND_WARPS, 0, macros),)


def _decays_by_key(op: Op, sizes: Mapping[str, int]) -> bool:
    """Whether a head has more than one decay: gates hold these and one more number of each."""
    gates = operand_of(op, "gates")
    return gates is None or gates.columns != 2 * sizes["value_heads"]


def _aligned(op: Op) -> bool:
    """Whether rows can be copied 16 bytes at a time."""
    tensors = [operand_of(op, name) for name in ("x", "qk")]
    return all(one is not None and one.start % 4 == 0 and one.stride % 4 == 0 for one in tensors)
