"""Refuses metadata that would change the arithmetic of a model and that its reader did not read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reference.model.config.keys import Keys

NOTHING, IDENTITY = (0, 0.0, False), (0, 0.0, 1, 1.0)
WITHOUT = """
    activation_sparsity_scale altup.num_inputs attention.clamp_kqv attention.indexer.top_k
    attention.key_length_mla attention.kv_lora_rank attention.max_alibi_bias attention.q_lora_rank
    attention.recurrent_layers attention.relative_buckets_count attention.scale
    attention.shared_kv_layers attention.sliding_window attention.temperature_length
    attention.temperature_scale attention.value_length_mla attn_logit_softcapping
    embedding_length_per_layer_input expert_chunk_feed_forward_length expert_count
    expert_latent_length final_logit_softcapping kda.head_dim leading_dense_block_count
    moe_latent_size n_deepstack_layers rope.dimension_sections rope.scaling.yarn_log_multiplier
    router_logit_softcapping ssm.dt_b_c_rms swiglu_clamp_exp swiglu_clamp_shexp swin_norm
    token_shift_count use_parallel_residual wkv.head_size
"""
"""Keys that change nothing where they are 0 or false."""
FACTORS = """
    attention.output_scale attention.value_scale embedding_scale expert_group_count
    expert_group_scale expert_group_used_count expert_weights_scale experts_per_group
    interleave_moe_layer_step logit_scale moe_every_n_layers residual_scale rope.scaling.alpha
    rope.scaling.yarn_attn_factor
"""
"""Keys that change nothing where they are 0 or 1."""
CHANGING: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(WITHOUT.split(), NOTHING),
    **dict.fromkeys(FACTORS.split(), IDENTITY),
    "expert_gating_func": (0, 1),  # 1 is the softmax
    "expert_weights_norm": (True,),
    "rope.scaling.yarn_ext_factor": (0, 0.0, -1, -1.0),  # -1 stands for the type's own value
}
"""Keys that change some family's formulas, and the values with which they change nothing."""
MAX_SHOWN_CHARS = 100
"""Characters of a value that an error shows."""


def refuse_unread(keys: Keys) -> None:
    """Raise UnsupportedModel for a key of CHANGING that was not read, unless its value, or each
    value of an array, is one that changes nothing."""
    for name in unread(keys):
        neutral = CHANGING.get(name)
        if neutral is None:
            continue
        value = keys.file.metadata[f"{keys.architecture}.{name}"]
        values = value.tolist() if isinstance(value, np.ndarray) else [value]
        if any(entry not in neutral for entry in values):
            shown = str(value)[:MAX_SHOWN_CHARS]
            raise keys.unsupported(
                name,
                f"is {shown}, which this build does not compute for {keys.architecture}",
                "the file belongs to a variant this build does not know",
            )


def unread(keys: Keys) -> list[str]:
    """The names of the file's keys of this architecture that its reader did not look at."""
    prefix = f"{keys.architecture}."
    names = (key.removeprefix(prefix) for key in keys.file.metadata if key.startswith(prefix))
    return sorted(name for name in names if name not in keys.used)
