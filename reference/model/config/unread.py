"""Refuses metadata that would change the arithmetic of a model and that its reader did not read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reference.model.config.keys import Keys

NOTHING = (0, 0.0, False)
IDENTITY = (0, 0.0, 1, 1.0)
CHANGING: Mapping[str, tuple[object, ...]] = {
    "activation_sparsity_scale": NOTHING,
    "altup.num_inputs": NOTHING,
    "attention.clamp_kqv": NOTHING,
    "attention.indexer.top_k": NOTHING,
    "attention.key_length_mla": NOTHING,
    "attention.kv_lora_rank": NOTHING,
    "attention.max_alibi_bias": NOTHING,
    "attention.output_scale": IDENTITY,
    "attention.q_lora_rank": NOTHING,
    "attention.recurrent_layers": NOTHING,
    "attention.relative_buckets_count": NOTHING,
    "attention.scale": NOTHING,
    "attention.shared_kv_layers": NOTHING,
    "attention.sliding_window": NOTHING,
    "attention.temperature_length": NOTHING,
    "attention.temperature_scale": NOTHING,
    "attention.value_length_mla": NOTHING,
    "attention.value_scale": IDENTITY,
    "attn_logit_softcapping": NOTHING,
    "embedding_length_per_layer_input": NOTHING,
    "embedding_scale": IDENTITY,
    "expert_chunk_feed_forward_length": NOTHING,
    "expert_count": NOTHING,
    "expert_gating_func": (0, 1),  # 1 is the softmax
    "expert_group_count": IDENTITY,
    "expert_group_scale": IDENTITY,
    "expert_group_used_count": IDENTITY,
    "expert_latent_length": NOTHING,
    "expert_weights_norm": (True,),
    "expert_weights_scale": IDENTITY,
    "experts_per_group": IDENTITY,
    "final_logit_softcapping": NOTHING,
    "interleave_moe_layer_step": IDENTITY,
    "kda.head_dim": NOTHING,
    "leading_dense_block_count": NOTHING,
    "logit_scale": IDENTITY,
    "moe_every_n_layers": IDENTITY,
    "moe_latent_size": NOTHING,
    "n_deepstack_layers": NOTHING,
    "residual_scale": IDENTITY,
    "rope.dimension_sections": NOTHING,
    "rope.scaling.alpha": IDENTITY,
    "rope.scaling.yarn_attn_factor": IDENTITY,
    "rope.scaling.yarn_ext_factor": (0, 0.0, -1, -1.0),  # -1 stands for the type's own value
    "rope.scaling.yarn_log_multiplier": NOTHING,
    "router_logit_softcapping": NOTHING,
    "ssm.dt_b_c_rms": NOTHING,
    "swiglu_clamp_exp": NOTHING,
    "swiglu_clamp_shexp": NOTHING,
    "swin_norm": NOTHING,
    "token_shift_count": NOTHING,
    "use_parallel_residual": NOTHING,
    "wkv.head_size": NOTHING,
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
