"""What a synthetic model is: everything its bytes depend on, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from contract.dtypes import WEIGHT_DTYPES
from contract.errors import ConfigError

GENERATOR_VERSION = 1
"""Changes whenever the bytes of some specification change."""

ARCHITECTURES = ("llama", "qwen2", "qwen3")
MIXED_QUANT = "q4_k_m"
QUANTS = (*(dtype.name for dtype in WEIGHT_DTYPES), MIXED_QUANT)
ROPE_SCALINGS = ("none", "linear", "yarn")

MIN_VOCAB = 300
"""256 bytes, the special tokens and a few merges fit in every vocabulary."""


@dataclass(frozen=True, slots=True)
class SynthSpec:
    """A dense decoder with random weights.

    ``head_dim`` need not be ``hidden / heads``. ``feed_forward`` is one width or one per layer.
    ``qkv_bias`` None means what the architecture always has. ``quant`` is the type of every
    matrix, or the mixture ``q4_k_m``. ``rope_factor`` and ``rope_original_context`` matter with
    ``rope_scaling`` only. With ``expand_to_f32`` the same weights are written dequantized.
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

    def validate(self) -> None:
        """Raise ConfigError naming the first field that cannot be."""
        for name, known in (
            ("architecture", ARCHITECTURES),
            ("quant", QUANTS),
            ("rope_scaling", ROPE_SCALINGS),
        ):
            if getattr(self, name) not in known:
                raise _refused(name, getattr(self, name), f"one of {', '.join(known)}")
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "context"):
            if getattr(self, name) < 1:
                raise _refused(name, getattr(self, name), "at least 1")
        if not 0 <= self.seed < 1 << 64:
            raise _refused("seed", self.seed, "a 64-bit number")
        if self.heads % self.kv_heads:
            raise _refused("kv_heads", self.kv_heads, f"a divisor of {self.heads} heads")
        if self.head_dim % 2:
            raise _refused("head_dim", self.head_dim, "even")
        if self.vocab < MIN_VOCAB:
            raise _refused("vocab", self.vocab, f"at least {MIN_VOCAB}")
        widths = self.feed_forward
        if isinstance(widths, tuple) and len(widths) != self.layers:
            raise _refused("feed_forward", widths, f"one width or {self.layers} of them")
        if min(self.feed_forward_widths) < 1:
            raise _refused("feed_forward", widths, "at least 1")

    @property
    def feed_forward_widths(self) -> tuple[int, ...]:
        """The feed-forward width of every layer."""
        if isinstance(self.feed_forward, tuple):
            return self.feed_forward
        return (self.feed_forward,) * self.layers

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.architecture == "qwen2" if self.qkv_bias is None else self.qkv_bias

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normed per head."""
        return self.architecture == "qwen3"

    @property
    def name(self) -> str:
        """A short name for ``general.name`` and for messages."""
        return f"synthetic {self.architecture} {self.quant} seed {self.seed}"


def _refused(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"synthetic model: {name} is {value!r}, must be {accepted}")


_QWEN3 = {"head_dim": 128, "kv_heads": 8, "vocab": 151936, "context": 40960, "rope_base": 1e6}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},
    "small": {
        "layers": 4,
        "hidden": 512,
        "heads": 8,
        "kv_heads": 4,
        "feed_forward": 1536,
        "vocab": 4096,
        "context": 4096,
    },
    "0.6b": {"layers": 28, "hidden": 1024, "heads": 16, "feed_forward": 3072, **_QWEN3},
    "1.7b": {"layers": 28, "hidden": 2048, "heads": 16, "feed_forward": 6144, **_QWEN3},
    "8b": {
        "layers": 36,
        "hidden": 4096,
        "heads": 32,
        "feed_forward": 12288,
        "tied": False,
        **_QWEN3,
    },
}
"""Named sizes; the large ones are those of dense Qwen 3."""


def sized_spec(size: str, **overrides: Any) -> SynthSpec:
    """The specification of a named size with some fields changed. Raises ConfigError."""
    if size not in SIZES:
        raise _refused("size", size, f"one of {', '.join(SIZES)}")
    unknown = set(overrides) - {field.name for field in fields(SynthSpec)}
    if unknown:
        raise _refused("field", sorted(unknown)[0], "a field of SynthSpec")
    spec = SynthSpec(**{**SIZES[size], **overrides})
    spec.validate()
    return spec
