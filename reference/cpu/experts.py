"""Mixture of experts on the CPU tier: one product for all tokens of an expert, with the same
bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats, Ints
from contract.dtypes import StorageClass
from contract.opcodes import Opcode
from reference.cpu.matmul import PreparedActivation, prepared_matmul
from reference.cpu.prepared import PreparedExperts, PreparedMatrices
from reference.cpu.threads import for_each
from reference.matrix import Matrix
from reference.ops.head_product import heads_of, joined
from reference.ops.moe_down_acc import weighted_sum
from reference.ops.moe_gate_topk import routing
from reference.ops.moe_gate_up import with_bias
from reference.ops.shared_expert import gated_add
from reference.ops.swiglu import swiglu

SINGLE_THREAD_PRODUCTS = 1 << 22
"""Below this many multiplications, switching threads costs more than it saves."""

Operands = Mapping[str, Any]
Parameters = Mapping[str, int | float]
Call = Callable[[], object]
"""A call that computes a node; its result is ignored."""
Kernel = Callable[[Operands, Parameters], Call]


def expert_products(
    experts: PreparedExperts,
    weights: Sequence[tuple[Matrix, Floats]],
    x: Floats,
    ids: Ints,
    threads: int,
) -> None:
    """For every (weight, out): out[t, e] = x[t] weight[ids[t, e]]^T.

    x is [tokens, inner], or [tokens, used, inner] when each (token, expert) has its own input; ids
    is [tokens, used], a weight [experts, outputs, inner], out [tokens, used, outputs]."""
    flat_ids = ids.reshape(-1)
    if not len(flat_ids):
        return
    sources = np.arange(len(flat_ids)) // (ids.shape[1] if x.ndim == 2 else 1)
    activation = PreparedActivation(x.reshape(-1, x.shape[-1]))
    if any(weight.dtype.storage is not StorageClass.FLOAT for weight, _ in weights):
        _ = activation.quantized
    order = np.argsort(flat_ids, kind="stable")
    used, starts = np.unique(flat_ids[order], return_index=True)
    groups = list(zip(used.tolist(), np.split(order, starts[1:]), strict=True))
    inner_threads = threads if len(groups) == 1 else 1

    def compute(group: tuple[int, NDArray[np.intp]]) -> None:
        expert, chosen = group
        part = activation.rows(sources[chosen])
        for weight, out in weights:
            prepared = experts.prepare(weight, expert)
            at = np.unravel_index(chosen, ids.shape)
            out[at] = prepared_matmul(prepared, part, threads=inner_threads)

    products = len(flat_ids) * x.shape[-1] * sum(weight.shape[1] for weight, _ in weights)
    for_each(compute, groups, threads if products >= SINGLE_THREAD_PRODUCTS else 1)


def expert_kernels(matrices: PreparedMatrices, threads: int) -> Mapping[Opcode, Kernel]:
    """The kernels of opcodes that multiply by stacks of matrices, by opcode."""

    def product(bound: Operands, weight: str, x: Floats) -> Floats:
        return prepared_matmul(matrices.prepare(bound[weight]), x, threads=threads)

    def gate_topk(bound: Operands, params: Parameters) -> None:
        logits = bound["logits"]
        logits[...] = product(bound, "gate_weight", bound["x"])
        if "bias" in bound:
            logits += bound["bias"]
        used, renormalize = int(params["used"]), bool(params["renormalize"])
        groups = int(params["groups"]), int(params["groups_used"])
        how = bool(params["softmax"])
        found = routing(logits, used, bound.get("choice_bias"), renormalize, *groups, how)
        bound["ids"][...], bound["weights"][...] = found

    def gate_up(bound: Operands, params: Parameters) -> None:
        weights = [(bound[f"{name}_weight"], bound[name]) for name in ("gate", "up")]
        expert_products(matrices.experts, weights, bound["x"], bound["ids"], threads)
        for name in ("gate", "up"):
            bias, products = bound.get(f"{name}_bias"), bound[name]
            if bias is not None:
                products += bias[bound["ids"]]

    def down_acc(bound: Operands, params: Parameters) -> None:
        ids, weight = bound["ids"], bound["down_weight"]
        products = np.empty((*ids.shape, weight.shape[1]), np.float32)
        expert_products(matrices.experts, [(weight, products)], bound["x"], ids, threads)
        products = with_bias(products, bound.get("bias"), ids)
        optional = bound.get("expert_scale"), bound.get("residual")
        bound["y"][...] = weighted_sum(products, ids, bound["weights"], *optional)

    def head_product(bound: Operands, params: Parameters) -> None:
        heads, weight = int(params["heads"]), bound["weight"]
        x = heads_of(bound["x"], heads)[..., -weight.shape[-1] :]
        ids = np.broadcast_to(bound["matrix_of"], x.shape[:2])
        products = np.empty((*ids.shape, weight.shape[1]), np.float32)
        expert_products(matrices.experts, [(weight, products)], x, ids, threads)
        bound["y"][...] = joined(bound.get("rest"), products)

    def shared_expert(bound: Operands, params: Parameters) -> None:
        x = bound["x"]
        gate, up = (product(bound, f"{name}_weight", x) for name in ("gate", "up"))
        down = product(bound, "down_weight", swiglu(gate=gate, up=up))
        bound["y"][...] = gated_add(bound["residual"], x, bound.get("router_weight"), down)

    def kernel(run: Callable[[Operands, Parameters], None]) -> Kernel:
        return lambda bound, params: partial(run, bound, params)

    return {
        Opcode.MOE_GATE_TOPK: kernel(gate_topk),
        Opcode.MOE_GATE_UP: kernel(gate_up),
        Opcode.MOE_DOWN_ACC: kernel(down_acc),
        Opcode.SHARED_EXPERT: kernel(shared_expert),
        Opcode.HEAD_PRODUCT: kernel(head_product),
    }
