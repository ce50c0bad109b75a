"""The tuned kernels, see ``accel.cuda.tuned``: rules in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Mapping

from accel.cuda.attention import (
    attention_blocks_rule,
    attention_groups_rule,
    attention_rule,
    attention_tokens_rule,
)
from accel.cuda.attention_clusters import attention_clusters_rule
from accel.cuda.delta_net import (
    conv_rule,
    delta_step_rule,
    gated_norm_rule,
    inputs_rule,
    recurrence_rule,
)
from accel.cuda.experts import expert_product_rule, expert_rule
from accel.cuda.gated_spans import gated_spans_rule
from accel.cuda.gathers import gather_rule
from accel.cuda.head_copies import copy_heads_rule
from accel.cuda.head_rows import head_rows_rule
from accel.cuda.matrices import attention_matrix_rule, matrix_rule
from accel.cuda.norm_rows import gated_rows_rule, norm_rows_rule, scaled_rows_rule
from accel.cuda.packed_tiles import UNITS, embed_rule, unit_layout
from accel.cuda.products import product_rule
from accel.cuda.runs import PROMPT_TOKENS_A_ROW
from accel.cuda.sampling import largest_rule, sampling_rule
from accel.cuda.selective_scan import scan_rule
from accel.cuda.tuned import ArrangedLayout, LayoutRule, Rule
from accel.cuda.unpacked_pages import unpack_rule
from accel.packets.layouts import WeightLayout
from accel.packets.shape_buckets import SPLIT_TOKENS, shape_buckets
from contract.shape_key import ShapeKey

RULES: tuple[Rule, ...] = (
    gather_rule,
    embed_rule,
    unpack_rule,
    copy_heads_rule,
    attention_clusters_rule,
    head_rows_rule,
    attention_rule,
    attention_matrix_rule,
    attention_tokens_rule,
    attention_groups_rule,
    attention_blocks_rule,
    delta_step_rule,
    conv_rule,
    inputs_rule,
    recurrence_rule,
    gated_norm_rule,
    scan_rule,
    expert_rule,
    expert_product_rule,
    gated_spans_rule,
    matrix_rule,
    product_rule,
    gated_rows_rule,
    norm_rows_rule,
    scaled_rows_rule,
    largest_rule,
    sampling_rule,
)
BUCKET_TOKENS = (1, SPLIT_TOKENS, 16, 64, 128, 192, 256, 320, 384, 512)
"""Tokens of the buckets below the largest: those that tuned kernels for few tokens are built for,
and those for which blocks cut for a larger bucket would leave many multiprocessors idle."""
MIN_PROMPT_TOKENS = 16
"""Fewest tokens of a bucket of which there is another one for prompts."""
LAYOUTS: Mapping[WeightLayout, ArrangedLayout] = {WeightLayout.UNITS: UNITS}
LAYOUT_RULES: tuple[LayoutRule, ...] = (unit_layout,)


def cuda_buckets(largest: ShapeKey) -> tuple[ShapeKey, ...]:
    """The shape buckets for steps up to ``largest``. Where so many tokens may be of sequences that
    decode, prompts have a bucket of their own in front, of fewer rows."""
    found = []
    for bucket in shape_buckets(largest, BUCKET_TOKENS):
        of_prompts = ShapeKey(bucket.tokens, bucket.tokens // PROMPT_TOKENS_A_ROW)
        if bucket.tokens >= MIN_PROMPT_TOKENS and of_prompts.rows < bucket.rows:
            found.append(of_prompts)
        found.append(bucket)
    return tuple(found)
