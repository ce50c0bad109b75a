"""Reads the metadata keys of DeepSeek V2 and V3, Kimi K2, Kimi Linear, GLM-4.7 Flash, Mistral 4."""

from __future__ import annotations

import math
from dataclasses import replace

from contract.arithmetic import SEGMENT
from reference.exact.rotary import yarn_growth
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.experts import (
    NORMALIZED,
    SIGMOID,
    read_latent_experts,
    read_routed_experts,
)
from reference.model.config.hybrid import read_taps
from reference.model.config.keys import MAX_WIDTH, Keys
from reference.model.config.records import DeltaNet, Latent, ModelConfig, Rope
from reference.model.config.rope import LOG_MULTIPLIER, read_interleaved_rope, read_no_rope

RANK = "attention.kv_lora_rank"
QUERY_RANK = "attention.q_lora_rank"
QUERY_LENGTH = "attention.key_length_mla"
VALUE_LENGTH = "attention.value_length_mla"
KEY_LENGTH, HEAD_VALUE = "attention.key_length", "attention.value_length"
"""What says the same in older files."""
ONE_TENTH, NEAR = 0.1, 1e-6
"""YaRN's multiplier of a growth that is its own, and what binary32 may make of it."""


def read_deepseek2(keys: Keys) -> ModelConfig:
    """Attention over latent rows, whose last channels alone rotate, and experts in all but the
    first layers. Files from before llama.cpp had such rows give the sizes of heads alone."""
    older = not keys.has(QUERY_LENGTH)
    lengths = (KEY_LENGTH, HEAD_VALUE) if older else (QUERY_LENGTH, VALUE_LENGTH)
    common = read_common(keys, _read_rope, head=_older_row_width if older else _row_width)
    if older:
        common = _with_rows(keys, common)
    config = _with_latent(keys, common, lengths, keys.integer(QUERY_RANK, 0, MAX_WIDTH, 0), {1})
    experts = read_latent_experts(keys, config)
    dense = config.layers if experts is None else experts.leading_dense
    if dense:
        require_feed_forward(keys, config)
    return replace(config, experts=experts)


def read_kimi_linear(keys: Keys) -> ModelConfig:
    """Kimi Linear: delta nets in the layers without heads for keys and values, latent rows of which
    nothing rotates in the others, and experts of DeepSeek V3 in all but the first layers."""
    common = read_common(keys, read_no_rope, min_kv_heads=0, head=_key_length)
    config = _with_latent(keys, common, (QUERY_LENGTH, VALUE_LENGTH), 0, {0, 1})
    if not keys.flag(NORMALIZED, True):
        raise keys.unsupported(NORMALIZED, "is false", "supported is true")
    experts = read_routed_experts(keys, config, SIGMOID)
    if experts.leading_dense:
        require_feed_forward(keys, config)
    if len(set(common.heads)) > 1:
        raise keys.error("attention.head_count", "differs between layers")
    heads = common.heads[0]
    net = DeltaNet(
        taps=read_taps(keys),
        state_size=keys.integer("kda.head_dim", 1, SEGMENT),
        key_heads=heads,
        value_heads=heads,
        layers=tuple(count == 0 for count in common.kv_heads),
    )
    return replace(config, experts=replace(experts, renormalize=True), delta_net=net)


def _with_latent(
    keys: Keys, common: ModelConfig, lengths: tuple[str, str], query_rank: int, kv_heads: set[int]
) -> ModelConfig:
    """``common`` with the sizes of latent rows; ``lengths`` are the keys of those of queries and
    values, ``kv_heads`` the heads for keys and values that layers may have."""
    rope, size = common.ropes[0], keys.integer(lengths[0], 2, MAX_WIDTH)
    latent = Latent(
        rank=keys.integer(RANK, 1, MAX_WIDTH),
        query_rank=query_rank,
        unrotated=size - rope.dims,
        value=keys.integer(lengths[1], 1, MAX_WIDTH),
    )
    if latent.unrotated < 1:
        raise keys.error(lengths[0], f"is {size}, must be above the {rope.dims} that rotate")
    if latent.rank + rope.dims != common.head_dims[0] or not set(common.kv_heads) <= kv_heads:
        raise keys.error(RANK, f"is {latent.rank}, which is no row of {common.head_dims[0]}")
    scale = _magnitude(keys, rope) ** 2 / math.sqrt(size)
    return replace(common, latent=latent, attention_scales=(scale,) * common.layers)


def read_mistral4(keys: Keys) -> ModelConfig:
    """Mistral 4: DeepSeek's attention and experts. Files do not say by how much rotated channels
    grow apart from scores, so that only the multiplier with which both are alike is read."""
    multiplier = keys.positive(LOG_MULTIPLIER, 0.0, allow_zero=True)
    if multiplier and abs(multiplier - ONE_TENTH) > NEAR:
        raise keys.unsupported(LOG_MULTIPLIER, f"is {multiplier}", f"supported is {ONE_TENTH}")
    return read_deepseek2(keys)


def _with_rows(keys: Keys, common: ModelConfig) -> ModelConfig:
    """``common`` of an older file, whose heads share a row. Raises ModelFileError where heads for
    keys and values are fewer than others."""
    if common.kv_heads != common.heads:
        problem = f"is {common.kv_heads[0]}, must be the {common.heads[0]} heads"
        raise keys.error("attention.head_count_kv", problem)
    return replace(common, kv_heads=(1,) * common.layers)


def _older_row_width(keys: Keys, hidden: int, heads: int) -> int:
    """The channels of a latent row, of which an older file says nothing: those of the matrix that
    keys are made of, and those that rotate."""
    rotated = keys.integer("rope.dimension_count", 2, MAX_WIDTH)
    return keys.integer(RANK, 1, MAX_WIDTH) + rotated


def _row_width(keys: Keys, hidden: int, heads: int) -> int:
    """The channels of a latent row, which are those of a key."""
    width = keys.integer(KEY_LENGTH, 1, MAX_WIDTH)
    value = keys.integer(HEAD_VALUE, 1, MAX_WIDTH)
    if value != keys.integer(RANK, 1, MAX_WIDTH):
        raise keys.error(HEAD_VALUE, f"is {value}, must be {keys.key(RANK)}")
    return width


def _key_length(keys: Keys, hidden: int, heads: int) -> int:
    """The channels of a latent row, where the length of values says nothing."""
    return keys.integer(KEY_LENGTH, 1, MAX_WIDTH)


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
