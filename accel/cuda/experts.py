"""Rules for experts: products of tokens with stacks of matrices in units.

A block of experts - norm, router, choice, gate and up, activation, down, weighted sum, and the
shared expert where there is one - is one launch for few tokens, or three where that does not fit or
its blocks might wait for others in vain, and five for more tokens, which the device groups by
expert; where devices share a step, one more gathers. Every product with such a
stack can also be launched alone."""

from __future__ import annotations

from collections.abc import Sequence

from accel.cuda.device import Device
from accel.cuda.expert_block import ExpertBlock, expert_block, formats_of, gate_macros
from accel.cuda.expert_groups import (
    CHUNK_UNITS,
    FEW_TOKENS,
    SPAN_UNITS,
    grouped_launches,
    grouping,
    router_tokens,
    router_words,
)
from accel.cuda.expert_prompts import PromptLaunches, prompt_launches
from accel.cuda.expert_token import token_launch
from accel.cuda.gathers import WORD_BYTES, gathering
from accel.cuda.packed_tiles import (
    TUNED_STACKS,
    UNIT_ROWS,
    in_units,
    is_stack_in_units,
    unit_bytes,
    unit_count,
)
from accel.cuda.runs import are_unread, operand_indices, result, size_indices, source
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.step import Op
from contract.dtypes import F32, DType

UNIT_ACTIVATION_BYTES = 512 + 32 + 4
BARRIER_BYTES = 8
SLOTS = 2
ROUTER_ROWS, MANY_ROUTER_ROWS = 2, 8
"""Rows of the router that a block computes: for few tokens so that all blocks run at once, for many
so that fewer blocks repeat a token's norm."""
MAX_SPREAD_TOKENS, ROUTER_BLOCKS = 64, 2
"""With more tokens a block computes several groups of rows behind each other, so that ROUTER_BLOCKS
of a multiprocessor are all: fewer blocks repeat a token's norm, and caches keep its values."""
MAX_ROUTER_WARPS = 8
MAX_HELD = 4
"""Most segments of a row in the registers of a warp of the router."""
MAX_EXPERTS = 512
MAX_USED = 16
MAX_WARPS = 16
MAX_DOWN_UNITS = 8
"""Most units of a row of h, which a warp quantizes in registers."""
MAX_GRID = 65535


def expert_product_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces a single product with a stack."""
    op = ops[0]
    if not is_stack_in_units(op):
        return None
    sizes = op.max_sizes()
    spans = -(-unit_count(sizes["columns"]) // SPAN_UNITS)
    assert op.dtype is not None
    assert _tiles(op) <= MAX_GRID
    nbytes = spans * (row_bytes(SPAN_UNITS) + _ring_bytes(SLOTS, op.dtype) + 4 * UNIT_ROWS)
    macros = {
        "SPANS": spans,
        "SLOTS": SLOTS,
        "HELD_UNITS": 1,
        "FORMAT_ID": op.dtype.ggml_id,
        **operand_indices(ops, 0, "M=x scale sums ids W=weight y"),
        **size_indices("matmul", "rows", "columns", "used", "row_pairs"),
    }
    launch = KernelLaunch(
        "expert_product", (sizes["tokens"], _tiles(op)), 32 * spans, nbytes, macros
    )
    return Replacement(1, (launch,))


def expert_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces a whole block of experts."""
    if ops[0].name != "rms_norm":
        return None
    block = expert_block(ops)
    if block is None or not are_unread(ops, block.length, [result(ops[block.end])]):
        return None
    if not _fits(ops, block, device):
        return None
    if (alone := token_launch(ops, block, device)) is not None:
        return Replacement(block.length, (alone,), alone.macros["WORKSPACE_BYTES"])
    if (prompt := prompt_launches(ops, block, device)) is not None:
        return _of_prompt(ops, block, prompt)
    grouped = grouping(ops, block, device)
    if grouped is None and _gates_grid(ops, block)[1] > MAX_GRID:
        return None
    made: Sequence[KernelLaunch] = (_gates(ops, block),)
    used: Sequence[KernelLaunch] = (_down(ops, block),)
    words = router_words(ops, block)
    if grouped is not None:
        made, used = grouped_launches(ops, block, grouped, device)
        words += grouped.table_words
    if block.gathers:
        made = (*made, gathering(ops, block.gathers))
    router = _router(ops, block, device)
    return Replacement(block.length, (router, *made, *used), WORD_BYTES * words)


def _of_prompt(ops: Sequence[Op], block: ExpertBlock, prompt: PromptLaunches) -> Replacement:
    between = (gathering(ops, block.gathers),) if block.gathers else ()
    launches = (*prompt.gates, *between, *prompt.downs)
    return Replacement(block.length, launches, transient_bytes=prompt.transient_bytes)


def _fits(ops: Sequence[Op], block: ExpertBlock, device: Device) -> bool:
    norm, router = ops[block.norm], ops[block.router]
    gates, ups, downs = ops[block.gates], ops[block.ups], ops[block.downs]
    used, experts = gates.max_sizes()["used"], router.max_sizes()["rows"]
    if not all(map(is_stack_in_units, (gates, ups, downs))) or gates.dtype != ups.dtype:
        return False
    if gates.max_sizes()["row_pairs"] != used or downs.max_sizes()["row_pairs"] != 1:
        return False
    if norm.max_sizes()["groups"] != 1 or experts > MAX_EXPERTS or used > MAX_USED:
        return False
    if norm.count.maximum > MAX_GRID or not _aligned(ops, block):
        return False
    if _router_shape(router)[1] > MAX_HELD or 2 * _gate_spans(gates) > MAX_WARPS:
        return False
    if unit_count(downs.max_sizes()["columns"]) > MAX_DOWN_UNITS:
        return False
    if block.shared_total is not None and not _shared_fits(ops, block):
        return False
    limit = device.shared_bytes
    return _gate_bytes(ops, block) <= limit and _down_bytes(ops, block) <= limit


def _shared_fits(ops: Sequence[Op], block: ExpertBlock) -> bool:
    """Whether the shared expert has the shape of the others."""
    pairs = (
        (block.shared_gate, block.gates),
        (block.shared_up, block.ups),
        (block.shared_down, block.downs),
    )
    for number, like in pairs:
        assert number is not None
        shared = ops[number]
        if not in_units(shared) or shared.dtype not in TUNED_STACKS:
            return False
        sizes, others = shared.max_sizes(), ops[like].max_sizes()
        if any(sizes[name] != others[name] for name in ("rows", "columns")):
            return False
    assert block.shared_gate is not None
    assert block.shared_up is not None
    if ops[block.shared_gate].dtype != ops[block.shared_up].dtype:
        return False
    if block.gate_logit is None:
        return True
    logit = ops[block.gate_logit]
    return logit.dtype == F32 and logit.max_sizes()["rows"] == 1


def _aligned(ops: Sequence[Op], block: ExpertBlock) -> bool:
    """Whether rows that are read 16 bytes at a time are aligned."""
    tensors = [source(ops[block.norm]), ops[block.norm].operands[1], source(ops[block.hidden])]
    if block.shared_activation is not None:
        tensors.append(result(ops[block.shared_activation]))
    return all(
        tensor is None or ((tensor.start % 4 == 0 and tensor.stride % 4 == 0) or tensor.stride == 1)
        for tensor in tensors
    )


def row_bytes(units: int) -> int:
    """Shared memory of the activations of ``units`` units."""
    return -(-units * UNIT_ACTIVATION_BYTES // 16) * 16


def _ring_bytes(slots: int, *dtypes: DType) -> int:
    """Shared memory of the ring of one warp."""
    return slots * (CHUNK_UNITS * max(map(unit_bytes, dtypes)) + BARRIER_BYTES)


def _slots(units: int) -> int:
    """Chunks that a warp copies ahead."""
    return min(SLOTS, -(-units // CHUNK_UNITS))


def _tiles(product: Op) -> int:
    return -(-product.max_sizes()["rows"] // UNIT_ROWS)


def _router_shape(router: Op) -> tuple[int, int]:
    """Warps of a block, and segments that each holds."""
    segments = unit_count(router.max_sizes()["columns"])
    warps = min(MAX_ROUTER_WARPS, segments)
    return warps, -(-segments // warps)


def _router_rows(router: Op) -> int:
    if router.count.maximum <= FEW_TOKENS:
        return ROUTER_ROWS
    return max(ROUTER_ROWS, MANY_ROUTER_ROWS // _router_shape(router)[1])


def _router(ops: Sequence[Op], block: ExpertBlock, device: Device) -> KernelLaunch:
    router = ops[block.router]
    warps, held = _router_shape(router)
    sizes, at_once, of_block = router.max_sizes(), _router_rows(router), router_tokens(router)
    of_rows = -(-(sizes["rows"] + (block.gate_logit is not None)) // at_once)
    of_tokens = -(-sizes["tokens"] // of_block)
    spread = max(1, ROUTER_BLOCKS * device.multiprocessors // of_tokens)
    groups = 1 if sizes["tokens"] <= MAX_SPREAD_TOKENS else -(-of_rows // spread)
    macros = {
        "WARPS": warps,
        "ROW_GROUPS": groups,
        "HELD": held,
        "EXPERT_SEGMENTS": unit_count(sizes["rows"]),
        "HELD_UNITS": 1,
        "ROUTER_ROWS": at_once,
        "ROUTER_TOKENS": of_block,
        **operand_indices(ops, block.norm, "x NORM_WEIGHT=weight"),
        **operand_indices(ops, block.quantize, "m scale sums"),
        **operand_indices(ops, block.router, "ROUTER=weight LOGITS=y"),
        **operand_indices(ops, block.gate_logit, "GATE_ROW=weight GATE_LOGIT=y"),
        **operand_indices(ops, block.topk, "ids weights"),
        "NORM": block.norm,
        "PRODUCT": block.router,
        "TOPK": block.topk,
        **size_indices("matmul", "rows", "columns"),
        **size_indices("rms_norm", "eps"),
        **size_indices("expert_topk", "used", "renormalize"),
    }
    grid = (-(-of_rows // groups), of_tokens)
    nbytes = 4 * (of_block * ((1 + at_once) * unit_count(sizes["columns"]) + 1) + 1)
    return KernelLaunch("expert_router", grid, 32 * warps, nbytes, macros)


def _gate_spans(gates: Op) -> int:
    return -(-unit_count(gates.max_sizes()["columns"]) // SPAN_UNITS)


def _gate_bytes(ops: Sequence[Op], block: ExpertBlock) -> int:
    formats = formats_of(ops, block.gates, block.shared_gate)
    of_warp = _ring_bytes(SLOTS, *formats) + 4 * UNIT_ROWS
    return 2 * _gate_spans(ops[block.gates]) * of_warp


def _gates_grid(ops: Sequence[Op], block: ExpertBlock) -> tuple[int, int]:
    """The grid: tiles, and experts of all tokens."""
    gates = ops[block.gates]
    experts = gates.max_sizes()["used"] + (block.shared_gate is not None)
    return _tiles(gates), ops[block.norm].count.maximum * experts


def _gates(ops: Sequence[Op], block: ExpertBlock) -> KernelLaunch:
    gates = ops[block.gates]
    spans, used = _gate_spans(gates), gates.max_sizes()["used"]
    macros = {
        "SPANS": spans,
        "SLOTS": SLOTS,
        "HELD_UNITS": 1,
        "USED": used,
        **gate_macros(ops, block),
        **operand_indices(ops, block.topk, "ids"),
        **size_indices("matmul", "rows", "columns"),
        **size_indices("swiglu", "activation"),
    }
    return KernelLaunch(
        "expert_gates", _gates_grid(ops, block), 64 * spans, _gate_bytes(ops, block), macros
    )


def _down_bytes(ops: Sequence[Op], block: ExpertBlock) -> int:
    formats = formats_of(ops, block.downs, block.shared_down)
    units = unit_count(ops[block.downs].max_sizes()["columns"])
    of_warp = row_bytes(units) + _ring_bytes(_slots(units), *formats) + 4 * UNIT_ROWS
    return _down_warps(ops, block) * of_warp


def _down_warps(ops: Sequence[Op], block: ExpertBlock) -> int:
    return ops[block.downs].max_sizes()["used"] + (block.shared_down is not None)


def _down(ops: Sequence[Op], block: ExpertBlock) -> KernelLaunch:
    downs = ops[block.downs]
    warps = _down_warps(ops, block)
    first, second = formats_of(ops, block.downs, block.shared_down)
    units = unit_count(downs.max_sizes()["columns"])
    macros = {
        "WARPS": warps,
        "SLOTS": _slots(units),
        "HELD_UNITS": 1,
        "USED": downs.max_sizes()["used"],
        "UNITS": units,
        "FORMAT_ID": first.ggml_id,
        "SHARED_FORMAT": second.ggml_id,
        **operand_indices(ops, block.hidden, "H=x"),
        **operand_indices(ops, block.topk, "ids weights"),
        **operand_indices(ops, block.downs, "DOWNS=weight"),
        **operand_indices(ops, block.total, "expert_scale residual"),
        **operand_indices(ops, block.shared_hidden, "SHARED_H=x"),
        **operand_indices(ops, block.shared_down, "SHARED_DOWN=weight"),
        **operand_indices(ops, block.gate_logit, "GATE_LOGIT=y"),
        **operand_indices(ops, block.end, "y"),
        "PRODUCT": block.downs,
        **size_indices("matmul", "rows", "columns"),
    }
    grid = (_tiles(downs), ops[block.norm].count.maximum)
    return KernelLaunch("expert_down", grid, 32 * warps, _down_bytes(ops, block), macros)
