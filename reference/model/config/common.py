"""Reads the metadata keys that all families share."""

from __future__ import annotations

import math
from collections.abc import Callable

from contract.errors import ModelFileError
from reference.model.config.keys import MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, Keys
from reference.model.config.records import ModelConfig, Rope
from reference.model.config.rope import read_rope
from reference.model.gguf.file import GgufFile
from reference.model.gguf.strings import StringArray

EPSILON = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"
RopeReader = Callable[[Keys, int, int], Rope]
"""Reads the rotation of a layer from the keys, the elements of a head and the context in tokens."""
HeadReader = Callable[[Keys, int, int], int]
"""Reads the elements of a head from the keys, the residual width and the number of heads."""


def read_head_dim(keys: Keys, hidden: int, heads: int) -> int:
    """Elements of a head: ``attention.key_length``, by default ``hidden / heads``. Raises
    ModelFileError where neither is a whole number or heads of values have another size."""
    if hidden % heads and not keys.has("attention.key_length"):
        raise keys.error("attention.head_count", f"{heads} does not divide {hidden}")
    head_dim = keys.integer("attention.key_length", 1, MAX_WIDTH, hidden // heads)
    value_length = keys.integer("attention.value_length", 1, MAX_WIDTH, head_dim)
    if value_length != head_dim:
        raise keys.error("attention.value_length", f"is {value_length}, the key's is {head_dim}")
    return head_dim


def read_common(
    keys: Keys,
    rope: RopeReader = read_rope,
    *,
    min_kv_heads: int = 1,
    epsilon: str = EPSILON,
    head: HeadReader = read_head_dim,
    causal: bool = True,
    attends: bool = True,
) -> ModelConfig:
    """Read a configuration with full attention in every layer and heads of one size; the family's
    reader then replaces what differs.

    ``layers`` are the blocks of the file without those that predict further tokens (the last
    ``nextn_predict_layers``). ``min_kv_heads`` is the least number of heads for keys and values
    in a layer: 0 for families that have layers without attention. ``epsilon`` is the metadata key
    of the epsilon of the norms, ``head`` reads the size of heads, ``causal`` is whether a token
    sees those before it only, ``attends`` whether there are heads at all. Raises ModelFileError or
    UnsupportedModel naming the key."""
    if keys.flag("attention.causal", causal) is not causal:
        supported = f"only {'' if causal else 'non-'}causal models are supported"
        raise keys.unsupported("attention.causal", f"is {str(not causal).lower()}", supported)
    blocks = keys.integer("block_count", 1, MAX_LAYERS)
    layers = blocks - keys.integer("nextn_predict_layers", 0, MAX_LAYERS, 0)
    if layers < 1:
        raise keys.error(
            "nextn_predict_layers", f"is {blocks - layers}, must be below the {blocks} blocks"
        )
    hidden = keys.integer("embedding_length", 1, MAX_WIDTH)
    heads, kv_heads = (1,) * layers, (0,) * layers
    if attends:
        heads = keys.per_layer("attention.head_count", layers, blocks, 1)
        kv_heads = keys.per_layer("attention.head_count_kv", layers, blocks, min_kv_heads, heads)
    for layer, (query, key) in enumerate(zip(heads, kv_heads, strict=True)):
        if key and query % key:
            raise keys.error(
                "attention.head_count_kv", f"{key} does not divide {query} heads (layer {layer})"
            )
    head_dim = head(keys, hidden, heads[0])
    context = keys.integer("context_length", 1, MAX_CONTEXT)
    return ModelConfig(
        architecture=keys.architecture,
        name=keys.file.get("general.name", str, keys.architecture),
        layers=layers,
        blocks=blocks,
        hidden=hidden,
        vocab=_vocab(keys.file),
        context=context,
        heads=heads,
        kv_heads=kv_heads,
        head_dims=(head_dim,) * layers,
        feed_forward=keys.per_layer("feed_forward_length", layers, blocks, 0, (0,) * layers),
        rms_eps=keys.positive(epsilon, allow_zero=True),
        ropes=(rope(keys, head_dim, context),) * layers,
        windows=(0,) * layers,
        attention_scales=(1.0 / math.sqrt(head_dim),) * layers,
        kv_layers=tuple(range(layers)),
    )


def _vocab(file: GgufFile) -> int:
    """The number of tokens: of the tokenizer, or without one the rows of the embedding."""
    key = "tokenizer.ggml.tokens"
    if key in file.metadata:
        return len(file.require(key, StringArray))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(file.path, f"key {key}", "is missing", "the file has no vocabulary")
    return embedding.shape[0]


def require_feed_forward(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Return ``config``; raises ModelFileError unless every layer has a dense feed-forward
    block."""
    if 0 in config.feed_forward:
        layer = config.feed_forward.index(0)
        raise keys.error(
            "feed_forward_length", f"is 0 or missing (layer {layer}), must be 1 to {MAX_WIDTH}"
        )
    return config
