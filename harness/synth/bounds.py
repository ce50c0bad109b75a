"""The bounds of the counts in a specification of a synthetic model."""

from __future__ import annotations

from collections.abc import Mapping

MINIMUM: Mapping[str, int] = {
    "vocab": 300,  # 256 bytes, the special tokens and a few merges fit in every vocabulary
    "layers": 1, "hidden": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "context": 1,
    "seed": 0, "nextn_layers": 0, "experts.count": 1, "experts.used": 1, "experts.width": 1,
    "experts.every": 1,
    "recurrent.interval": 1, "recurrent.state": 1, "recurrent.key_heads": 1,
    "recurrent.value_heads": 1, "recurrent.kernel": 2, "short_conv.interval": 1,
    "short_conv.kernel": 2, "mamba.interval": 1, "mamba.state": 1, "mamba.heads": 1,
    "mamba.groups": 1, "mamba.kernel": 2, "mamba.inner": 0,
    "latent.rank": 1, "latent.query_rank": 0,
    "latent.unrotated": 1, "latent.rotated": 2, "latent.value": 1, "latent.groups": 1,
    "latent.groups_used": 1, "gemma.window": 0, "gemma.period": 1,
    "gemma.kv_heads": 1, "gemma.head_dim": 2, "gemma.shared_kv_layers": 0,
    "gemma.per_layer_width": 0, "window": 0, "leading_dense": 0, "expert_groups": 1,
}  # fmt: skip
"""The smallest value of every field that is a count."""
MAXIMUM = dict.fromkeys(MINIMUM, (1 << 31) - 1)
MAXIMUM |= {"layers": 1 << 12, "vocab": 1 << 24, "seed": (1 << 64) - 1}
