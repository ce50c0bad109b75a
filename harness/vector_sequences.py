"""Results of the reference for the stored vectors of one whole sequence: attention, rotated storage
and recurrent opcodes (rules R6, R13)."""

from typing import Any

import numpy as np

from contract.arithmetic import KV_ROW_BITS, PAGE_TOKENS
from contract.arrays import Bytes, Floats, Ints
from contract.dtypes import BY_NAME
from contract.records import QUERY_TOKEN
from reference.exact.attention_rows import row_integers
from reference.exact.coded_rows import coded, decoded, rotated, rotated_back
from reference.exact.kv_storage import page_view, store
from reference.matrix import Matrix
from reference.ops.flash_attn_batched import flash_attn_batched
from reference.ops.head_product import head_product
from reference.ops.moe_down_acc import weighted_sum
from reference.ops.moe_gate_topk import choose, route
from reference.ops.moe_gate_up import with_bias
from reference.ops.shared_expert import gated_add
from reference.ops.ssm_conv1d import ssm_conv1d
from reference.ops.ssm_delta_net import ssm_delta_net
from reference.ops.ssm_scan import ssm_scan


def attend(q: Floats, k: Floats, v: Floats, storage: str, scale: float, **more: Any) -> Floats:
    """Two heads of one query at the last position, over one KV head."""
    length, width = k.shape
    pages, dtype = -(-length // PAGE_TOKENS), BY_NAME[storage]
    octets = np.zeros(pages * PAGE_TOKENS * dtype.row_bytes(width) * 2, np.uint8)
    kv = page_view(octets, dtype, (pages, 2, PAGE_TOKENS, 1, width))
    positions = np.arange(length, dtype=np.int32)
    store(kv, positions // PAGE_TOKENS, positions % PAGE_TOKENS, k[:, None], v[:, None])
    table = np.arange(pages, dtype=np.int32)[None]
    query = np.array([(0, 0, length - 1, 0)], np.int32)
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": width}
    y = flash_attn_batched(
        q=q.reshape(1, -1), kv=kv, page_table=table, query=query, scale=scale, **sizes, **more
    )
    return y.reshape(q.shape)


def rotate(x: Floats) -> dict[str, Any]:
    """A rotated head, and what rotating it back gives."""
    y = rotated(x)
    return {"y": y, "back": rotated_back(y)}


def codes(x: Floats, bits: int) -> dict[str, Any]:
    """The integers that codes of the rows of ``x`` stand for."""
    return {"m": decoded(coded(row_integers(x, KV_ROW_BITS).m, bits), bits)}


def convolved(x: Floats, weight: Floats, **extras: Floats) -> Floats:
    """The convolution with any of its optional operands, from an empty state."""
    history = weight.shape[1] - 1
    state = np.zeros((1, history, x.shape[1]), np.float32)
    query = _query(len(x))
    return ssm_conv1d(
        x=x, weight=weight, query=query, state=state, history=history, states=1, **extras
    )


def delta_rule(
    x: Floats, alpha: Floats, beta: Floats, decay: Floats, dt_bias: Floats, grouped: int
) -> Floats:
    """Two key heads and four value heads of eight elements, from an empty state."""
    return ssm_delta_net(
        x=x, alpha=alpha, beta=beta, decay=-np.abs(decay), dt_bias=dt_bias, query=_query(len(x)),
        state=np.zeros((1, 4, 8, 8), np.float32), key_heads=2, value_heads=4, state_size=8,
        eps=1e-6, grouped=grouped,
    )  # fmt: skip


def scanned(x: Floats, dt: Floats, decay: Floats, dt_bias: Floats, skip: Floats) -> Floats:
    """Four heads of three values in two groups, eight elements of state, from an empty state."""
    return ssm_scan(
        x=x, dt=dt, decay=-np.abs(decay), dt_bias=dt_bias, skip=skip, query=_query(len(x)),
        state=np.zeros((1, 4, 3, 8), np.float32), heads=4, groups=2, head_dim=3, state_size=8,
    )  # fmt: skip


def _query(length: int) -> Ints:
    query = np.zeros((length, 1), QUERY_TOKEN)
    query["position"] = np.arange(length)[:, None]
    return query.view(np.int32).reshape(length, 4)


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
