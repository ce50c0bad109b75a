"""Immutable records of a model's checked hyperparameters."""

from __future__ import annotations

from contract.lazy_dataclass import dataclass
from reference.exact.rotary import RotaryScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary table and the layout of its pairs.

    ``table`` is the name of its buffer. ``dims`` channels of a head are rotated, in pairs (m, m +
    dims/2) if ``neox``, else (2m, 2m + 1). ``factors`` is the tensor whose values divide the
    frequencies, "" for none. If there is a tensor ``long_factors``, ``factors`` serves contexts up
    to ``scaling.original_context`` and ``long_factors`` longer ones. Unless it ``rotates``, a table
    has the angle 0 everywhere."""

    table: str
    base: float
    dims: int
    neox: bool
    scaling: RotaryScaling
    factors: str = ""
    long_factors: str = ""
    rotates: bool = True

    @property
    def factor_tensors(self) -> tuple[str, ...]:
        """The tensors this table needs from the file, of ``dims / 2`` elements each."""
        return tuple(name for name in (self.factors, self.long_factors) if name)

    def factors_for(self, context: int) -> str:
        """The tensor of frequency divisors for a context of ``context`` positions, or ""."""
        beyond = context > self.scaling.original_context
        return self.long_factors if self.long_factors and beyond else self.factors


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """The growth of queries with their position: 1 + factor ln(1 + floor((position + offset) /
    length)); with ``unrotated`` in layers that do not rotate alone."""

    length: int
    factor: float
    offset: int = 0
    unrotated: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of ``count`` experts.

    A token uses ``used[layer]`` experts of width ``widths[layer]``, and additionally one shared
    expert of ``shared_width``, which is 0 when there is none; ``shared_gate`` says whether a gate
    weights the shared expert. With ``biases`` router and experts may have biases. With
    ``choice_bias`` experts are weighted by a sigmoid, or with ``softmax`` by one as without a bias,
    and a bias is added to choose them; with ``sigmoid`` they are weighted by one without a bias.
    ``weight_scale`` multiplies the weights of chosen experts, which are divided by their sum if
    ``renormalize``; with ``weighs_inputs`` a weight multiplies what its expert reads. Unless
    ``gated`` an expert has no gate, but squares what is positive. The first ``leading_dense``
    layers, and all but every ``every``-th, have a dense block instead. Experts are of ``groups``,
    of which a token chooses ``groups_used`` first."""

    count: int
    used: tuple[int, ...]
    widths: tuple[int, ...]
    shared_width: int = 0
    shared_gate: bool = True
    biases: bool = False
    choice_bias: bool = False
    softmax: bool = False
    renormalize: bool = True
    gated: bool = True
    weight_scale: float = 1.0
    leading_dense: int = 0
    groups: int = 1
    groups_used: int = 1
    every: int = 1
    sigmoid: bool = False
    weighs_inputs: bool = False

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense block instead."""
        return layer < self.leading_dense or (layer + 1) % self.every != 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of attention over latent rows, which all heads read.

    A row is ``rank`` channels, from which a matrix of each head makes keys and values, and the
    channels that rotate. Of a query ``unrotated`` channels meet such keys; a head has ``value``
    channels of values. Queries come from ``query_rank`` channels, or if that is 0 from the residual
    stream."""

    rank: int
    query_rank: int
    unrotated: int
    value: int


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of the gated delta-net layers; ``layers`` tells which layers are recurrent.

    ``key_heads`` divides ``value_heads``; a head of either kind has ``state_size`` elements.
    ``taps`` is the length of the convolution, the current token included."""

    taps: int
    state_size: int
    key_heads: int
    value_heads: int
    layers: tuple[bool, ...]

    @property
    def key_width(self) -> int:
        """Elements of a token's keys, and of its queries."""
        return self.key_heads * self.state_size

    @property
    def value_width(self) -> int:
        """Elements of a token's values, and of its output gate."""
        return self.value_heads * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Sizes of the gated short-convolution layers; ``layers`` tells which layers are of this kind.

    ``taps`` is the length of the convolution, the current token included."""

    taps: int
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Mamba:
    """Sizes of Mamba-2 layers; ``layers`` tells which layers are of this kind.

    Every head has ``head_dim`` values, each with ``state_size`` elements of state; consecutive
    heads of a group share what is written and read. ``taps`` is the length of the convolution, the
    current token included. With ``attends`` these layers attend as well, to the same input."""

    taps: int
    state_size: int
    heads: int
    head_dim: int
    groups: int
    layers: tuple[bool, ...]
    attends: bool = False

    @property
    def inner(self) -> int:
        """Elements of a token's values, and of its gate."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, then what is written and read of every group."""
        return self.inner + 2 * self.groups * self.state_size


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Decoder hyperparameters. Tuples have one entry per layer.

    ``layers`` is the number of layers a token passes through; ``blocks`` also counts the
    drafting blocks after them. ``windows`` are positions attended to, 0 for all, below 0 those
    of chunks that begin at multiples of as many. ``kv_layers`` is the layer whose keys and
    values a layer reads. ``feed_forward`` is the width of the dense block, 0 when the file gives
    none. ``residual_scale`` multiplies what a block adds to the residual stream, ``logit_scale``
    every logit. ``logit_cap`` bounds logits, ``score_cap`` scores; 0 is off. ``per_layer_width``
    is the width of Gemma 4's per-layer embeddings, 0 without them. With ``sinks`` layers may
    have attention sinks. With ``unit_norms`` queries and keys of layers that rotate are normed
    without a weight. ``xielu`` are the parameters of xIELU of layers without gates.
    ``query_growth`` multiplies rotated queries; None leaves them as they are. With ``parallel`` the
    feed forward reads the layer's input as attention does. ``bare_norms`` over the residual width
    have no weights. Gates of Gemma 3n's feed forwards lose what lies below ``sparsity`` standard
    deviations above their mean; minus infinity is off. With ``positions`` the file has an embedding
    of every position."""

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
    short_conv: ShortConv | None = None
    mamba: Mamba | None = None
    latent: Latent | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    score_cap: float = 0.0
    per_layer_width: int = 0
    sinks: bool = False
    unit_norms: bool = False
    xielu: tuple[tuple[float, ...], ...] = ()
    query_growth: QueryGrowth | None = None
    parallel: bool = False
    bare_norms: bool = False
    sparsity: tuple[float, ...] = ()
    positions: bool = False

    def is_recurrent(self, layer: int) -> bool:
        """Whether ``layer`` keeps a recurrent state, mostly instead of attending."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    @property
    def recurrent(self) -> DeltaNet | ShortConv | Mamba | None:
        """The sizes of the recurrent layers; None where every layer attends."""
        return self.delta_net or self.short_conv or self.mamba

    @property
    def draft_blocks(self) -> int:
        """Blocks after the last layer that predict the token after the next one."""
        return self.blocks - self.layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        both = self.mamba is not None and self.mamba.attends
        layers = (n for n in range(self.layers) if both or not self.is_recurrent(n))
        return tuple(n for n in layers if self.kv_heads[n])
