"""Every metadata key that converters write for some model, with a value that is unusual for it."""

from collections.abc import Iterator, Mapping
from typing import Any

from gguf.constants import Keys

from tests.model.family_file import LAYERS

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
FACTOR, LENGTH, COUNT = 0.75, 24, 3

UNUSUAL: Mapping[str, dict[str, Any]] = {
    **{
        name: {name: FACTOR}
        for name in (
            *("activation_sparsity_scale", "attention.clamp_kqv", "attention.max_alibi_bias"),
            *("attention.output_scale", "attention.scale", "attention.temperature_scale"),
            *("attention.value_scale", "attn_logit_softcapping", "embedding_scale"),
            *("expert_group_scale", "expert_weights_scale", "final_logit_softcapping"),
            *("logit_scale", "residual_scale", "rope.scaling.alpha", "rope.scaling.attn_factor"),
            *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"),
            *("rope.scaling.yarn_log_multiplier", "router_logit_softcapping"),
        )
    },
    **{
        name: {name: COUNT}
        for name in (
            *("altup.num_inputs", "attention.indexer.top_k", "expert_group_count"),
            *( "expert_group_used_count", "experts_per_group"),
            *("interleave_moe_layer_step", "leading_dense_block_count", "moe_every_n_layers"),
            *("n_deepstack_layers", "attention.relative_buckets_count", "token_shift_count"),
        )
    },
    **{
        name: {name: LENGTH}
        for name in (
            *("attention.key_length_mla", "attention.kv_lora_rank", "attention.q_lora_rank"),
            *("attention.shared_kv_layers", "attention.sliding_window"),
            *("attention.temperature_length", "attention.value_length_mla"),
            *("embedding_length_per_layer_input", "expert_chunk_feed_forward_length"),
            *("expert_count", "expert_latent_length", "kda.head_dim", "moe_latent_size"),
            "wkv.head_size",
        )
    },
    "attention.causal": {"attention.causal": False},
    "attention.recurrent_layers": {"attention.recurrent_layers": [False] + [True] * (LAYERS - 1)},
    "expert_gating_func": {"expert_gating_func": 4},
    "expert_weights_norm": {"expert_weights_norm": False},
    "rope.dimension_sections": {"rope.dimension_sections": [1, 1, 1, 8]},
    "rope.freq_base": {"rope.freq_base": 777.0},
    "rope.scaling.factor": LINEAR,
    "rope.scaling.type": YARN,
    "rope.scaling.yarn_beta_fast": {**YARN, "rope.scaling.yarn_beta_fast": 4.0},
    "rope.scaling.yarn_beta_slow": {**YARN, "rope.scaling.yarn_beta_slow": 0.25},
    "rope.scaling.original_context_length": {
        **YARN, "rope.scaling.original_context_length": 16,
    },
    "factor and attn_factor": {**LINEAR, "rope.scaling.attn_factor": FACTOR},
    "YaRN and attn_factor": {**YARN, "rope.scaling.attn_factor": FACTOR},
    "YaRN and yarn_ext_factor": {**YARN, "rope.scaling.yarn_ext_factor": 0.5},
    "no scaling and attn_factor": {
        "rope.scaling.type": "none", "rope.scaling.attn_factor": FACTOR,
    },
    "ssm.dt_b_c_rms": {"ssm.dt_b_c_rms": True},
    "swiglu_clamp_exp": {"swiglu_clamp_exp": [FACTOR] * LAYERS},
    "swiglu_clamp_shexp": {"swiglu_clamp_shexp": [FACTOR] * LAYERS},
    "swin_norm": {"swin_norm": True},
    "use_parallel_residual": {"use_parallel_residual": True},
}  # fmt: skip
"""What is written for a key that changes the formulas of some family, by the key or what it tries;
keys that mean something only together stand together."""

WINDOWED_ONLY = (
    *("attention.key_length_swa", "attention.sliding_window_pattern"),
    *("attention.value_length_swa", "rope.dimension_count_swa", "rope.freq_base_swa"),
)
"""Keys of layers with a window: without one they mean nothing."""
SIZES = (
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.layer_norm_rms_epsilon", "attention.value_length", "block_count"),
    *("context_length", "embedding_length", "expert_feed_forward_length"),
    *("expert_shared_feed_forward_length", "expert_used_count", "feed_forward_length"),
    *("nextn_predict_layers", "rope.dimension_count", "shortconv.l_cache", "ssm.conv_kernel"),
    *("ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"),
)
"""Sizes, which the shapes of tensors confirm."""
WITHOUT_EFFECT = (
    *("attention.layer_norm_epsilon", "expert_shared_count", "full_attention_interval"),
    *("embedding_length_out", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout"),
    "vocab_size",
)
"""Keys that no formula of a family reads, unless it is one that does; llama.cpp's do neither."""
OF_OTHERS = (
    *("altup.active_idx", "attention.decay_lora_rank", "attention.gate_lora_rank"),
    *("attention.group_norm_epsilon", "attention.group_norm_groups", "attention.iclr_lora_rank"),
    *("attention.indexer.head_count", "attention.indexer.key_length"),
    *("attention.value_residual_mix_lora_rank", "classifier.output_labels"),
    *("convnext.block_count", "convnext.embedding_length", "decoder_block_count"),
    *("decoder_start_token_id", "features_length", "posnet.block_count"),
    *("posnet.embedding_length", "rescale_every_n_layers", "time_decay_extra_dim"),
    *("time_mix_extra_dim", "{dense}_feat_in", "{dense}_feat_out"),
)
"""Keys of architectures that are no decoders of this kind, which come with tensors of theirs."""


def known_keys(keys: type = Keys) -> Iterator[str]:
    """Every key of an architecture that the gguf package can write."""
    for value in vars(keys).values():
        if isinstance(value, type):
            yield from known_keys(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")
