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
from reference.cpu.recurrent import DeltaShape, conv1d, delta_net
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

    def product(x: str, weight: str, y: str) -> Kernel:
        def kernel(bound: Operands, params: Parameters) -> Call:
            prepared = matrices.prepare(bound[weight])
            return partial(prepared_matmul, prepared, bound[x], bound[y], threads)

        return kernel

    def norm_products(*names: str) -> Kernel:
        """A kernel of one norm, then for each name a product: norm name_weight^T is written to
        name."""

        def kernel(bound: Operands, params: Parameters) -> Call:
            weights = [(matrices.prepare(bound[f"{name}_weight"]), bound[name]) for name in names]

            def call() -> None:
                h = rms_norm(x=bound["x"], weight=bound["norm_weight"], eps=params["eps"])
                activation = PreparedActivation(h)
                for prepared, y in weights:
                    prepared_matmul(prepared, activation, y, threads)

            return call

        return kernel

    def attention(bound: Operands, params: Parameters) -> Call:
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

    def convolution(bound: Operands, params: Parameters) -> Call:
        operands = {name: bound[name] for name in ("x", "weight", "query", "state", "y")}
        return partial(conv1d, **operands, threads=threads)

    def recurrence(bound: Operands, params: Parameters) -> Call:
        names = ("x", "alpha", "beta", "decay", "dt_bias", "query", "state", "y")
        shape = DeltaShape(
            key_heads=int(params["key_heads"]),
            value_heads=int(params["value_heads"]),
            state_size=int(params["state_size"]),
            grouped=int(params["grouped"]),
            eps=float(params["eps"]),
        )
        operands = {name: bound[name] for name in names}
        return partial(delta_net, **operands, shape=shape, threads=threads)

    return {
        Opcode.MATMUL: product("x", "weight", "y"),
        Opcode.RMS_NORM_FUSED_QKV: norm_products("q", "k", "v"),
        Opcode.RMS_NORM_FUSED_MLP_GATE_UP: norm_products("gate", "up"),
        Opcode.LM_HEAD: product("x", "weight", "logits"),
        Opcode.FLASH_ATTN: attention,
        Opcode.FLASH_ATTN_BATCHED: attention,
        Opcode.SSM_CONV1D: convolution,
        Opcode.SSM_DELTA_NET: recurrence,
        **expert_kernels(matrices, threads),
    }
