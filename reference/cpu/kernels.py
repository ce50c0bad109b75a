"""Opcodes for which the CPU tier has a faster function than the definition, of the same bits.

A kernel is a function of the bound operands and the parameters that returns the call to make
each step: whatever can be prepared once is prepared when the graph is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from contract.dtypes import DType
from contract.opcodes import Opcode
from reference.cpu.attention import AttentionShape, paged_attention
from reference.cpu.matmul import (
    PreparedWeight,
    prepare_weight,
    prepared_matmul,
)
from reference.matrix import Matrix

PREPARED: Mapping[Opcode, str] = {
    Opcode.MATMUL: "weight",
    Opcode.MATMUL_WMMA_F16: "b",
    Opcode.MATMUL_WMMA_Q4K: "a",
    Opcode.LM_HEAD: "weight",
}
"""The operand of which an opcode's kernel keeps a prepared form."""

Operands = Mapping[str, Any]
Kernel = Callable[[Operands, Mapping[str, int | float]], Callable[[], None]]


class PreparedMatrices:
    """Prepared weights by the memory they were prepared from: a matrix is unpacked once."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, DType, tuple[int, ...]], PreparedWeight] = {}

    def prepare(self, matrix: Matrix) -> PreparedWeight:
        """The prepared form of ``matrix``, made on first use."""
        key = _memory_of(matrix)
        if key not in self._prepared:
            self._prepared[key] = prepare_weight(matrix.dtype, matrix.blocks)
        return self._prepared[key]

    def forget(self, matrix: Matrix) -> None:
        """Drop the prepared form, if any: the matrix's memory may hold another one next."""
        self._prepared.pop(_memory_of(matrix), None)

    @property
    def nbytes(self) -> int:
        """Bytes of all prepared weights."""
        return sum(weight.nbytes for weight in self._prepared.values())


def _memory_of(matrix: Matrix) -> tuple[int, DType, tuple[int, ...]]:
    return matrix.blocks.__array_interface__["data"][0], matrix.dtype, matrix.blocks.shape


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
    }
