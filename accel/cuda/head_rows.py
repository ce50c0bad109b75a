"""Norms and rotation of the heads of q and k and the write of keys and values, as one launch.

The run, whatever the family: ``rms_norm? rope`` of q, the same of k, ``kv_write_batched``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel.cuda.device import Device
from accel.cuda.runs import (
    nobody_reads,
    operand_place,
    packet_number,
    result,
    size_places,
    source,
)
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.step import Op
from contract.dtypes import I12, DType

WARPS = 4
ROW_FLOATS = 512
"""Of a head, in shared memory."""
BLOCKS_PER_MULTIPROCESSOR = 32
MOST_WARP_TOKENS = 64
"""With more tokens a block takes all heads of one."""
TOKEN_WARPS, TOKEN_CHANNELS = 8, 6 * 128
"""Of such a block; a warp's in registers."""
TOKEN_HEAD_DIMS = (64, 128, 256)
STORAGES: tuple[DType, ...] = (I12,)
"""Pages it is used for. Of the others it has the definition's bits on emulated blocks and op by op
on a device; the proofs of whole models there have yet to pass without an exception."""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Places of the ops among those of the step that are left; norms may be absent."""

    q_rope: int
    k_rope: int
    write: int
    q_norm: int | None = None
    k_norm: int | None = None


def head_rows_rule(ops: Remaining, device: Device) -> Replacement | None:
    """One launch for the whole run."""
    run = head_run(ops)
    if run is None:
        return None
    kept = result(ops[run.q_rope]), result(ops[run.write])
    if not nobody_reads(ops, run.write + 1, kept):
        return None
    write, q_sizes = ops[run.write], ops[run.q_rope].most_sizes()
    if write.dtype not in STORAGES:
        return None
    k_sizes = ops[run.k_rope].most_sizes()
    heads = q_sizes["heads"] + 2 * k_sizes["heads"]
    if _by_tokens(write, q_sizes):
        return Replacement(run.write + 1, (_token_launch(ops, run, heads),))
    warps = q_sizes["tokens"] * heads
    blocks = min(-(-warps // WARPS), device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR)
    assert write.dtype is not None
    launch = KernelLaunch(
        "head_rows.cu",
        "head_rows",
        (max(1, blocks), 1, 1),
        (WARPS * 32, 1, 1),
        WARPS * ROW_FLOATS * 4,
        {"DTYPE": write.dtype.ggml_id, "WARPS": WARPS} | head_places(ops, run),
    )
    return Replacement(run.write + 1, (launch,))


def _by_tokens(write: Op, sizes: Mapping[str, int]) -> bool:
    """Whether a block takes a token, with rows in registers."""
    head_dim = sizes["head_dim"]
    turns_halves = sizes["neox"] and 2 * sizes["rotary_pairs"] == head_dim
    many = sizes["tokens"] > MOST_WARP_TOKENS
    return bool(write.dtype == I12 and many and head_dim in TOKEN_HEAD_DIMS and turns_halves)


def _token_launch(ops: Remaining, run: HeadRun, heads: int) -> KernelLaunch:
    sizes = ops[run.q_rope].most_sizes()
    return KernelLaunch(
        "head_tokens.cu",
        "head_tokens",
        (sizes["tokens"], 1, 1),
        (TOKEN_WARPS * 32, 1, 1),
        macros={
            "DTYPE": I12.ggml_id,
            "WARPS": TOKEN_WARPS,
            "HEAD_DIM": sizes["head_dim"],
            "HELD": min(-(-heads // TOKEN_WARPS), TOKEN_CHANNELS // sizes["head_dim"]),
            **head_places(ops, run),
        },
    )


def head_run(ops: Sequence[Op]) -> HeadRun | None:
    """The run that the ops begin with."""
    at, norms, ropes = 0, [], []
    for _ in range(2):
        norm = at if at < len(ops) and ops[at].name == "rms_norm" else None
        at += norm is not None
        if at >= len(ops) or ops[at].name != "rope":
            return None
        if norm is not None and result(ops[norm]) != source(ops[at]):
            return None
        norms.append(norm)
        ropes.append(at)
        at += 1
    if at >= len(ops) or ops[at].name != "kv_write_batched":
        return None
    run = HeadRun(ropes[0], ropes[1], at, norms[0], norms[1])
    return run if _agrees(ops, run) else None


def _agrees(ops: Sequence[Op], run: HeadRun) -> bool:
    """Whether keys are what was rotated last, of equal heads, at the same positions."""
    q, k, write = ops[run.q_rope], ops[run.k_rope], ops[run.write]
    sizes, k_sizes, written = q.most_sizes(), k.most_sizes(), write.most_sizes()
    same = ("head_dim", "neox", "rotary_pairs", "tokens")
    queries = {op.operands[_index(op, "query")] for op in (q, k, write)}
    tables = {op.operands[_index(op, "rope_table")] for op in (q, k)}
    norms = (
        (ops[n], ropes)
        for n, ropes in ((run.q_norm, sizes), (run.k_norm, k_sizes))
        if n is not None
    )
    return (
        result(k) == source(write)
        and all(sizes[name] == k_sizes[name] for name in same)
        and sizes["head_dim"] == written["head_dim"] <= ROW_FLOATS
        and k_sizes["heads"] * sizes["head_dim"] == written["width"]
        and len(queries) == len(tables) == 1
        and all(norm.most_sizes()["groups"] == ropes["heads"] for norm, ropes in norms)
    )


def _index(op: Op, name: str) -> int:
    return [operand.name for operand in op.device.operands].index(name)


def head_places(ops: Sequence[Op], run: HeadRun) -> dict[str, int]:
    """Macros of where kernels find its operands, packets and sizes."""
    q_first = run.q_rope if run.q_norm is None else run.q_norm
    k_first = run.k_rope if run.k_norm is None else run.k_norm
    return {
        "Q_AT": operand_place(ops, q_first, "x"),
        "K_AT": operand_place(ops, k_first, "x"),
        "V_AT": operand_place(ops, run.write, "v"),
        "Q_WEIGHT_AT": operand_place(ops, run.q_norm, "weight"),
        "K_WEIGHT_AT": operand_place(ops, run.k_norm, "weight"),
        "Q_RESULT_AT": operand_place(ops, run.q_rope, "y"),
        "TABLE_AT": operand_place(ops, run.q_rope, "rope_table"),
        "QUERY_AT": operand_place(ops, run.q_rope, "query"),
        "PAGES_AT": operand_place(ops, run.write, "page_table"),
        "KV_AT": operand_place(ops, run.write, "kv"),
        "Q_NORM": packet_number(run.q_norm),
        "K_NORM": packet_number(run.k_norm),
        "Q_ROPE": run.q_rope,
        "K_ROPE": run.k_rope,
        **size_places("rope", "heads", "head_dim", "neox", "rotary_pairs"),
        **size_places("rms_norm", "eps"),
    }
