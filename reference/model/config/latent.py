"""Reads the metadata keys of DeepSeek V2 and V3, Kimi K2 and GLM-4.7 Flash."""

from __future__ import annotations

import math
from dataclasses import replace

from reference.exact.rotary import yarn_growth
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.experts import read_latent_experts
from reference.model.config.keys import MAX_WIDTH, Keys
from reference.model.config.records import Latent, ModelConfig, Rope
from reference.model.config.rope import LOG_MULTIPLIER, read_interleaved_rope

RANK = "attention.kv_lora_rank"
QUERY_RANK = "attention.q_lora_rank"
QUERY_LENGTH = "attention.key_length_mla"
VALUE_LENGTH = "attention.value_length_mla"


def read_deepseek2(keys: Keys) -> ModelConfig:
    """Attention over latent rows, whose last channels alone rotate, and experts in all but the
    first layers. Raises UnsupportedModel for a file whose keys and values are one matrix, as they
    were before llama.cpp had such rows."""
    if not keys.has(QUERY_LENGTH):
        raise keys.unsupported(
            QUERY_LENGTH, "is missing", "convert the model again: the file is of an older form"
        )
    common = read_common(keys, _read_rope, head=_row_width)
    rope, size = common.ropes[0], keys.integer(QUERY_LENGTH, 2, MAX_WIDTH)
    latent = Latent(
        rank=keys.integer(RANK, 1, MAX_WIDTH),
        query_rank=keys.integer(QUERY_RANK, 0, MAX_WIDTH, 0),
        unrotated=size - rope.dims,
        value=keys.integer(VALUE_LENGTH, 1, MAX_WIDTH),
    )
    if latent.unrotated < 1:
        raise keys.error(QUERY_LENGTH, f"is {size}, must be above the {rope.dims} that rotate")
    if latent.rank + rope.dims != common.head_dims[0] or set(common.kv_heads) != {1}:
        raise keys.error(RANK, f"is {latent.rank}, which is no row of {common.head_dims[0]}")
    scale = _magnitude(keys, rope) ** 2 / math.sqrt(size)
    config = replace(common, latent=latent, attention_scales=(scale,) * common.layers)
    experts = read_latent_experts(keys, config)
    dense = config.layers if experts is None else experts.leading_dense
    if dense:
        require_feed_forward(keys, config)
    return replace(config, experts=experts)


def _row_width(keys: Keys, hidden: int, heads: int) -> int:
    """The channels of a latent row, which are those of a key."""
    width = keys.integer("attention.key_length", 1, MAX_WIDTH)
    value = keys.integer("attention.value_length", 1, MAX_WIDTH)
    if value != keys.integer(RANK, 1, MAX_WIDTH):
        raise keys.error("attention.value_length", f"is {value}, must be {keys.key(RANK)}")
    return width


def _read_rope(keys: Keys, head_dim: int, context: int) -> Rope:
    """A rotation of interleaved pairs; YaRN leaves sizes alone where it has a multiplier."""
    rope = read_interleaved_rope(keys, head_dim, context)
    kind = keys.file.get(keys.key("rope.scaling.type"), str, "none")
    if kind not in ("none", "yarn") or not (rope.scaling.yarn or rope.scaling.factor == 1.0):
        raise keys.unsupported("rope.scaling.type", f"is {kind!r}", "supported are none, yarn")
    if rope.scaling.yarn and keys.positive(LOG_MULTIPLIER, 0.0, allow_zero=True):
        return replace(rope, scaling=replace(rope.scaling, log_multiplier=1.0))
    return rope


def _magnitude(keys: Keys, rope: Rope) -> float:
    """What queries and keys are both multiplied by, beyond what rotation does to some channels:
    the growth of YaRN, times another one by the multiplier, which the file has times 0.1."""
    scaling = rope.scaling
    if not scaling.yarn:
        return scaling.attention_factor
    multiplier = keys.positive(LOG_MULTIPLIER, 0.0, allow_zero=True)
    rotated = 1.0 if multiplier else yarn_growth(scaling.factor, 1.0)
    return scaling.attention_factor * rotated * yarn_growth(scaling.factor, 10.0 * multiplier)
