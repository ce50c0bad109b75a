"""Reads the metadata keys of Gemma: sliding windows, shared keys and values, soft-caps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reference.model.config import dense
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.experts import read_parallel_experts
from reference.model.config.keys import MAX_CONTEXT, MAX_WIDTH, Keys
from reference.model.config.records import ModelConfig
from reference.model.config.rope import FACTORS, read_sliding_rope

PER_LAYER = "embedding_length_per_layer_input"
INPUTS, ACTIVE = "altup.num_inputs", "altup.active_idx"
STREAMS, LAUREL_RANK = 4, 64
"""Gemma 3n's streams, and the rank of its matrices beside attention; there is no other size."""
SPARSITY = "activation_sparsity_scale"
MAX_DEVIATIONS = 64
SHARED = "attention.shared_kv_layers"
CAP = "final_logit_softcapping"
SCORE_CAP = "attn_logit_softcapping"
GEMMA2_PATTERN, GEMMA3_PATTERN, GEMMA3N_PATTERN = 2, 6, 5
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
"""Layers of Gemma 27B, the one size whose scores are scaled by hidden / heads."""
GEMMA2_WINDOW, GEMMA2_SCORE_CAP = 4096, 50.0
FINAL_CAP = 30.0


def read_gemma(keys: Keys) -> ModelConfig:
    """Gemma: Qwen's rotation and scaled embeddings."""
    return _gemma(keys)


def read_gemma2(keys: Keys) -> ModelConfig:
    """Gemma 2: a window in every second layer; scores are capped."""
    config = _gemma(keys, cap=FINAL_CAP)
    window = keys.integer(dense.WINDOW, 1, MAX_CONTEXT, GEMMA2_WINDOW)
    dense.refuse_sliding_base(keys, config.ropes[0])
    dense.refuse_other_sizes(keys, config)
    sliding, rope = dense.window_pattern(keys, config, GEMMA2_PATTERN), config.ropes[0]
    return replace(
        dense.with_window(config, window, sliding, rope, rope),
        attention_scales=_scales(config, GEMMA2_27B_LAYERS),
        score_cap=keys.positive(SCORE_CAP, GEMMA2_SCORE_CAP, allow_zero=True),
    )


def read_gemma3(keys: Keys) -> ModelConfig:
    """Gemma 3: every n-th layer has full attention, the others a sliding window if the file has
    one."""
    config = _gemma(keys, cap=0.0)
    window = keys.integer(dense.WINDOW, 0, MAX_CONTEXT, 0)
    sliding = (False,) * config.layers
    if window:
        sliding = dense.window_pattern(keys, config, GEMMA3_PATTERN)
    head_dim = keys.integer(dense.KEY_LENGTH, 1, MAX_WIDTH, config.head_dims[0])
    config = _with_windows(keys, config, window, sliding, head_dim)
    return replace(config, attention_scales=_scales(config, GEMMA3_27B_LAYERS))


def read_gemma3n(keys: Keys) -> ModelConfig:
    """Gemma 3n: windows, shared keys and values, per-layer embeddings, streams, sparse gates."""
    config = _gemma(keys, cap=FINAL_CAP)
    for name, supported in ((INPUTS, STREAMS), (ACTIVE, 0)):
        found = keys.integer(name, 0, MAX_WIDTH, supported)
        if found != supported:
            raise keys.unsupported(name, f"is {found}", f"supported is {supported}")
    dense.refuse_other_sizes(keys, config)
    sliding = dense.window_pattern(keys, config, GEMMA3N_PATTERN)
    window = keys.integer(dense.WINDOW, 1, MAX_CONTEXT)
    config = _with_windows(keys, config, window, sliding, config.head_dims[0])
    return replace(
        config,
        attention_scales=(1.0,) * config.layers,
        kv_layers=_kv_layers(keys, config, sliding),
        per_layer_width=keys.integer(PER_LAYER, 1, MAX_WIDTH),
        sparsity=_sparsity(keys, config.layers),
    )


def _sparsity(keys: Keys, layers: int) -> tuple[float, ...]:
    """Of each layer, how many standard deviations above their mean gates are kept."""
    values = keys.file.require(keys.key(SPARSITY), np.ndarray)
    numbers = np.issubdtype(values.dtype, np.floating)
    if not numbers or len(values) != layers:
        found = f"has {len(values)} {values.dtype} entries, must be {layers} numbers"
        raise keys.error(SPARSITY, found)
    if not all(value == -math.inf or abs(value) <= MAX_DEVIATIONS for value in values.tolist()):
        found = f"must be -inf or -{MAX_DEVIATIONS} to {MAX_DEVIATIONS}"
        raise keys.error(SPARSITY, found)
    return tuple(values.tolist())


def read_gemma4(keys: Keys) -> ModelConfig:
    """Gemma 4: full and sliding layers with different head sizes; the last layers may share keys
    and values."""
    config = _gemma(keys, cap=FINAL_CAP)
    window = keys.integer(dense.WINDOW, 1, MAX_CONTEXT)
    sliding = keys.flags(dense.PATTERN, config.layers, config.blocks)
    head_dim = keys.integer(dense.KEY_LENGTH, 1, MAX_WIDTH)
    full = replace(config.ropes[0], factors=FACTORS)
    config = replace(config, ropes=(full,) * config.layers)
    config = _with_windows(keys, config, window, sliding, head_dim)
    return replace(
        config,
        attention_scales=(1.0,) * config.layers,
        kv_layers=_kv_layers(keys, config, sliding),
        experts=read_parallel_experts(keys, config),
        per_layer_width=keys.integer(PER_LAYER, 0, MAX_WIDTH),
    )


def _scales(config: ModelConfig, layers_of_27b: int) -> tuple[float, ...]:
    """The factors of scores, by the size of heads; of the 27B by hidden / heads."""
    if config.layers == layers_of_27b:
        return tuple(1.0 / math.sqrt(config.hidden / heads) for heads in config.heads)
    return tuple(1.0 / math.sqrt(dim) for dim in config.head_dims)


def _gemma(keys: Keys, cap: float | None = None) -> ModelConfig:
    """The keys of all of them; ``cap`` bounds logits where the file does not say, None says that
    nothing does."""
    config = require_feed_forward(keys, read_common(keys))
    bound = 0.0 if cap is None else keys.positive(CAP, cap, allow_zero=True)
    return replace(config, embedding_scale=math.sqrt(config.hidden), logit_cap=bound)


def _with_windows(
    keys: Keys, config: ModelConfig, window: int, sliding: Sequence[bool], head_dim: int
) -> ModelConfig:
    """``config`` with the window, head size and rotation of the sliding layers."""
    value_length = keys.integer(dense.VALUE_LENGTH, 1, MAX_WIDTH, head_dim)
    if value_length != head_dim:
        raise keys.error(dense.VALUE_LENGTH, f"is {value_length}, the key's is {head_dim}")
    if not any(sliding):
        return config
    full = config.ropes[0]
    rope = read_sliding_rope(keys, head_dim, full)
    return replace(
        dense.with_window(config, window, sliding, rope, full),
        head_dims=tuple(
            head_dim if slides else size
            for slides, size in zip(sliding, config.head_dims, strict=True)
        ),
    )


def _kv_layers(keys: Keys, config: ModelConfig, sliding: Sequence[bool]) -> tuple[int, ...]:
    """For each layer the layer whose keys and values it reads.

    A layer without keys and values reads those of the last layer of its kind (full or sliding) that
    has them."""
    layers = config.layers
    own = layers - keys.integer(SHARED, 0, layers - 1, 0)
    sources = list(range(own))
    for layer in range(own, layers):
        donor = own - 2 if sliding[layer] else own - 1
        kind = "a sliding-window" if sliding[layer] else "a full-attention"
        if donor < 0 or sliding[donor] != sliding[layer]:
            found = f"would read layer {donor}, which is not {kind} layer like itself"
            if donor < 0:
                found = "has no layer of its own kind to read"
            raise keys.error(SHARED, f"is {layers - own}: layer {layer} {found}")
        if config.kv_heads[donor] != config.kv_heads[layer]:
            raise keys.error(
                "attention.head_count_kv",
                f"is {config.kv_heads[layer]} in layer {layer}, which reads the keys of layer "
                f"{donor} with {config.kv_heads[donor]}",
            )
        sources.append(donor)
    return tuple(sources)
