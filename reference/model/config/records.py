"""The hyperparameters of a model as checked, immutable records."""

from __future__ import annotations

from contract.lazy_dataclass import dataclass
from reference.exact.rotary import RotaryScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary table and how its pairs lie.

    ``table`` names its buffer. ``dims`` channels of a head are rotated, in pairs (m, m + dims/2)
    if ``neox``, else (2m, 2m + 1). ``factors`` is the tensor that divides the frequencies, ""
    when there is none; with ``long_factors`` it serves contexts up to
    ``scaling.original_context`` and the other tensor longer ones.
    """

    table: str
    base: float
    dims: int
    neox: bool
    scaling: RotaryScaling
    factors: str = ""
    long_factors: str = ""

    @property
    def factor_tensors(self) -> tuple[str, ...]:
        """The tensors a file must hold for this table, of ``dims / 2`` elements each."""
        return tuple(name for name in (self.factors, self.long_factors) if name)

    def factors_for(self, context: int) -> str:
        """The tensor that an engine for ``context`` positions uses, or ""."""
        beyond = context > self.scaling.original_context
        return self.long_factors if self.long_factors and beyond else self.factors


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of ``count`` experts.

    A token uses ``used[layer]`` experts of width ``widths[layer]``, and one that every token
    uses of ``shared_width`` (0: there is none).
    """

    count: int
    used: tuple[int, ...]
    widths: tuple[int, ...]
    shared_width: int = 0


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of the gated delta-net layers, and which layers they are.

    ``key_heads`` divides ``value_heads``; a head of either kind has ``state_size`` elements.
    ``taps`` is the length of the convolution, the current token included.
    """

    taps: int
    state_size: int
    key_heads: int
    value_heads: int
    layers: tuple[bool, ...]

    @property
    def key_width(self) -> int:
        """Elements of the keys, and of the queries, of a token."""
        return self.key_heads * self.state_size

    @property
    def value_width(self) -> int:
        """Elements of the values of a token, and of the output gate."""
        return self.value_heads * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Decoder hyperparameters. Tuples have one entry per layer.

    ``layers`` are those a token passes through; ``blocks`` counts the drafting blocks behind them
    too. ``windows`` are positions attended, 0 for all. ``kv_layers`` is the layer whose keys and
    values a layer reads. ``feed_forward`` is the width of the dense block, 0 where a file gives
    none. ``logit_cap`` 0 is off. ``per_layer_width`` is that of the embeddings every layer of a
    Gemma 4 adds, 0 when it has none.
    """

    architecture: str
    name: str
    layers: int
    blocks: int
    hidden: int
    vocab: int
    context: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    feed_forward: tuple[int, ...]
    rms_eps: float
    ropes: tuple[Rope, ...]
    windows: tuple[int, ...]
    attention_scales: tuple[float, ...]
    kv_layers: tuple[int, ...]
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    embedding_scale: float = 1.0
    logit_cap: float = 0.0
    per_layer_width: int = 0

    def is_recurrent(self, layer: int) -> bool:
        """Whether ``layer`` is a delta net instead of attention."""
        return self.delta_net is not None and self.delta_net.layers[layer]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend."""
        return tuple(n for n in range(self.layers) if not self.is_recurrent(n))
