"""Rows of the opcode table: rotary embedding, the paged KV cache and attention."""

from __future__ import annotations

from collections.abc import Mapping

from contract.arithmetic import HEAD_DIM_MAX, PAGE_TOKENS
from contract.opcodes import Opcode
from contract.ops.common import (
    EPS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    NEOX,
    NORM_FLOPS,
    all_of,
    each,
    operands,
)
from contract.spec import Dim, OpSpec, Param, Scalar, Stage, Work

EXP2_FLOPS = 9
"""Operations of R6's exp2: 1 for n, 1 for the reduction, 6 for the polynomial, 1 for the
exponent."""
SCORE_FLOPS = EXP2_FLOPS + 9
"""Operations per score: 2 for x, 1 for u, 1 for the maximum, 2 for d, 2 for w, 1 for l."""
WINDOW_MAX = 1 << 24
"""Most positions of a window or of a chunk."""
SCALE_BITS = 20
"""Rule R6 overflows nowhere for scales between 2^-20 and 2^20."""
ATTENTION_PARAMS = (
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    Param("scale", float, "multiplies q.k", minimum=2.0**-SCALE_BITS),
    Param(
        "window",
        int,
        "positions attended, itself included; 0 is all; -n is those of its chunk of n",
        0,
        -WINDOW_MAX,
    ),
    Param("soft_cap", float, "cap * tanh(s / cap); 0 is off", 0.0, 0.0),
)
ATTENTION_FORMULA = (
    "softmax(scale q k^T) v over the slot's positions up to the query token's, with window the "
    "last of them, below 0 those from the last multiple of -window on; head h reads KV head "
    "floor(h kv_heads / heads); sinks[h] is one more score of head h, without a value"
)
ROPE_FLOPS = 6
"""Operations per pair of channels."""


def _attended(work: Work) -> int:
    window = abs(work["window"])
    return min(work.context, window) if window else work.context


def _attention_flops(work: Work) -> int:
    scores = work["tokens"] * work["heads"] * _attended(work)
    return scores * (4 * work["head_dim"] + SCORE_FLOPS)


def _attended_kv(work: Work) -> int:
    """Elements of keys and values read if no two query tokens share a slot: exact for decode, an
    upper bound for prefill."""
    return work["tokens"] * _attended(work) * 2 * work["kv_heads"] * work["head_dim"]


def _attended_pages(work: Work) -> int:
    return work["tokens"] * -(-_attended(work) // PAGE_TOKENS)


_written_kv = each(2, "tokens", "kv_heads", "head_dim")
_rotary_rows = each(2, "tokens", "rotary_pairs")


def _norm_rope_flops(work: Work) -> int:
    per_head = NORM_FLOPS * work["head_dim"] + ROPE_FLOPS * work["rotary_pairs"]
    return work["tokens"] * (work["heads"] + work["kv_heads"]) * per_head


def _qkv_width(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    expected = (int(params["heads"]) + 2 * int(params["kv_heads"])) * int(params["head_dim"])
    if dims["qkv_width"] != expected:
        return (
            f"qkv_width is {dims['qkv_width']}, expected {expected} = (heads + 2 kv_heads) head_dim"
        )
    return None


def _grouped_heads(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    if int(params["heads"]) % int(params["kv_heads"]):
        return f"heads ({params['heads']}) is not a multiple of kv_heads ({params['kv_heads']})"
    return None


def _within_bounds(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    if int(params["head_dim"]) > HEAD_DIM_MAX:
        return f"head_dim is {params['head_dim']}, attention is exact up to {HEAD_DIM_MAX}"
    if params["scale"] > 2.0**SCALE_BITS:
        return f"scale is {params['scale']}, attention is exact up to 2^{SCALE_BITS}"
    return None


def _rotary_fits(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    pairs = dims["rotary_pairs"]
    if isinstance(pairs, str) or 2 * pairs > int(params["head_dim"]):
        return f"{pairs} rotary pairs do not fit head_dim {params['head_dim']}"
    return None


ATTENTION = (
    OpSpec(
        Opcode.ROPE,
        operands("x[tokens, heads*head_dim], rope_table, query, *y[tokens, heads*head_dim]"),
        (HEADS, HEAD_DIM, NEOX),
        rule="R0 R2",
        formula="(a, b) -> (a cos - b sin, a sin + b cos); channels past the pairs pass through",
        flops=lambda work: ROPE_FLOPS * work["tokens"] * work["heads"] * work["rotary_pairs"],
        touched={"rope_table": _rotary_rows},
        constraint=_rotary_fits,
    ),
    OpSpec(
        Opcode.KV_WRITE_BATCHED,
        operands(
            "k[tokens, kv_heads*head_dim], v[tokens, kv_heads*head_dim], query, page_table, &kv"
        ),
        (KV_HEADS, HEAD_DIM),
        rule="R1 R6",
        formula=f"kv[page_table[slot, position / {PAGE_TOKENS}], 0 or 1, "
        f"position mod {PAGE_TOKENS}] = k or v, each head a row",
        touched={"kv": _written_kv, "page_table": lambda work: work["tokens"]},
        stored=("kv",),
    ),
    OpSpec(
        Opcode.RMS_NORM_FUSED_ROPE_KV_WRITE,
        operands(
            "qkv[tokens, qkv_width], q_norm[head_dim]?, k_norm[head_dim]?, rope_table, query, "
            "page_table, &kv, *q[tokens, heads*head_dim]"
        ),
        (HEADS, KV_HEADS, HEAD_DIM, NEOX, EPS),
        rule="R0 R1 R2 R3 R4 R6",
        formula="q, k, v = qkv; q = rope(norm(q)); the kv rows that KV_WRITE_BATCHED writes = "
        "rope(norm(k)), v; norm per head, without q_norm and k_norm none",
        flops=_norm_rope_flops,
        touched={
            "kv": _written_kv,
            "page_table": lambda work: work["tokens"],
            "rope_table": _rotary_rows,
        },
        stored=("kv",),
        constraint=all_of(_qkv_width, _grouped_heads, _rotary_fits),
    ),
    *(
        OpSpec(
            opcode,
            operands(
                "q[tokens, heads*head_dim], kv, page_table, query, sinks[heads]?, "
                "*y[tokens, heads*head_dim]"
            ),
            ATTENTION_PARAMS,
            rule="R0 R2 R4 R6",
            formula=formula,
            stages=stages,
            flops=_attention_flops,
            touched={"kv": _attended_kv, "page_table": _attended_pages},
            constraint=all_of(_grouped_heads, _within_bounds),
        )
        for opcode, stages, formula in (
            (Opcode.FLASH_ATTN, Stage.DECODE, f"{ATTENTION_FORMULA}; one query token a slot"),
            (Opcode.FLASH_ATTN_BATCHED, Stage.BOTH, f"{ATTENTION_FORMULA}; any number a slot"),
        )
    ),
)
