"""The CPU tier's fast functions for opcodes, with the same bits as the definitions.

A kernel is a function of a node's bound operands and parameters. It prepares once, when the graph
is lowered, what can be prepared, and returns the call that computes the node in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from contract.opcodes import Opcode
from reference.cpu.attention import AttentionShape, paged_attention
from reference.cpu.experts import Call, Kernel, Operands, Parameters, expert_kernels
from reference.cpu.matmul import PreparedActivation, prepared_matmul
from reference.cpu.prepared import PreparedMatrices
from reference.cpu.recurrent import conv1d, delta_net, scan
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
    Opcode.HEAD_PRODUCT: ("weight",),
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
        Opcode.SSM_CONV1D: partial(_same_names, conv1d, threads),
        Opcode.SSM_DELTA_NET: partial(_same_names, delta_net, threads),
        Opcode.SSM_SCAN: partial(_same_names, scan, threads),
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


def _attention(threads: int, bound: Operands, params: Any) -> Call:
    return partial(paged_attention, **bound, shape=AttentionShape(**params), threads=threads)


def _same_names(
    function: Callable[..., None], threads: int, bound: Operands, params: Parameters
) -> Call:
    """The call of a function that takes operands and parameters by their names in the table."""
    return partial(function, **bound, **params, threads=threads)
