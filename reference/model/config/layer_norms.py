"""Reads the metadata keys of decoders whose norms subtract the mean: halves rotate, or a part of
each head; whole heads of OLMo and Command R in neighbouring channels."""

from __future__ import annotations

from dataclasses import replace

from reference.model.config.common import LAYER_NORM_EPSILON, read_common, require_feed_forward
from reference.model.config.dense import WINDOW, rotating_in_windows
from reference.model.config.keys import MAX_CONTEXT, Keys
from reference.model.config.records import ModelConfig
from reference.model.config.rope import read_interleaved_rope, read_llama_rope, read_no_rope

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


def read_command_r(keys: Keys) -> ModelConfig:
    """Command R: neighbouring channels rotate; logits have a factor."""
    common = read_common(keys, read_interleaved_rope, epsilon=LAYER_NORM_EPSILON)
    scale = keys.positive("logit_scale", allow_zero=True) or 1.0
    return replace(require_feed_forward(keys, common), logit_scale=scale)


def read_cohere2(keys: Keys) -> ModelConfig:
    """Command R7B: layers with a window rotate, the others do not."""
    return rotating_in_windows(keys, read_command_r(keys), keys.integer(WINDOW, 1, MAX_CONTEXT))
