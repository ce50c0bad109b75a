"""Every rule broken on purpose: the parity comparison must notice each.

A control replaces one ingredient of a definition by a mistake, runs the parity suite's own cases
through it and asks that at least one comparison fails."""

from dataclasses import dataclass
from typing import Any

import pytest

from contract.opcodes import Opcode
from harness.parity.cases import Case, generate
from harness.parity.execute import by_definition, difference
from harness.parity.operands import fill
from reference.ops import DEFINITIONS
from tests.ops import mistakes, mistakes_experts

KINDS = ("normal", "huge", "zeros", "scales")
"""Kinds of values whose results are finite by the rules."""
FEW_CASES = 24


@dataclass(frozen=True, slots=True)
class Control:
    """``wrong`` replaces ``target``, or the opcode's whole definition.

    ``within`` begins the labels of the shapes that can show it."""

    label: str
    opcode: Opcode
    wrong: Any
    target: str = ""
    within: str = ""


CONTROLS_BY_RULE = """
R0 rsqrt | RMS_NORM | reciprocal_root_norm
R0 contracted rope | ROPE | contracted_rope
R0 reciprocal in silu | SWIGLU | reciprocal_silu | ops.swiglu.silu
R0 reciprocal in cap | SOFT_CAP | reciprocal_soft_cap
R1 no saturation | KV_WRITE_BATCHED | unsaturated | exact.kv_storage.stored
R6 scale before rounding | KV_WRITE_BATCHED | unrounded_scale | exact.kv_storage.stored
R6 reciprocal of the scale | KV_WRITE_BATCHED | reciprocal_blocks | exact.kv_storage.stored
R2 library exp in silu | SWIGLU | numpy_exp | exact.elementary.exp
R2 library exp in xIELU | XIELU | numpy_exp | ops.xielu.exp
R2 library tanh | SOFT_CAP | np.tanh | ops.soft_cap.tanh
R2 library exp in a convolution | SSM_CONV1D | numpy_exp | exact.elementary.exp
R2 library log | SSM_DELTA_NET | np.log | exact.elementary.log
R4 left fold over keys | SSM_DELTA_NET | left_fold | exact.sums.fold_segment
R4 left fold over a scan's state | SSM_SCAN | left_fold | exact.sums.fold_segment
R3 no spans | RMS_NORM | left_fold | exact.sums.fold_axis
R3 one tree | RMS_NORM | one_tree | ops.rms_norm.sum_axis
R3 no spans in a product | MATMUL | left_fold | quant.dot.fold_axis
R4 left fold | RMS_NORM | left_fold | exact.sums.fold_segment
R4 numpy sum | LM_HEAD | one_tree | quant.dot.sum_axis
R5 eight bits | MATMUL | eight_bit_activation | quant.dot.quantize_activation
R5 truncation | MATMUL | truncated_activation | quant.dot.quantize_activation
R6 exponent of two rows | FLASH_ATTN | exponent_over(2) | ops.flash_attn_batched.row_integers
R6 exponent of a page | FLASH_ATTN_BATCHED | exponent_over(16) | ops.flash_attn_batched.row_integers
R6 a maximum of masked keys | FLASH_ATTN | masked_maximum | ops.flash_attn_batched._attend
R6 spans as one row | FLASH_ATTN | 1 << 12 | ops.flash_attn_batched.KV_SPAN | spans
R6 a fused x | FLASH_ATTN | fused_tile | ops.flash_attn_batched._tile
R6 library exp2 | FLASH_ATTN | np.exp2 | ops.flash_attn_batched.exp2
R6 truncated rows | FLASH_ATTN | truncated_rows | ops.flash_attn_batched.row_integers
R6 truncated rows of pages | KV_WRITE_BATCHED | truncated_rows | exact.kv_storage.row_integers
R6 tiles of 32 | FLASH_ATTN | 32 | ops.flash_attn_batched.KV_TILE
R6 tiles of 128 | FLASH_ATTN | 128 | ops.flash_attn_batched.KV_TILE
R6 left fold | FLASH_ATTN | left_fold | ops.flash_attn_batched.fold_segment
R9 coarse weights | SAMPLE | np.float32(1 << 6) | ops.sample.WEIGHT_SCALE
R9 no penalties | SAMPLE | no_penalties | ops.sample.penalized
R9 no bias | SAMPLE | unbiased | ops.sample.biased
R9 bias after penalties | SAMPLE | bias_after_penalties | ops.sample.adjust
R9 no mask | SAMPLE | everything_allowed | ops.sample.forbid
R9 mask from the high bit | SAMPLE | mask_from_the_high_bit | ops.sample.forbid
R9 row of the mask | SAMPLE | row_before_the_mask | ops.sample.forbid
R10 library exp | LOG_PROBABILITIES | numpy_exp | ops.log_probabilities.exp
R10 log of base 2 | LOG_PROBABILITIES | log_by_base_two | ops.log_probabilities.log
R10 one tree | LOG_PROBABILITIES | one_tree | ops.log_probabilities.sum_axis
R10 one subtraction | LOG_PROBABILITIES | logits_less_one_sum | ops.log_probabilities.normalized
R10 nothing taken away first | LOG_PROBABILITIES | unshifted_sum | ops.log_probabilities.normalized
R10 ties upwards | LOG_PROBABILITIES | likeliest_from_the_last | ops.log_probabilities.likeliest
R13 signs | KV_WRITE_BATCHED | no_signs | exact.coded_rows.signs
R13 the other way round | FLASH_ATTN | rotated_twice | ops.flash_attn_batched.rotated_back
R13 the first scale | KV_WRITE_BATCHED | 1 | exact.coded_rows.arithmetic.CODE_SCALES
R12 six rounds | ROW_DIGEST | 6 | exact.blake3.ROUNDS
R12 leaves of neighbours | ROW_DIGEST | leaves_of_neighbours | ops.row_digest.span_digests
R12 every row | ROW_DIGEST | every_row_digested
R9 ties to the higher | SAMPLE | last_of_equals
R7 softmax of the chosen | MOE_GATE_TOPK | softmax_of_chosen | ops.moe_gate_topk.route
R7 not renormalized | MOE_GATE_TOPK | unnormalized | ops.moe_gate_topk.route
R7 renormalized | MOE_GATE_TOPK | renormalized | ops.moe_gate_topk.route
R7 ties to the higher | MOE_GATE_TOPK | ties_to_the_last | ops.moe_gate_topk.route
R7 weighted with the bias | MOE_GATE_TOPK | weighted_with_bias | ops.moe_gate_topk.choose
R7 chosen without bias | MOE_GATE_TOPK | chosen_without_bias | ops.moe_gate_topk.choose
R7 sum by rising expert | MOE_DOWN_ACC | sum_by_rising_expert | ops.moe_down_acc.weighted_sum
R7 residual last | MOE_DOWN_ACC | residual_last | ops.moe_down_acc.weighted_sum
R7 scale of a rank | MOE_DOWN_ACC | scale_of_rank | ops.moe_down_acc.weighted_sum
R0 contracted experts | MOE_DOWN_ACC | contracted_sum | ops.moe_down_acc.weighted_sum
expert stride | MOE_GATE_UP | overlapping_expert | matrix.Matrix.expert
expert stride, down | MOE_DOWN_ACC | overlapping_expert | matrix.Matrix.expert
expert stride, heads | HEAD_PRODUCT | overlapping_expert | matrix.Matrix.expert
rest behind | HEAD_PRODUCT | rest_behind | ops.head_product.joined
R7 groups by their best | MOE_GATE_TOPK | groups_by_best | ops.moe_gate_topk._of_best_groups
bias of a rank | MOE_GATE_UP | bias_of_rank | ops.moe_gate_up.with_bias
no bounds | MOE_SWIGLU | unclamped | ops.swiglu.clamped
magnitudes | SWIGLU | np.abs | ops.swiglu.relu
R2 reciprocal | MOE_SWIGLU | reciprocal_silu | ops.swiglu.silu
R3 router | SHARED_EXPERT | one_tree | ops.shared_expert.sum_axis
no router | SHARED_EXPERT | unopened_gate | ops.shared_expert.gated_add
"""
"""Rule and mistake, opcode, what takes the place of which part of ``reference``, or of the whole
definition, and how the labels of the shapes begin that can show it."""
WORDS = {**vars(mistakes), **vars(mistakes_experts)}


def control_of(row: str) -> Control:
    """The control of a row."""
    label, opcode, wrong, target, within, *_ = (*row.split(" | "), "", "")
    replaced = target and f"reference.{target}"
    return Control(label, Opcode[opcode], eval(wrong, WORDS), replaced, within)


CONTROLS = [control_of(row) for row in CONTROLS_BY_RULE.strip().splitlines()]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.label)
def test_mistake_is_noticed(control, monkeypatch):
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
def test_nothing_is_noticed_without_a_mistake(opcode):
    """The same comparison is silent when nothing was replaced."""
    for case in list(generate(opcode))[::63]:
        operands = fill(case)
        first, second = by_definition(case, operands), by_definition(case, operands)
        for name in first:
            assert difference(first[name], second[name], may_break=True) is None
