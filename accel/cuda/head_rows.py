"""The rule for heads: norms and rotation of q and k, and the write of keys and values, as one
launch.

The run, in whatever family: ``rms_norm? rope`` of q, the same of k, ``kv_write_batched``; with
coded pages ``rotate_heads`` of k and v before that write and of q behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accel.cuda.attention import HEAD_DIMS
from accel.cuda.device import Device
from accel.cuda.runs import (
    are_unread,
    operand_indices,
    operand_of,
    packet_number,
    result,
    size_indices,
    source,
)
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.step import Op, Tensor
from contract.dtypes import I12, ROTATED_KV, DType

WARPS = 4
MAX_CHANNELS = 512
"""Most channels of a head, which the lanes of a warp hold in registers."""
BLOCKS_PER_MULTIPROCESSOR = 32
STORAGES: tuple[DType, ...] = (I12, *ROTATED_KV)
"""Storage types of pages that the kernel writes."""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Indices of the ops among the remaining ops of the step; norms may be absent. Coded pages are
    ``rotated``."""

    q_rope: int
    k_rope: int
    write: int
    q_norm: int | None = None
    k_norm: int | None = None
    rotated: bool = False

    @property
    def length(self) -> int:
        """Number of all ops of the run."""
        return self.write + 1 + self.rotated

    @property
    def q_last(self) -> int:
        """The op whose result attention reads."""
        return self.write + 1 if self.rotated else self.q_rope

    def behind(self, ops: int) -> HeadRun:
        """The run with indices that count from ``ops`` ops earlier."""
        q_norm, k_norm = (one if one is None else one + ops for one in (self.q_norm, self.k_norm))
        ropes = self.q_rope + ops, self.k_rope + ops
        return HeadRun(*ropes, self.write + ops, q_norm, k_norm, self.rotated)


@dataclass(frozen=True, slots=True)
class LeftSpans:
    """Unfolded sums of the products of q, k and v: the spans of every row, and indices of the
    biases."""

    count: int
    biases: tuple[int | None, ...]


def head_rows_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces the whole run by one launch."""
    run = head_run(ops)
    if run is None or not are_unread(ops, run.length, head_results(ops, run)):
        return None
    return Replacement(run.length, (head_launch(ops, run, device),))


def head_results(ops: Sequence[Op], run: HeadRun) -> tuple[Tensor | None, ...]:
    """The tensors that the launch writes."""
    return result(ops[run.q_last]), result(ops[run.write])


def head_sources(ops: Sequence[Op], run: HeadRun) -> tuple[Tensor | None, ...]:
    """The tensors of q, k and v that the launch reads."""
    ropes = zip((run.q_norm, run.k_norm), (run.q_rope, run.k_rope), strict=True)
    read = [source(ops[rope if norm is None else norm]) for norm, rope in ropes]
    v = source(ops[run.write - 1]) if run.rotated else operand_of(ops[run.write], "v")
    return (*read, v)


def head_launch(
    ops: Sequence[Op], run: HeadRun, device: Device, left: LeftSpans | None = None
) -> KernelLaunch:
    """The launch of a run after products, which wrote whole rows or the spans ``left``."""
    write, sizes = ops[run.write], ops[run.q_rope].max_sizes()
    heads = sizes["heads"] + 2 * ops[run.k_rope].max_sizes()["heads"]
    warps = sizes["tokens"] * heads
    blocks = min(-(-warps // WARPS), device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR)
    biases = (None, None, None) if left is None else left.biases
    assert write.dtype is not None
    macros = {
        "DTYPE": write.dtype.ggml_id,
        "WARPS": WARPS,
        "WIDTH": sizes["head_dim"],
        "SPANS": 0 if left is None else left.count,
        **operand_indices(ops, biases[0], "Q_BIAS_AT=bias"),
        **operand_indices(ops, biases[1], "K_BIAS_AT=bias"),
        **operand_indices(ops, biases[2], "V_BIAS_AT=bias"),
        **head_macros(ops, run),
    }
    return KernelLaunch(
        "head_rows", (max(1, blocks),), WARPS * 32, WARPS * sizes["head_dim"] * 4, macros
    )


def head_run(ops: Sequence[Op]) -> HeadRun | None:
    """The run that the ops begin with, None if they begin with none."""
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
    names = [op.name for op in ops[at : at + 4]]
    rotated = names == ["rotate_heads", "rotate_heads", "kv_write_batched", "rotate_heads"]
    if not rotated and names[:1] != ["kv_write_batched"]:
        return None
    run = HeadRun(ropes[0], ropes[1], at + 2 * rotated, norms[0], norms[1], rotated)
    return run if _agrees(ops, run) else None


def _follows(ops: Sequence[Op], run: HeadRun) -> bool:
    """Whether the run writes the keys that it turned last."""
    write, keys = ops[run.write], result(ops[run.k_rope])
    if not run.rotated:
        return keys == source(write)
    rotations = k, v, q = ops[run.write - 2], ops[run.write - 1], ops[run.q_last]
    return (
        (source(k), source(q)) == (keys, result(ops[run.q_rope]))
        and (result(k), result(v)) == (source(write), operand_of(write, "v"))
        and ops[run.q_rope].max_sizes()["head_dim"] in HEAD_DIMS
        and not any(op.max_sizes()["back"] for op in rotations)
    )


def _agrees(ops: Sequence[Op], run: HeadRun) -> bool:
    """Whether the run writes the keys it rotated last, with equal heads at the same positions."""
    q, k, write = ops[run.q_rope], ops[run.k_rope], ops[run.write]
    sizes, k_sizes, written = q.max_sizes(), k.max_sizes(), write.max_sizes()
    same = ("head_dim", "neox", "rotary_pairs", "tokens")
    queries = {operand_of(op, "query") for op in (q, k, write)}
    tables = {operand_of(op, "rope_table") for op in (q, k)}
    norms = (
        (ops[n], ropes)
        for n, ropes in ((run.q_norm, sizes), (run.k_norm, k_sizes))
        if n is not None
    )
    return (
        _follows(ops, run)
        and write.dtype in STORAGES
        and all(sizes[name] == k_sizes[name] for name in same)
        and sizes["head_dim"] == written["head_dim"] <= MAX_CHANNELS
        and k_sizes["heads"] * sizes["head_dim"] == written["width"]
        and len(queries) == len(tables) == 1
        and all(norm.max_sizes()["groups"] == ropes["heads"] for norm, ropes in norms)
    )


def head_macros(ops: Sequence[Op], run: HeadRun) -> dict[str, int]:
    """Macros of the run's operands, packets and sizes."""
    q_first = run.q_rope if run.q_norm is None else run.q_norm
    k_first = run.k_rope if run.k_norm is None else run.k_norm
    return {
        **operand_indices(ops, q_first, "Q_AT=x"),
        **operand_indices(ops, k_first, "K_AT=x"),
        **operand_indices(ops, run.write - run.rotated, "V_AT=x" if run.rotated else "V_AT=v"),
        **operand_indices(ops, run.q_norm, "Q_WEIGHT_AT=weight"),
        **operand_indices(ops, run.k_norm, "K_WEIGHT_AT=weight"),
        **operand_indices(ops, run.q_last, "Q_RESULT_AT=y"),
        **operand_indices(ops, run.q_rope, "TABLE_AT=rope_table QUERY_AT=query"),
        **operand_indices(ops, run.write, "PAGES_AT=page_table KV_AT=kv"),
        "Q_NORM": packet_number(run.q_norm),
        "K_NORM": packet_number(run.k_norm),
        "Q_ROPE": run.q_rope,
        "K_ROPE": run.k_rope,
        **size_indices("rope", "heads", "head_dim", "neox", "rotary_pairs"),
        **size_indices("rms_norm", "eps"),
    }
