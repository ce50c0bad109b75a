"""Results of the reference for the stored vectors of experts, and of heads with matrices of their
own (rules R5, R7)."""

from typing import Any

import numpy as np

from contract.arrays import Bytes, Floats
from contract.dtypes import BY_NAME
from reference.matrix import Matrix
from reference.ops.head_product import head_product
from reference.ops.moe_down_acc import weighted_sum
from reference.ops.moe_gate_topk import choose, route
from reference.ops.moe_gate_up import with_bias
from reference.ops.shared_expert import gated_add


def routed(**given: Any) -> dict[str, Any]:
    """Ids and weights of each token's experts: of ``choose`` with a bias, else of ``route``."""
    choice = choose if "choice_bias" in given else route
    return dict(zip(("ids", "weights"), choice(**given), strict=True))


def mixture(
    products: Floats,
    weights: Floats,
    residual: Floats,
    ids: list[int],
    expert_scale: Floats | None = None,
    bias: Floats | None = None,
) -> Floats:
    """The weighted sum of products [1, used, outputs] of the experts ``ids``."""
    chosen = np.array([ids], np.int32)
    products = with_bias(products, bias, chosen)
    return weighted_sum(products, chosen, weights, expert_scale, residual)


def shared(x: Floats, router: Floats, down: Floats, residual: Floats) -> Floats:
    """``down`` added to the residual, weighted by the sigmoid of the router's product."""
    return gated_add(residual, x, router, down)


def heads_product(
    x: Floats, blocks: Bytes, dtype: str, columns: int, matrix_of: list[int], rest: Floats
) -> Floats:
    """Each head times the matrix it names, of those whose rows ``blocks`` has one after the other,
    as many for each."""
    matrices = max(matrix_of) + 1
    weight = Matrix(BY_NAME[dtype], (matrices, len(blocks) // matrices, columns), blocks)
    ids = np.array(matrix_of, np.int32)
    return head_product(x=x, weight=weight, matrix_of=ids, heads=len(ids), rest=rest)
