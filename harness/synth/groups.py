"""Parts of a specification that only some families have: experts, recurrent layers, latent rows,
windows of Gemma, factors of Granite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Routed feed-forward networks, ``used`` of ``count`` a token, each ``width`` wide.

    ``shared_width`` is that of the expert every token uses, 0 for none. With ``fused`` the gate and
    up matrices of an expert are one, ``ffn_gate_up_exps``."""

    count: int = 8
    used: int = 2
    width: int = 64
    shared_width: int = 0
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Gated delta-net layers: all but every ``interval``-th.

    ``state`` is the size of a key and of a value. ``packing`` ``ssm_in`` stores the projections
    interleaved by key head, as early qwen3next files do. ``listed`` writes the list of recurrent
    layers to the metadata instead of their interval."""

    interval: int = 4
    state: int = 32
    key_heads: int = 2
    value_heads: int = 4
    kernel: int = 4
    packing: str = "split"
    listed: bool = False

    @property
    def inner(self) -> int:
        """Width of the values."""
        return self.value_heads * self.state


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """LFM 2's convolutions of ``kernel`` tokens, in all but every ``interval``-th layer."""

    interval: int = 3
    kernel: int = 3


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba-2 in all but every ``interval``-th layer; the values of its ``heads`` are together
    twice as wide as the residual stream."""

    interval: int = 3
    state: int = 32
    heads: int = 8
    groups: int = 1
    kernel: int = 4


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention over latent rows of ``rank`` and ``rotated`` channels, in place of ``head_dim`` and
    ``kv_heads``.

    Heads have ``unrotated`` and ``rotated`` channels of queries, made from ``query_rank`` channels
    (0: from the residual stream), and ``value`` channels of values. With ``softmax`` a softmax that
    is not renormalized weights experts, as in DeepSeek V2; else they are chosen of ``groups_used``
    of their ``groups``."""

    rank: int = 64
    query_rank: int = 96
    unrotated: int = 32
    rotated: int = 32
    value: int = 64
    softmax: bool = False
    groups: int = 1
    groups_used: int = 1


@dataclass(frozen=True, slots=True)
class Gemma:
    """Settings of Gemma only. ``period`` - 1 of ``period`` layers see ``window`` positions.

    ``window`` 0 means that no layer has a window (gemma and gemma3 only). ``rope_base``,
    ``head_dim`` and ``kv_heads`` are those of layers with a window, the last two for gemma4 and
    None if equal to the other layers'. ``softcap`` None omits the key. The rest is for gemma4: the
    last ``shared_kv_layers`` have no keys and values; ``per_layer_width`` is that of the per-layer
    embeddings, 0 for none; ``values_from_keys`` omits the value projection of full layers."""

    window: int = 32
    period: int = 6
    rope_base: float = 10000.0
    softcap: float | None = None
    head_dim: int | None = None
    kv_heads: int | None = None
    values_from_keys: bool = False
    shared_kv_layers: int = 0
    per_layer_width: int = 0
    output_scale: bool = False


GEMMA4_ONLY = (
    *("head_dim", "kv_heads", "values_from_keys"),
    *("shared_kv_layers", "per_layer_width", "output_scale"),
)


@dataclass(frozen=True, slots=True)
class Scales:
    """Granite's factors of embeddings, residuals and attention scores; logits are divided by
    ``logits``."""

    embedding: float = 12.0
    residual: float = 0.22
    attention: float = 0.015625
    logits: float = 2.0
