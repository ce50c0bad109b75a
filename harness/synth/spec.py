"""What a synthetic model is: everything its bytes depend on, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from contract.dtypes import WEIGHT_DTYPES
from contract.errors import ConfigError

GENERATOR_VERSION = 1
"""Changes whenever the bytes of some specification change."""

DENSE = ("llama", "qwen2", "qwen3")
WITH_EXPERTS = ("qwen3moe", "qwen35moe", "qwen3next")
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
"""Delta-net layers, and full attention every few layers."""
GEMMAS = ("gemma3", "gemma4")
ARCHITECTURES = (*DENSE, "qwen3moe", *HYBRIDS, *GEMMAS)

MIXED_QUANT = "q4_k_m"
QUANTS = (*(dtype.name for dtype in WEIGHT_DTYPES), MIXED_QUANT)
ROPE_SCALINGS = ("none", "linear", "yarn")
SSM_PACKINGS = ("split", "ssm_in")

MIN_VOCAB = 300
"""256 bytes, the special tokens and a few merges fit in every vocabulary."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed feed-forward networks, ``used`` of ``count`` a token, each ``width`` wide.

    ``shared_width`` is that of the expert every token uses, 0 for none. With ``fused`` the gate and
    up matrices of an expert are one, ``ffn_gate_up_exps``.
    """

    count: int = 8
    used: int = 2
    width: int = 64
    shared_width: int = 0
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Gated delta-net layers: all but every ``interval``-th.

    ``state`` is the size of a key and of a value. ``packing`` ``ssm_in`` stores the projections
    interleaved by key head, as early qwen3next files do. ``listed`` names the recurrent layers one
    by one in the metadata instead of by their interval.
    """

    interval: int = 4
    state: int = 32
    key_heads: int = 2
    value_heads: int = 4
    kernel: int = 4
    packing: str = "split"
    listed: bool = False

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys, values."""
        return (2 * self.key_heads + self.value_heads) * self.state

    @property
    def inner(self) -> int:
        """Width of the values."""
        return self.value_heads * self.state


@dataclass(frozen=True, slots=True)
class Gemma:
    """What only Gemma has. ``period`` - 1 of ``period`` layers see ``window`` positions.

    ``window`` 0 means that no layer is windowed (gemma3 only). ``rope_base``, ``head_dim`` and
    ``kv_heads`` are those of windowed layers, the last two for gemma4 and None if like the others.
    ``softcap`` None leaves the key out. The rest is gemma4's: the last ``shared_kv_layers`` own no
    keys and values; ``per_layer_width`` is that of the per-layer embeddings, 0 for none;
    ``values_from_keys`` leaves the value projection of full layers out.
    """

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
    "head_dim",
    "kv_heads",
    "values_from_keys",
    "shared_kv_layers",
    "per_layer_width",
    "output_scale",
)


@dataclass(frozen=True, slots=True)
class SynthSpec:
    """A decoder with random weights.

    ``head_dim`` need not be ``hidden / heads``. ``feed_forward`` is one width or one per layer; the
    layers of a model with ``experts`` have none, except in gemma4, where both are added.
    ``qkv_bias`` None means what the architecture always has. ``quant`` is the type of every
    matrix, or the mixture ``q4_k_m``. ``rope_factor`` and ``rope_original_context`` matter with
    ``rope_scaling`` only. ``nextn_layers`` are prediction blocks after the last layer. With
    ``expand_to_f32`` the same weights are written dequantized. ``key_outliers``, if not 0, is the
    bias of two channels of every KV head, or their norm weight where keys are normed.
    """

    architecture: str = "llama"
    quant: str = "f32"
    seed: int = 0
    layers: int = 2
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int | tuple[int, ...] = 512
    vocab: int = 320
    context: int = 1024
    tied: bool = True
    qkv_bias: bool | None = None
    attention_output_bias: bool = False
    fused_qkv: bool = False
    rope_freqs: bool = False
    rope_base: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 4.0
    rope_original_context: int = 256
    expand_to_f32: bool = False
    nextn_layers: int = 0
    key_outliers: float = 0.0
    experts: Experts | None = None
    recurrent: Recurrent | None = None
    gemma: Gemma | None = None

    def validate(self) -> None:
        """Raise ConfigError naming the first field that cannot be."""
        for name, known in (
            ("architecture", ARCHITECTURES),
            ("quant", QUANTS),
            ("rope_scaling", ROPE_SCALINGS),
        ):
            if getattr(self, name) not in known:
                raise refused(name, getattr(self, name), f"one of {', '.join(known)}")
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "context"):
            if getattr(self, name) < 1:
                raise refused(name, getattr(self, name), "at least 1")
        if not 0 <= self.seed < 1 << 64:
            raise refused("seed", self.seed, "a 64-bit number")
        if self.heads % self.kv_heads:
            raise refused("kv_heads", self.kv_heads, f"a divisor of {self.heads} heads")
        if self.head_dim % 2:
            raise refused("head_dim", self.head_dim, "even")
        if self.vocab < MIN_VOCAB:
            raise refused("vocab", self.vocab, f"at least {MIN_VOCAB}")
        if self.rope_freqs and self.architecture != "llama":
            raise refused("rope_freqs", True, f"False for {self.architecture}")
        widths = self.feed_forward
        if isinstance(widths, tuple) and len(widths) != self.blocks:
            raise refused("feed_forward", widths, f"one width or {self.blocks} of them")
        if min(self.feed_forward_widths) < 1:
            raise refused("feed_forward", widths, "at least 1")
        _validate_groups(self)

    @property
    def blocks(self) -> int:
        """Layers, with prediction blocks."""
        return self.layers + self.nextn_layers

    @property
    def feed_forward_widths(self) -> tuple[int, ...]:
        """The feed-forward width of every block."""
        if isinstance(self.feed_forward, tuple):
            return self.feed_forward
        return (self.feed_forward,) * self.blocks

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.architecture == "qwen2" if self.qkv_bias is None else self.qkv_bias

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normed per head."""
        return self.architecture not in ("llama", "qwen2")

    @property
    def rope_dims(self) -> int:
        """Channels of a head that rotate."""
        return self.head_dim // 4 if self.recurrent else self.head_dim

    def is_recurrent(self, block: int) -> bool:
        """Whether this block is a delta-net layer."""
        if self.recurrent is None or block >= self.layers:
            return False
        return (block + 1) % self.recurrent.interval != 0

    def is_windowed(self, block: int) -> bool:
        """Whether this block attends to a window only."""
        if self.gemma is None or not self.gemma.window:
            return False
        return block % self.gemma.period < self.gemma.period - 1

    def head_dim_of(self, block: int) -> int:
        """The head size of this block."""
        if self.gemma is not None and self.is_windowed(block):
            return self.gemma.head_dim or self.head_dim
        return self.head_dim

    def kv_heads_of(self, block: int) -> int:
        """The number of key and value heads of this block."""
        if self.gemma is not None and self.is_windowed(block):
            return self.gemma.kv_heads or self.kv_heads
        return self.kv_heads

    def owns_kv(self, block: int) -> bool:
        """Whether this block computes keys and values of its own."""
        return self.gemma is None or block < self.layers - self.gemma.shared_kv_layers

    def owns_values(self, block: int) -> bool:
        """Whether this block has a projection for its values."""
        from_keys = self.gemma is not None and self.gemma.values_from_keys
        return self.owns_kv(block) and (self.is_windowed(block) or not from_keys)

    @property
    def name(self) -> str:
        """A short name for ``general.name`` and for messages."""
        return f"synthetic {self.architecture} {self.quant} seed {self.seed}"


GROUPS: Mapping[str, type] = {"experts": Experts, "recurrent": Recurrent, "gemma": Gemma}
"""Fields of a specification that are specifications themselves."""


def spec_of(values: Mapping[str, Any]) -> SynthSpec:
    """The specification with these fields; groups are mappings, tuples may be lists.

    Raises ConfigError for a field that does not exist and for values that cannot be.
    """
    given = dict(values)
    for name, kind in GROUPS.items():
        if isinstance(given.get(name), Mapping):
            _refuse_unknown(given[name], kind, f"{name}.")
            given[name] = kind(**given[name])
    _refuse_unknown(given, SynthSpec)
    if isinstance(given.get("feed_forward"), list):
        given["feed_forward"] = tuple(given["feed_forward"])
    spec = SynthSpec(**given)
    spec.validate()
    return spec


def fields_of(spec: SynthSpec) -> dict[str, Any]:
    """What ``spec_of`` makes the same specification from; only groups and counts that are there."""
    absent = dict.fromkeys(GROUPS) | {"nextn_layers": 0, "key_outliers": 0.0}
    return {k: v for k, v in asdict(spec).items() if k not in absent or v != absent[k]}


def refused(name: str, value: object, accepted: str) -> ConfigError:
    """The error for a field that cannot have this value."""
    return ConfigError(f"synthetic model: {name} is {value!r}, must be {accepted}")


def _refuse_unknown(values: Mapping[str, Any], kind: type, prefix: str = "") -> None:
    unknown = set(values) - {field.name for field in fields(kind)}
    if unknown:
        raise refused("field", prefix + sorted(unknown)[0], f"a field of {kind.__name__}")


def _validate_groups(spec: SynthSpec) -> None:
    """The groups an architecture needs are there, the others are not, and their numbers fit."""
    architecture = spec.architecture
    for name, needing, allowing in (
        ("experts", WITH_EXPERTS, (*WITH_EXPERTS, "llama", "gemma4")),
        ("recurrent", HYBRIDS, HYBRIDS),
        ("gemma", GEMMAS, GEMMAS),
    ):
        if getattr(spec, name) is None and architecture in needing:
            raise refused(name, None, f"given for {architecture}")
        if getattr(spec, name) is not None and architecture not in allowing:
            raise refused(name, getattr(spec, name), f"absent for {architecture}")
    if spec.nextn_layers and architecture not in HYBRIDS:
        raise refused("nextn_layers", spec.nextn_layers, f"0 for {architecture}")
    if spec.nextn_layers < 0:
        raise refused("nextn_layers", spec.nextn_layers, "at least 0")
    if spec.experts is not None:
        _validate_experts(spec, spec.experts)
    if spec.recurrent is not None:
        _validate_recurrent(spec, spec.recurrent)
    if spec.gemma is not None:
        _validate_gemma(spec, spec.gemma)


def _validate_experts(spec: SynthSpec, experts: Experts) -> None:
    for name in ("count", "used", "width"):
        if getattr(experts, name) < 1:
            raise refused(f"experts.{name}", getattr(experts, name), "at least 1")
    if experts.used > experts.count:
        raise refused("experts.used", experts.used, f"at most {experts.count}")
    if (experts.shared_width > 0) != (spec.architecture in HYBRIDS):
        accepted = "at least 1" if spec.architecture in HYBRIDS else "0"
        raise refused(
            "experts.shared_width", experts.shared_width, f"{accepted} for {spec.architecture}"
        )
    if experts.fused and spec.architecture in ("llama", "qwen3moe"):
        raise refused("experts.fused", True, f"False for {spec.architecture}")


def _validate_recurrent(spec: SynthSpec, recurrent: Recurrent) -> None:
    for name in ("interval", "state", "key_heads", "value_heads"):
        if getattr(recurrent, name) < 1:
            raise refused(f"recurrent.{name}", getattr(recurrent, name), "at least 1")
    if recurrent.kernel < 2:
        raise refused("recurrent.kernel", recurrent.kernel, "at least 2")
    if recurrent.value_heads % recurrent.key_heads:
        accepted = f"a multiple of {recurrent.key_heads} key heads"
        raise refused("recurrent.value_heads", recurrent.value_heads, accepted)
    packings = SSM_PACKINGS if spec.architecture == "qwen3next" else SSM_PACKINGS[:1]
    if recurrent.packing not in packings:
        raise refused("recurrent.packing", recurrent.packing, f"one of {', '.join(packings)}")
    if spec.head_dim % 8:
        raise refused("head_dim", spec.head_dim, "a multiple of 8, a quarter of it rotates")


def _validate_gemma(spec: SynthSpec, gemma: Gemma) -> None:
    if spec.architecture == "gemma3":
        for name in GEMMA4_ONLY:
            if getattr(gemma, name):
                raise refused(f"gemma.{name}", getattr(gemma, name), "left out for gemma3")
    elif gemma.window < 1:
        raise refused("gemma.window", gemma.window, "at least 1 for gemma4")
    for name in ("window", "shared_kv_layers", "per_layer_width"):
        if getattr(gemma, name) < 0:
            raise refused(f"gemma.{name}", getattr(gemma, name), "at least 0")
    if gemma.period < 1:
        raise refused("gemma.period", gemma.period, "at least 1")
    if gemma.head_dim is not None and (gemma.head_dim < 2 or gemma.head_dim % 2):
        raise refused("gemma.head_dim", gemma.head_dim, "even")
    if gemma.kv_heads is not None and (gemma.kv_heads < 1 or spec.heads % gemma.kv_heads):
        raise refused("gemma.kv_heads", gemma.kv_heads, f"a divisor of {spec.heads} heads")
    if gemma.shared_kv_layers:
        owned = spec.layers - gemma.shared_kv_layers
        donors = owned >= 2 and spec.is_windowed(owned - 2) and not spec.is_windowed(owned - 1)
        if not donors:
            accepted = "such that the last two layers with keys are a windowed and a full one"
            raise refused("gemma.shared_kv_layers", gemma.shared_kv_layers, accepted)
