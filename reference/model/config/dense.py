"""Reads the metadata keys of dense decoders that differ from Llama's in scales, windows or
rotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reference.exact.elementary import softplus
from reference.exact.rotary import RotaryScaling
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.experts import SHARED_WIDTH, read_mixtral_experts
from reference.model.config.keys import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, Keys
from reference.model.config.records import ModelConfig, QueryGrowth, Rope
from reference.model.config.rope import (
    SECTIONS,
    SLIDING_TABLE,
    read_divided_rope,
    read_interleaved_rope,
    read_llama_rope,
    read_mistral_rope,
    read_phi_rope,
    unrotated,
)

WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
FULL_STEP = 4
"""Every fourth layer has full attention where some have windows and the file does not say which."""
SMOLLM3_UNROTATED = 4
"""Every fourth layer of SmolLM 3 does not rotate; its files have no key for it."""
BAICHUAN_13B_LAYERS = 40
KEY_LENGTH = "attention.key_length_swa"
VALUE_LENGTH = "attention.value_length_swa"
ROTATED = "rope.dimension_count_swa"
SLIDING_BASE = "rope.freq_base_swa"
GROWTH_FACTOR = "attention.temperature_scale"
GROWTH_LENGTH = "attention.temperature_length"
ORIGINAL_CONTEXT = "rope.scaling.original_context_length"
MAX_GROWTHS = 1 << 12
"""Most growths of queries within a context; Llama 4's 10 million positions have 1,280."""


def read_dense(keys: Keys) -> ModelConfig:
    """Qwen 2 and 3: halves rotate."""
    return require_feed_forward(keys, read_common(keys))


def read_qwen(keys: Keys) -> ModelConfig:
    """Qwen 1, whose files give the width of gates and ups together."""
    config = read_dense(keys)
    for layer, width in enumerate(config.feed_forward):
        if width % 2:
            raise keys.error("feed_forward_length", f"is {width}, must be even (layer {layer})")
    return replace(config, feed_forward=tuple(width // 2 for width in config.feed_forward))


def read_llama_dense(keys: Keys) -> ModelConfig:
    """Llama without experts."""
    return require_feed_forward(keys, read_common(keys, read_llama_rope))


def read_exaone(keys: Keys) -> ModelConfig:
    """EXAONE 3: halves rotate, with divisors if the file has them."""
    return require_feed_forward(keys, read_common(keys, read_divided_rope))


def read_baichuan(keys: Keys) -> ModelConfig:
    """Baichuan 7B. That of 13B has scores that fall with the distance, of which files say nothing
    but the number of layers."""
    config = read_llama_dense(keys)
    if config.layers == BAICHUAN_13B_LAYERS:
        raise keys.unsupported("block_count", f"is {config.layers}", "Baichuan 7B is supported")
    return config


def read_mistral3(keys: Keys) -> ModelConfig:
    """Ministral 3: Llama with queries that grow with each original context passed."""
    config = require_feed_forward(keys, read_common(keys, read_mistral_rope))
    config = replace(config, experts=read_mixtral_experts(keys, config))
    factor = keys.positive(GROWTH_FACTOR, 0.0, allow_zero=True)
    original = growth_length(keys, ORIGINAL_CONTEXT, config.context, config.context)
    length = keys.integer(GROWTH_LENGTH, 0, MAX_CONTEXT, 0) or original
    if length != original:
        raise keys.unsupported(GROWTH_LENGTH, f"is {length}", f"supported is {original}")
    return replace(config, query_growth=QueryGrowth(original, factor) if factor else None)


def growth_length(keys: Keys, name: str, context: int, default: int) -> int:
    """After how many positions queries grow. Raises ModelFileError for more than MAX_GROWTHS
    growths, of each of which the logarithm is computed."""
    length = keys.integer(name, 1, MAX_CONTEXT, default)
    if context // length > MAX_GROWTHS:
        raise keys.error(name, f"is {length}, must be above {context} / {MAX_GROWTHS}")
    return length


def read_smollm3(keys: Keys) -> ModelConfig:
    """SmolLM 3: Llama's rotation in all but every fourth layer."""
    config = read_llama_dense(keys)
    rope = config.ropes[0]
    rotated = [(layer + 1) % SMOLLM3_UNROTATED != 0 for layer in range(config.layers)]
    return replace(config, ropes=tuple(rope if turns else unrotated(rope) for turns in rotated))


def read_glm4(keys: Keys) -> ModelConfig:
    """GLM-4: interleaved pairs of the first half of a head rotate."""
    if keys.has(SECTIONS):
        raise keys.unsupported(SECTIONS, "is present", "only GLM-4 for text is supported")
    return require_feed_forward(keys, read_common(keys, read_interleaved_rope))


def read_phi3(keys: Keys) -> ModelConfig:
    """Phi 3 and 4: one window for all layers, or none."""
    config = require_feed_forward(keys, read_common(keys, read_phi_rope))
    window = keys.integer(WINDOW, 0, MAX_CONTEXT, 0)
    if window:
        if keys.has(PATTERN):
            raise keys.unsupported(PATTERN, "is present", "supported is one window for all layers")
        refuse_other_sizes(keys, config)
        refuse_sliding_base(keys, config.ropes[0])
    return replace(config, windows=(window,) * config.layers)


def read_olmo2(keys: Keys) -> ModelConfig:
    """OLMo 2, and OLMo 3 with windows."""
    return with_plain_windows(keys, require_feed_forward(keys, read_common(keys)))


def with_plain_windows(keys: Keys, config: ModelConfig) -> ModelConfig:
    """``config`` with the window of the file, if it has one, in all but every n-th layer; layers
    with windows scale no angles."""
    window = keys.integer(WINDOW, 0, MAX_CONTEXT, 0)
    if not window:
        return config
    refuse_other_sizes(keys, config)
    sliding = window_pattern(keys, config)
    full = config.ropes[0]
    base = keys.positive(SLIDING_BASE, full.base)
    rope = Rope(SLIDING_TABLE, base, full.dims, full.neox, RotaryScaling())
    return with_window(config, window, sliding, rope, full)


def read_exaone4(keys: Keys) -> ModelConfig:
    """EXAONE 4: halves rotate, with divisors if the file has them; where there are windows, in
    their layers alone."""
    config = read_exaone(keys)
    window = keys.integer(WINDOW, 0, MAX_CONTEXT, 0)
    return rotating_in_windows(keys, config, window) if window else config


def rotating_in_windows(
    keys: Keys, config: ModelConfig, window: int, first: bool = False
) -> ModelConfig:
    """``config`` with this window in all but the last, or the ``first``, of n layers, which alone
    do not rotate."""
    rope = config.ropes[0]
    refuse_sliding_base(keys, rope)
    refuse_other_sizes(keys, config)
    return with_window(
        config, window, window_pattern(keys, config, first=first), rope, unrotated(rope)
    )


def with_window(
    config: ModelConfig, window: int, sliding: Sequence[bool], inside: Rope, outside: Rope
) -> ModelConfig:
    """``config`` with this window in the ``sliding`` layers, which rotate as ``inside`` does, the
    others as ``outside`` does."""
    return replace(
        config,
        windows=tuple(window if slides else 0 for slides in sliding),
        ropes=tuple(inside if slides else outside for slides in sliding),
    )


def read_granite(keys: Keys) -> ModelConfig:
    """Granite: Llama with factors for embeddings, residuals, scores and logits, and experts
    (``granitemoe``) with or without a shared one."""
    return with_granite_experts(keys, read_common(keys, read_llama_rope))


def with_granite_experts(keys: Keys, common: ModelConfig) -> ModelConfig:
    """``common`` with the factors and the experts of a Granite file."""
    config = granite_factors(keys, require_feed_forward(keys, common))
    experts = read_mixtral_experts(keys, config)
    if experts is not None:
        width = keys.integer(SHARED_WIDTH, 0, MAX_WIDTH, 0)
        experts = replace(experts, shared_width=width, shared_gate=False)
    return replace(config, experts=experts)


def granite_factors(keys: Keys, config: ModelConfig) -> ModelConfig:
    """``config`` with the factors of a Granite file, which also says whether heads rotate."""
    if not keys.flag("rope.scaling.finetuned", True):
        config = replace(config, ropes=tuple(unrotated(rope) for rope in config.ropes))
    scale = keys.positive("attention.scale", 0.0, allow_zero=True)
    scales = (scale,) * config.layers if scale else config.attention_scales
    return residual_factors(keys, replace(config, attention_scales=scales))


def residual_factors(keys: Keys, config: ModelConfig) -> ModelConfig:
    """``config`` with a file's factors for embeddings, residuals and logits."""
    return replace(
        config,
        embedding_scale=keys.factor("embedding_scale"),
        residual_scale=keys.factor("residual_scale"),
        logit_scale=1.0 / keys.positive("logit_scale"),
    )


def read_minicpm(keys: Keys) -> ModelConfig:
    """MiniCPM: Llama with factors for embeddings, residuals and logits."""
    return residual_factors(keys, read_llama_dense(keys))


def refuse_other_sizes(keys: Keys, config: ModelConfig) -> None:
    """Raise UnsupportedModel unless heads of layers with a window are like those of the others."""
    size, dims = config.head_dims[0], config.ropes[0].dims
    for name, full in ((KEY_LENGTH, size), (VALUE_LENGTH, size), (ROTATED, dims)):
        length = keys.integer(name, 0, MAX_WIDTH, full)
        if length != full:
            raise keys.unsupported(name, f"is {length}", f"supported is {full}")


def refuse_sliding_base(keys: Keys, rope: Rope) -> None:
    """Raise UnsupportedModel unless layers with a window rotate as ``rope`` does."""
    base = keys.positive(SLIDING_BASE, rope.base)
    if base != rope.base:
        raise keys.unsupported(SLIDING_BASE, f"is {base}", f"supported is {rope.base}")


def window_pattern(
    keys: Keys, config: ModelConfig, default: int = FULL_STEP, first: bool = False
) -> tuple[bool, ...]:
    """Whether each layer has a window: an array of the file, else all but the last, or the
    ``first``, of n layers."""
    if isinstance(keys.file.metadata.get(keys.key(PATTERN)), np.ndarray):
        return keys.flags(PATTERN, config.layers, config.blocks)
    period = keys.integer(PATTERN, 1, MAX_LAYERS, default)
    full = 0 if first else period - 1
    return tuple(layer % period != full for layer in range(config.layers))


MAX_SIZE = 1e4
"""Most of any of them, in size; those of published models are near 1."""


def read_apertus(keys: Keys) -> ModelConfig:
    """Apertus: halves rotate; a feed forward without gates."""
    config = require_feed_forward(keys, read_common(keys, read_divided_rope))
    p, n, b, e = (
        _per_layer(keys, f"xielu.{name}", config.layers)
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    )
    # The file has the first two before the function that keeps them positive.
    rows = np.stack([softplus(p), b + softplus(n), b, e], axis=1)
    return replace(config, xielu=tuple(tuple(row) for row in rows.tolist()))


def _per_layer(keys: Keys, name: str, layers: int) -> np.ndarray:
    """f32[layers] of a number or an array; these keys are without an architecture's name. Raises
    ModelFileError."""
    value = keys.file.metadata.get(name)
    if not isinstance(value, np.ndarray):
        value = np.array([keys.file.require(name, float)] * layers)
    fits = value.shape == (layers,) and np.issubdtype(value.dtype, np.floating)
    if not fits or not (np.abs(value) <= MAX_SIZE).all():
        raise keys.file_error(name, f"must be {layers} numbers up to {MAX_SIZE:g}")
    return value.astype(np.float32)
