"""Opcodes for which the CPU tier has a faster function than the definition, of the same bits.

A kernel is a function of the bound operands and the parameters that returns the call to make
each step: whatever can be prepared once is prepared when the graph is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from contract.opcodes import Opcode
from reference.cpu.attention import AttentionShape, paged_attention
from reference.cpu.experts import expert_kernels
from reference.cpu.matmul import prepared_matmul
from reference.cpu.prepared import PreparedMatrices

Operands = Mapping[str, Any]
Kernel = Callable[[Operands, Mapping[str, int | float]], Callable[[], None]]


def fast_kernels(matrices: PreparedMatrices, threads: int) -> Mapping[Opcode, Kernel]:
    """The kernels by opcode, each splitting independent outputs over ``threads`` threads."""

    def product(x: str, weight: str, y: str) -> Kernel:
        def kernel(bound: Operands, params: Mapping[str, int | float]) -> Callable[[], None]:
            prepared = matrices.prepare(bound[weight])
            return partial(prepared_matmul, prepared, bound[x], bound[y], threads)

        return kernel

    def attention(bound: Operands, params: Mapping[str, int | float]) -> Callable[[], None]:
        shape = AttentionShape(
            heads=int(params["heads"]),
            kv_heads=int(params["kv_heads"]),
            head_dim=int(params["head_dim"]),
            scale=float(params["scale"]),
            window=int(params["window"]),
            soft_cap=float(params["soft_cap"]),
        )
        operands = [bound[name] for name in ("q", "kv", "page_table", "query")]
        return partial(paged_attention, *operands, shape, bound["y"], threads)

    return {
        Opcode.MATMUL: product("x", "weight", "y"),
        Opcode.MATMUL_WMMA_F16: product("a", "b", "c"),
        Opcode.MATMUL_WMMA_Q4K: product("b", "a", "c"),
        Opcode.LM_HEAD: product("x", "weight", "logits"),
        Opcode.FLASH_ATTN: attention,
        Opcode.FLASH_ATTN_BATCHED: attention,
        **expert_kernels(matrices, threads),
    }
