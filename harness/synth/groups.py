"""Parts of a specification that only some families have: experts, recurrent layers, latent rows,
windows of Gemma, factors of Granite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Routed feed-forward networks, ``used`` of ``count`` a token, each ``width`` wide.

    ``shared_width`` is that of the expert every token uses, 0 for none. With ``fused`` the gate and
    up matrices of an expert are one, ``ffn_gate_up_exps``. Every ``every``-th layer has experts,
    which llama4 may have in fewer than all."""

    count: int = 8
    used: int = 2
    width: int = 64
    shared_width: int = 0
    fused: bool = False
    every: int = 1


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Gated delta-net layers: all but every ``interval``-th.

    ``state`` is the size of a key and of a value. ``packing`` ``ssm_in`` stores the projections
    interleaved by key head, as early qwen3next files do. ``listed`` writes the list of recurrent
    layers to the metadata instead of their interval. In kimi-linear there are as many heads as
    attention has, and the last layer attends, too."""

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
    """Mamba-2 in all but every ``interval``-th layer, in falcon-h1 beside attention in all.

    The values of its ``heads`` are together ``inner`` wide, by default twice the residual stream;
    ``normed`` gives them a norm, which only falcon-h1 may lack."""

    interval: int = 3
    state: int = 32
    heads: int = 8
    groups: int = 1
    kernel: int = 4
    inner: int = 0
    normed: bool = True


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
    None if equal to the other layers'. ``softcap`` None omits the key. The rest is for gemma4, the
    next two for gemma3n as well: the last ``shared_kv_layers`` use no keys and values of their own;
    ``per_layer_width`` is that of the per-layer embeddings, 0 for none. ``values_from_keys`` omits
    the value projection of full layers."""

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


GEMMA4_ONLY = ("head_dim", "kv_heads", "values_from_keys", "output_scale")
LATER_GEMMAS = ("shared_kv_layers", "per_layer_width")
"""Settings of gemma3n and gemma4."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Granite's factors of embeddings, residuals and attention scores; logits are divided by
    ``logits``."""

    embedding: float = 12.0
    residual: float = 0.22
    attention: float = 0.015625
    logits: float = 2.0


class Shape(Protocol):
    """What rules read of the specification that has the part."""

    @property
    def architecture(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def layers(self) -> int: ...
    def is_windowed(self, block: int) -> bool: ...


def gemma_rules(spec: Shape, gemma: Gemma) -> Iterator[tuple[str, object, str]]:
    """Yield (field, whether its value is invalid, what it must be) for settings of Gemma."""
    architecture = spec.architecture
    if architecture != "gemma4":
        for name in (*GEMMA4_ONLY, *(() if architecture == "gemma3n" else LATER_GEMMAS)):
            yield f"gemma.{name}", getattr(gemma, name), f"left out for {architecture}"
    if architecture in ("gemma2", "gemma3n", "gemma4"):
        yield "gemma.window", gemma.window < 1, f"at least 1 for {architecture}"
    yield "gemma.window", gemma.window and architecture == "gemma", "0 for gemma"
    yield "gemma.head_dim", (gemma.head_dim or 0) % 2, "even"
    yield "gemma.kv_heads", spec.heads % (gemma.kv_heads or 1), f"a divisor of {spec.heads} heads"
    if gemma.shared_kv_layers:
        owned = spec.layers - gemma.shared_kv_layers
        donors = owned >= 2 and spec.is_windowed(owned - 2) and not spec.is_windowed(owned - 1)
        accepted = "such that the last two layers with keys are a windowed and a full one"
        yield "gemma.shared_kv_layers", not donors, accepted


def mamba_rules(spec: Shape, mamba: MambaSpec) -> Iterator[tuple[str, object, str]]:
    """The same for Mamba-2."""
    inner = mamba.inner or 2 * spec.hidden
    yield "mamba.heads", inner % mamba.heads, f"a divisor of {inner}"
    yield "mamba.groups", mamba.heads % mamba.groups, f"a divisor of {mamba.heads} heads"
    unnormed = not mamba.normed and spec.architecture != "falcon-h1"
    yield "mamba.normed", unnormed, f"True for {spec.architecture}"
