"""Reads the metadata keys of decoders whose norms subtract the mean: halves rotate, or a part of
each head; whole heads of OLMo in neighbouring channels."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config.common import LAYER_NORM_EPSILON, read_common, require_feed_forward
from reference.model.config.keys import Keys
from reference.model.config.records import ModelConfig
from reference.model.config.rope import read_llama_rope, read_no_rope

PARALLEL = "use_parallel_residual"


def read_layer_normed(keys: Keys) -> ModelConfig:
    """StarCoder 2, Phi 2, Falcon and Nemotron 4."""
    return require_feed_forward(keys, read_common(keys, epsilon=LAYER_NORM_EPSILON))


def read_gpt2(keys: Keys) -> ModelConfig:
    """GPT-2 and StarCoder: learned positions in place of a rotation."""
    config = read_common(keys, read_no_rope, epsilon=LAYER_NORM_EPSILON)
    return replace(require_feed_forward(keys, config), positions=True)


def read_olmo(keys: Keys) -> ModelConfig:
    """OLMo, whose norms have no weights."""
    config = read_common(keys, read_llama_rope, epsilon=LAYER_NORM_EPSILON)
    return replace(require_feed_forward(keys, config), bare_norms=True)


def read_stablelm(keys: Keys) -> ModelConfig:
    """StableLM: layers without a second norm are parallel, whatever the key says."""
    keys.flag(PARALLEL, False)
    return read_layer_normed(keys)


def read_gptneox(keys: Keys) -> ModelConfig:
    """GPT-NeoX and Pythia: both blocks may read the layer's input, each by a norm of its own."""
    parallel = keys.flag(PARALLEL, True)
    return replace(read_layer_normed(keys), parallel=parallel)
