"""The CPU tier's fast functions for opcodes, with the same bits as the definitions.

A kernel is a function of a node's bound operands and parameters. It prepares once, when the graph
is lowered, what can be prepared, and returns the call that computes the node in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from contract.opcodes import Opcode
from reference.cpu.attention import AttentionShape, paged_attention
from reference.cpu.experts import Call, Kernel, Operands, Parameters, expert_kernels
from reference.cpu.matmul import PreparedActivation, prepared_matmul
from reference.cpu.prepared import PreparedMatrices
from reference.cpu.recurrent import DeltaShape, ScanShape, conv1d, delta_net, scan
from reference.ops.rms_norm import rms_norm

PREPARED: Mapping[Opcode, tuple[str, ...]] = {
    Opcode.MATMUL: ("weight",),
    Opcode.LM_HEAD: ("weight",),
    Opcode.RMS_NORM_FUSED_QKV: ("q_weight", "k_weight", "v_weight"),
    Opcode.RMS_NORM_FUSED_MLP_GATE_UP: ("gate_weight", "up_weight"),
    Opcode.MOE_GATE_TOPK: ("gate_weight",),
    Opcode.SHARED_EXPERT: ("gate_weight", "up_weight", "down_weight"),
}
"""The operands whose prepared form an opcode's kernel keeps."""
PREPARED_EXPERTS: Mapping[Opcode, tuple[str, ...]] = {
    Opcode.MOE_GATE_UP: ("gate_weight", "up_weight"),
    Opcode.MOE_DOWN_ACC: ("down_weight",),
}
"""The operands of which a kernel caches the recently used experts, see
``reference.cpu.prepared``."""


def fast_kernels(matrices: PreparedMatrices, threads: int) -> Mapping[Opcode, Kernel]:
    """The kernels by opcode; each splits independent outputs over ``threads`` threads."""
    attention = partial(_attention, threads)
    return {
        Opcode.MATMUL: partial(_product, matrices, threads, "y"),
        Opcode.RMS_NORM_FUSED_QKV: partial(_norm_products, matrices, threads, ("q", "k", "v")),
        Opcode.RMS_NORM_FUSED_MLP_GATE_UP: partial(
            _norm_products, matrices, threads, ("gate", "up")
        ),
        Opcode.LM_HEAD: partial(_product, matrices, threads, "logits"),
        Opcode.FLASH_ATTN: attention,
        Opcode.FLASH_ATTN_BATCHED: attention,
        Opcode.SSM_CONV1D: partial(_convolution, threads),
        Opcode.SSM_DELTA_NET: partial(_recurrence, threads),
        Opcode.SSM_SCAN: partial(_scan, threads),
        **expert_kernels(matrices, threads),
    }


def _product(
    matrices: PreparedMatrices, threads: int, y: str, bound: Operands, params: Parameters
) -> Call:
    """The product x weight^T, written to the operand named ``y``."""
    prepared = matrices.prepare(bound["weight"])
    return partial(prepared_matmul, prepared, bound["x"], bound[y], threads)


def _norm_products(
    matrices: PreparedMatrices,
    threads: int,
    names: tuple[str, ...],
    bound: Operands,
    params: Parameters,
) -> Call:
    """A norm of x, then a product for each name: norm name_weight^T is written to name."""
    weights = [(matrices.prepare(bound[f"{name}_weight"]), bound[name]) for name in names]

    def call() -> None:
        h = rms_norm(x=bound["x"], weight=bound["norm_weight"], eps=params["eps"])
        activation = PreparedActivation(h)
        for prepared, y in weights:
            prepared_matmul(prepared, activation, y, threads)

    return call


def _attention(threads: int, bound: Operands, params: Parameters) -> Call:
    shape = AttentionShape(
        heads=int(params["heads"]),
        kv_heads=int(params["kv_heads"]),
        head_dim=int(params["head_dim"]),
        scale=float(params["scale"]),
        window=int(params["window"]),
        soft_cap=float(params["soft_cap"]),
    )
    q, kv, page_table, query = (bound[name] for name in ("q", "kv", "page_table", "query"))
    y, sinks = bound["y"], bound.get("sinks")
    return partial(paged_attention, q, kv, page_table, query, shape, y, sinks, threads)


def _convolution(threads: int, bound: Operands, params: Parameters) -> Call:
    operands = {name: bound[name] for name in ("x", "weight", "query", "state", "y")}
    return partial(
        conv1d,
        **operands,
        bias=bound.get("bias"),
        input_gate=bound.get("input_gate"),
        output_gate=bound.get("output_gate"),
        states=int(params["states"]),
        threads=threads,
    )


def _recurrence(threads: int, bound: Operands, params: Parameters) -> Call:
    names = ("x", "alpha", "beta", "decay", "dt_bias", "query", "state", "y")
    shape = DeltaShape(
        key_heads=int(params["key_heads"]),
        value_heads=int(params["value_heads"]),
        state_size=int(params["state_size"]),
        grouped=int(params["grouped"]),
        eps=float(params["eps"]),
        states=int(params["states"]),
    )
    operands = {name: bound[name] for name in names}
    return partial(delta_net, **operands, shape=shape, threads=threads)


def _scan(threads: int, bound: Operands, params: Parameters) -> Call:
    names = ("x", "dt", "decay", "dt_bias", "skip", "query", "state", "y")
    sizes = ("heads", "groups", "head_dim", "state_size", "states")
    shape = ScanShape(*(int(params[name]) for name in sizes))
    operands = {name: bound[name] for name in names}
    return partial(scan, **operands, shape=shape, threads=threads)
