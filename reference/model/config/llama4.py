"""Reads the metadata keys of Llama 4: chunks of attention, layers without rotation, experts whose
inputs are weighted."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config import dense
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.experts import USED, read_experts
from reference.model.config.keys import MAX_CONTEXT, MAX_LAYERS, Keys
from reference.model.config.records import Experts, ModelConfig, QueryGrowth
from reference.model.config.rope import read_llama_rope, unrotated

STEP = "interleave_moe_layer_step"
CHUNK = 8192
"""Positions of a chunk, and after how many queries grow, which files do not say."""
GROWTH = 0.1
UNNORMED_COUNT = 128
"""Heads are normed but in the size of so many experts, Maverick; files have no key for it."""


def read_llama4(keys: Keys) -> ModelConfig:
    """Llama 4: every fourth layer sees all positions, does not rotate, and its queries grow."""
    config = require_feed_forward(keys, read_common(keys, read_llama_rope))
    rope = config.ropes[0]
    if rope.scaling.yarn or rope.long_factors or rope.scaling.attention_factor != 1.0:
        kind = keys.file.metadata.get(keys.key("rope.scaling.type"), "linear")
        raise keys.unsupported(
            "rope.scaling.type" if kind != "linear" else "rope.scaling.attn_factor",
            "changes sizes, which are normed behind it",
            "supported are none and linear, without a factor of sizes",
        )
    dense.refuse_sliding_base(keys, rope)
    dense.refuse_other_sizes(keys, config)
    chunked = dense.window_pattern(keys, config)
    if chunked != tuple((layer + 1) % dense.FULL_STEP != 0 for layer in range(config.layers)):
        raise keys.unsupported(
            dense.PATTERN, f"is {chunked}", "supported is all but every fourth layer"
        )
    chunk = keys.integer(dense.WINDOW, 0, MAX_CONTEXT, CHUNK)
    if not chunk:
        raise keys.unsupported(
            dense.WINDOW, "is 0", "supported are chunks in all but every fourth layer"
        )
    experts = _read_experts(keys, config)
    length = dense.growth_length(keys, dense.GROWTH_LENGTH, config.context, CHUNK)
    factor = keys.positive(dense.GROWTH_FACTOR, GROWTH, allow_zero=True)
    return replace(
        dense.with_window(config, -chunk, chunked, rope, unrotated(rope)),
        experts=experts,
        unit_norms=experts.count != UNNORMED_COUNT,
        query_growth=QueryGrowth(length, factor, offset=1, unrotated=True) if factor else None,
    )


def _read_experts(keys: Keys, config: ModelConfig) -> Experts:
    """One expert a token, beside a shared one as wide, in every so many layers."""
    experts = read_experts(keys, config)
    if set(experts.used) != {1}:
        raise keys.unsupported(USED, f"is {max(experts.used)}", "supported is 1")
    return replace(
        experts,
        every=keys.integer(STEP, 1, MAX_LAYERS),
        sigmoid=True,
        weighs_inputs=True,
        renormalize=False,
        shared_width=experts.widths[0],
        shared_gate=False,
    )
