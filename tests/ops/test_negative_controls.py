"""Every rule broken on purpose: the parity comparison must notice each.

A control replaces one ingredient of a definition by a mistake, runs the parity suite's own cases
through it and asks that at least one comparison fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from contract.opcodes import Opcode
from harness.parity import Case, by_definition, difference, fill, generate
from reference.ops import DEFINITIONS
from tests.ops import mistakes, mistakes_experts

KINDS = ("normal", "huge", "zeros", "scales")
"""Kinds of values whose results are finite by the rules."""
FEW_CASES = 24


@dataclass(frozen=True, slots=True)
class Control:
    """``wrong`` takes the place of ``target``, or of the opcode's whole definition.

    ``within`` begins the labels of the shapes that can show it.
    """

    label: str
    opcode: Opcode
    wrong: Any
    target: str = ""
    within: str = ""


NORM = "reference.ops.rms_norm"
ATTENTION = "reference.ops.flash_attn_batched"
STORAGE = "reference.exact.kv_storage"
SWIGLU = "reference.ops.swiglu"
SAMPLE = "reference.ops.sample"
LOGS = "reference.ops.log_probabilities"
DIGEST = "reference.ops.row_digest"
DOT = "reference.quant.dot"
SUMS = "reference.exact.sums"
ROUTE = "reference.ops.moe_gate_topk.route"
CHOOSE = "reference.ops.moe_gate_topk.choose"
DOWN_SUM = "reference.ops.moe_down_acc.weighted_sum"
GATE_UP = "reference.ops.moe_gate_up"
EXPERT = "reference.matrix.Matrix.expert"
SHARED = "reference.ops.shared_expert"
CONTROLS = (
    Control("R0 rsqrt", Opcode.RMS_NORM, mistakes.reciprocal_root_norm),
    Control("R0 contracted rope", Opcode.ROPE, mistakes.contracted_rope),
    Control("R0 reciprocal in silu", Opcode.SWIGLU, mistakes.reciprocal_silu, f"{SWIGLU}.silu"),
    Control("R0 reciprocal in cap", Opcode.SOFT_CAP, mistakes.reciprocal_soft_cap),
    Control("R1 no saturation", Opcode.KV_WRITE_BATCHED, mistakes.unsaturated, f"{STORAGE}.stored"),
    Control(
        "R6 scale before rounding",
        Opcode.KV_WRITE_BATCHED,
        mistakes.unrounded_scale,
        f"{STORAGE}.stored",
    ),
    Control(
        "R6 reciprocal of the scale",
        Opcode.KV_WRITE_BATCHED,
        mistakes.reciprocal_blocks,
        f"{STORAGE}.stored",
    ),
    Control(
        "R2 library exp in silu",
        Opcode.SWIGLU,
        mistakes.numpy_exp,
        "reference.exact.elementary.exp",
    ),
    Control("R2 library tanh", Opcode.SOFT_CAP, np.tanh, "reference.ops.soft_cap.tanh"),
    Control(
        "R2 library exp in a convolution",
        Opcode.SSM_CONV1D,
        mistakes.numpy_exp,
        "reference.exact.elementary.exp",
    ),
    Control("R2 library log", Opcode.SSM_DELTA_NET, np.log, "reference.exact.elementary.log"),
    Control(
        "R4 left fold over keys", Opcode.SSM_DELTA_NET, mistakes.left_fold, f"{SUMS}.fold_segment"
    ),
    Control(
        "R4 left fold over a scan's state",
        Opcode.SSM_SCAN,
        mistakes.left_fold,
        f"{SUMS}.fold_segment",
    ),
    Control("R3 no spans", Opcode.RMS_NORM, mistakes.left_fold, f"{SUMS}.fold_axis"),
    Control("R3 one tree", Opcode.RMS_NORM, mistakes.one_tree, f"{NORM}.sum_axis"),
    Control("R3 no spans in a product", Opcode.MATMUL, mistakes.left_fold, f"{DOT}.fold_axis"),
    Control("R4 left fold", Opcode.RMS_NORM, mistakes.left_fold, f"{SUMS}.fold_segment"),
    Control("R4 numpy sum", Opcode.LM_HEAD, mistakes.one_tree, f"{DOT}.sum_axis"),
    Control(
        "R5 eight bits", Opcode.MATMUL, mistakes.eight_bit_activation, f"{DOT}.quantize_activation"
    ),
    Control(
        "R5 truncation", Opcode.MATMUL, mistakes.truncated_activation, f"{DOT}.quantize_activation"
    ),
    Control(
        "R6 exponent of two rows",
        Opcode.FLASH_ATTN,
        mistakes.exponent_over(2),
        f"{ATTENTION}.row_integers",
    ),
    Control(
        "R6 exponent of a page",
        Opcode.FLASH_ATTN_BATCHED,
        mistakes.exponent_over(16),
        f"{ATTENTION}.row_integers",
    ),
    Control(
        "R6 a maximum of masked keys",
        Opcode.FLASH_ATTN,
        mistakes.masked_maximum,
        f"{ATTENTION}._attend",
    ),
    Control("R6 spans as one row", Opcode.FLASH_ATTN, 1 << 12, f"{ATTENTION}.KV_SPAN", "spans"),
    Control("R6 a fused x", Opcode.FLASH_ATTN, mistakes.fused_tile, f"{ATTENTION}._tile"),
    Control("R6 library exp2", Opcode.FLASH_ATTN, np.exp2, f"{ATTENTION}.exp2"),
    Control(
        "R6 truncated rows", Opcode.FLASH_ATTN, mistakes.truncated_rows, f"{ATTENTION}.row_integers"
    ),
    Control(
        "R6 truncated rows of pages",
        Opcode.KV_WRITE_BATCHED,
        mistakes.truncated_rows,
        f"{STORAGE}.row_integers",
    ),
    Control("R6 tiles of 32", Opcode.FLASH_ATTN, 32, f"{ATTENTION}.KV_TILE"),
    Control("R6 tiles of 128", Opcode.FLASH_ATTN, 128, f"{ATTENTION}.KV_TILE"),
    Control("R6 left fold", Opcode.FLASH_ATTN, mistakes.left_fold, f"{ATTENTION}.fold_segment"),
    Control("R9 coarse weights", Opcode.SAMPLE, np.float32(1 << 6), f"{SAMPLE}.WEIGHT_SCALE"),
    Control("R9 no penalties", Opcode.SAMPLE, mistakes.no_penalties, f"{SAMPLE}.penalized"),
    Control("R9 no bias", Opcode.SAMPLE, mistakes.unbiased, f"{SAMPLE}.biased"),
    Control(
        "R9 bias after penalties", Opcode.SAMPLE, mistakes.bias_after_penalties, f"{SAMPLE}.adjust"
    ),
    Control("R9 no mask", Opcode.SAMPLE, mistakes.everything_allowed, f"{SAMPLE}.forbid"),
    Control(
        "R9 mask from the high bit",
        Opcode.SAMPLE,
        mistakes.mask_from_the_high_bit,
        f"{SAMPLE}.forbid",
    ),
    Control("R9 row of the mask", Opcode.SAMPLE, mistakes.row_before_the_mask, f"{SAMPLE}.forbid"),
    Control("R10 library exp", Opcode.LOG_PROBABILITIES, mistakes.numpy_exp, f"{LOGS}.exp"),
    Control("R10 log of base 2", Opcode.LOG_PROBABILITIES, mistakes.log_by_base_two, f"{LOGS}.log"),
    Control("R10 one tree", Opcode.LOG_PROBABILITIES, mistakes.one_tree, f"{LOGS}.sum_axis"),
    Control(
        "R10 one subtraction",
        Opcode.LOG_PROBABILITIES,
        mistakes.logits_less_one_sum,
        f"{LOGS}.normalized",
    ),
    Control(
        "R10 nothing taken away first",
        Opcode.LOG_PROBABILITIES,
        mistakes.unshifted_sum,
        f"{LOGS}.normalized",
    ),
    Control(
        "R10 ties to the higher id",
        Opcode.LOG_PROBABILITIES,
        mistakes.likeliest_from_the_last,
        f"{LOGS}.likeliest",
    ),
    Control(
        "R13 signs",
        Opcode.KV_WRITE_BATCHED,
        lambda head_dim: np.ones(head_dim, np.float32),
        "reference.exact.rotation.signs",
    ),
    Control(
        "R13 the other way round",
        Opcode.FLASH_ATTN,
        mistakes.rotated_twice,
        f"{ATTENTION}.rotated_back",
    ),
    Control(
        "R13 the first scale", Opcode.KV_WRITE_BATCHED, 1, "reference.exact.coded_rows.CODE_SCALES"
    ),
    Control("R12 six rounds", Opcode.ROW_DIGEST, 6, "reference.exact.blake3.ROUNDS"),
    Control(
        "R12 leaves of neighbours",
        Opcode.ROW_DIGEST,
        mistakes.leaves_of_neighbours,
        f"{DIGEST}.span_digests",
    ),
    Control("R12 every row", Opcode.ROW_DIGEST, mistakes.every_row_digested),
    Control("R9 ties to the higher id", Opcode.SAMPLE, mistakes.last_of_equals),
    Control(
        "R7 softmax of the chosen", Opcode.MOE_GATE_TOPK, mistakes_experts.softmax_of_chosen, ROUTE
    ),
    Control("R7 not renormalized", Opcode.MOE_GATE_TOPK, mistakes_experts.unnormalized, ROUTE),
    Control(
        "R7 ties to the higher id", Opcode.MOE_GATE_TOPK, mistakes_experts.ties_to_the_last, ROUTE
    ),
    Control(
        "R7 weighted with the bias",
        Opcode.MOE_GATE_TOPK,
        mistakes_experts.weighted_with_bias,
        CHOOSE,
    ),
    Control(
        "R7 chosen without bias", Opcode.MOE_GATE_TOPK, mistakes_experts.chosen_without_bias, CHOOSE
    ),
    Control(
        "R7 sum by rising expert",
        Opcode.MOE_DOWN_ACC,
        mistakes_experts.sum_by_rising_expert,
        DOWN_SUM,
    ),
    Control("R7 residual last", Opcode.MOE_DOWN_ACC, mistakes_experts.residual_last, DOWN_SUM),
    Control("R7 scale of a place", Opcode.MOE_DOWN_ACC, mistakes_experts.scale_of_place, DOWN_SUM),
    Control(
        "R0 contracted experts", Opcode.MOE_DOWN_ACC, mistakes_experts.contracted_sum, DOWN_SUM
    ),
    Control("expert stride", Opcode.MOE_GATE_UP, mistakes_experts.overlapping_expert, EXPERT),
    Control(
        "expert stride, down", Opcode.MOE_DOWN_ACC, mistakes_experts.overlapping_expert, EXPERT
    ),
    Control(
        "bias of a place",
        Opcode.MOE_GATE_UP,
        mistakes_experts.bias_of_place,
        f"{GATE_UP}.with_bias",
    ),
    Control("no bounds", Opcode.MOE_SWIGLU, mistakes_experts.unclamped, f"{SWIGLU}.clamped"),
    Control("R2 reciprocal", Opcode.MOE_SWIGLU, mistakes.reciprocal_silu, f"{SWIGLU}.silu"),
    Control("R3 router", Opcode.SHARED_EXPERT, mistakes.one_tree, f"{SHARED}.sum_axis"),
    Control(
        "no router", Opcode.SHARED_EXPERT, mistakes_experts.unopened_gate, f"{SHARED}.gated_add"
    ),
)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.label)
def test_mistake_is_noticed(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one generated case of the opcode compares unequal; few of them first."""
    cases = [
        case
        for case in generate(control.opcode)
        if case.kind in KINDS and not case.may_break and case.shape.label.startswith(control.within)
    ]
    few = cases[:: max(1, len(cases) // FEW_CASES)]
    rest = [case for case in cases if case not in few]
    assert any(_notices(case, control, monkeypatch) for case in few + rest)


def _notices(case: Case, control: Control, monkeypatch: pytest.MonkeyPatch) -> bool:
    operands = fill(case)
    expected = by_definition(case, operands)
    with monkeypatch.context() as patch:
        if control.target:
            patch.setattr(control.target, control.wrong)
        else:
            patch.setitem(DEFINITIONS, control.opcode, control.wrong)
        got = by_definition(case, operands)
    return any(
        difference(expected[name], got[name], may_break=False) is not None for name in expected
    )


@pytest.mark.parametrize("opcode", sorted({control.opcode for control in CONTROLS}))
def test_nothing_is_noticed_without_a_mistake(opcode: Opcode) -> None:
    """The same comparison is silent when nothing was replaced."""
    for case in list(generate(opcode))[::21]:
        operands = fill(case)
        first, second = by_definition(case, operands), by_definition(case, operands)
        for name in first:
            assert difference(first[name], second[name], may_break=True) is None
