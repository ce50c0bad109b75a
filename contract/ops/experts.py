"""Rows of the opcode table: mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping

from contract.arithmetic import EXPERT_GROUPS_MAX
from contract.opcodes import Opcode
from contract.ops.common import (
    ACTIVATION_FUNCTION,
    EXP_FLOPS,
    GATED_FORMULA,
    SILU_FLOPS,
    each,
    gated,
    operands,
)
from contract.spec import Dim, OpSpec, Param, Scalar, Work


def _used_experts(work: Work) -> int:
    """Weight elements read if no two tokens share an expert, at most those of all experts."""
    experts = min(work["experts"], work["tokens"] * work["used"])
    return experts * work["width"] * work["hidden"]


def _used_widths(work: Work) -> int:
    """Elements read of one bias of ``width`` elements an expert."""
    return min(work["experts"], work["tokens"] * work["used"]) * work["width"]


def _used_hidden(work: Work) -> int:
    """Elements read of one bias of ``hidden`` elements an expert."""
    return min(work["experts"], work["tokens"] * work["used"]) * work["hidden"]


def _shared_flops(work: Work) -> int:
    per_width = 6 * work["hidden"] + SILU_FLOPS + 1
    return work["tokens"] * (work["width"] * per_width + 4 * work["hidden"])


def _enough_experts(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    experts, groups, chosen = dims["experts"], int(params["groups"]), int(params["groups_used"])
    if isinstance(experts, str) or params["used"] > experts:
        return f"{params['used']} experts a token, of {experts}"
    if groups == 1:
        return None
    if groups > EXPERT_GROUPS_MAX or experts % groups or experts < 2 * groups:
        return f"{experts} experts in {groups} groups: at most {EXPERT_GROUPS_MAX}, alike, of two"
    if not chosen * experts >= params["used"] * groups or chosen > groups:
        return f"{params['used']} experts a token, of {chosen} of {groups} groups"
    return None


EXPERTS = (
    OpSpec(
        Opcode.MOE_GATE_TOPK,
        operands(
            "x[tokens, hidden], weight gate_weight[experts, hidden], bias[experts]?, "
            "choice_bias[experts]?, *logits[tokens, experts], int *ids[tokens, used], "
            "*weights[tokens, used]"
        ),
        (
            Param("used", int, "experts a token", minimum=1),
            Param("renormalize", int, "whether a sum divides weights", 1, 0, ("no", "yes")),
            Param("groups", int, "of consecutive experts; with choice_bias alone", 1, 1),
            Param("groups_used", int, "groups a token chooses experts of", 1, 1),
            Param("softmax", int, "whether p is one with choice_bias, too", 0, 0, ("no", "yes")),
        ),
        rule="R0 R2 R3 R4 R5 R7",
        formula="logits = x gate_weight^T + bias; without choice_bias p = softmax(logits), ids = "
        "the used largest of p; with it p = sigmoid(logits), unless softmax, ids = those of "
        "p + choice_bias; "
        "weights = p[ids] / max(sum(p[ids]), 2^-14), or p[ids] unless renormalize; with groups the "
        "ids are of the groups_used whose two largest p + choice_bias have the largest sums",
        flops=lambda work: work["tokens"] * work["experts"] * (2 * work["hidden"] + EXP_FLOPS + 3),
        constraint=_enough_experts,
    ),
    OpSpec(
        Opcode.MOE_GATE_UP,
        operands(
            "x[tokens, hidden], weight gate_weight[experts, width, hidden], "
            "weight up_weight[experts, width, hidden], gate_bias[experts, width]?, "
            "up_bias[experts, width]?, int ids[tokens, used], *gate[tokens, used, width], "
            "*up[tokens, used, width]"
        ),
        (),
        rule="R3 R4 R5",
        formula="gate, up = x gate_weight[ids]^T + gate_bias[ids], "
        "x up_weight[ids]^T + up_bias[ids]",
        flops=each(4, "tokens", "used", "width", "hidden"),
        touched={
            "gate_weight": _used_experts,
            "up_weight": _used_experts,
            "gate_bias": _used_widths,
            "up_bias": _used_widths,
        },
    ),
    OpSpec(
        Opcode.MOE_SWIGLU,
        operands("gate[tokens, used, width], up[tokens, used, width], *y[tokens, used, width]"),
        (ACTIVATION_FUNCTION,),
        rule="R0 R2",
        formula=GATED_FORMULA,
        flops=gated("tokens", "used", "width"),
    ),
    OpSpec(
        Opcode.MOE_DOWN_ACC,
        operands(
            "x[tokens, used, width], weight down_weight[experts, hidden, width], "
            "bias[experts, hidden]?, int ids[tokens, used], weights[tokens, used], "
            "expert_scale[experts]?, residual[tokens, hidden]?, *y[tokens, hidden]"
        ),
        (),
        rule="R0 R3 R4 R5 R7",
        formula="y = residual or 0; "
        "y += weights[e] * ((x[e] down_weight[ids[e]]^T + bias[ids[e]]) * expert_scale[ids[e]]), "
        "e in order",
        flops=lambda work: 2 * work["tokens"] * work["used"] * work["hidden"] * (work["width"] + 1),
        touched={"down_weight": _used_experts, "bias": _used_hidden},
    ),
    OpSpec(
        Opcode.SHARED_EXPERT,
        operands(
            "x[tokens, hidden], weight gate_weight[width, hidden], "
            "weight up_weight[width, hidden], weight down_weight[hidden, width], "
            "router_weight[hidden]?, residual[tokens, hidden], *y[tokens, hidden]"
        ),
        (),
        rule="R0 R2 R3 R4 R5 R7",
        formula="y = residual + "
        "sigmoid(x.router_weight) * (silu(x gate_weight^T) * (x up_weight^T)) down_weight^T; "
        "without router_weight, without the sigmoid",
        flops=_shared_flops,
    ),
)
