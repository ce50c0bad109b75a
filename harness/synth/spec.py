"""The specification of a synthetic model: everything its bytes depend on, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from contract.dtypes import WEIGHT_DTYPES
from contract.errors import ConfigError
from harness.synth.architectures import (
    ARCHITECTURES,
    BIASED,
    COHERES,
    CONVOLVING,
    COUNTED,
    DIVIDED,
    FALCON_H1,
    GEMMAS,
    GRANITES,
    HALF_ROTATES,
    HEAD_NORMED,
    HYBRIDS,
    KIMI_LINEAR,
    LATENTS,
    LEADING,
    LLAMA4,
    MAMBA2,
    MAMBAS,
    MAYBE_EXPERTS,
    NEMOTRONS,
    QUARTER_ROTATES,
    WITH_DRAFT_BLOCKS,
    WITH_EXPERTS,
)
from harness.synth.bounds import MAXIMUM, MINIMUM
from harness.synth.groups import (
    ExpertSpec,
    Gemma,
    LatentSpec,
    MambaSpec,
    Recurrent,
    Scales,
    ShortConvSpec,
    gemma_rules,
    mamba_rules,
)

GENERATOR_VERSION = 1
"""Raised whenever the bytes of some specification change."""

MIXED_QUANT = "q4_k_m"
EXPERTS_QUANT = "mxfp4_moe"
"""Experts in MXFP4, all other matrices in Q8_0."""
QUANTS = (*(dtype.name for dtype in WEIGHT_DTYPES), MIXED_QUANT, EXPERTS_QUANT)
ROPE_SCALINGS = ("none", "linear", "yarn")
SSM_PACKINGS = ("split", "ssm_in")


@dataclass(frozen=True, slots=True)
class SynthSpec:
    """A decoder with random weights.

    ``head_dim`` need not be ``hidden / heads``. ``feed_forward`` is one width or one per layer;
    layers of a model with ``experts`` have none, except in gemma4, where both are added.
    ``qkv_bias`` None means the architecture's default. ``quant`` is the type of every matrix, or
    the mixture ``q4_k_m`` or ``mxfp4_moe``. ``rope_factor`` and ``rope_original_context`` matter
    only with ``rope_scaling``. ``query_growth`` is a key of mistral3, ``yarn_log_multiplier`` of
    deepseek2, too. The first ``leading_dense`` layers of LEADING have no experts. With
    ``head_norms`` heads of HEAD_NORMED are normed. ``parallel`` blocks of stablelm and gptneox read
    the same input, those of falcon by norms of their own. ``long_rope`` gives phi3 two tensors of
    frequency divisors, for contexts up to ``rope_original_context`` and beyond. ``window`` limits
    attention, in all layers of phi3, in every second of gpt-oss, in all but every fourth of others;
    0 is off. Of ``expert_groups`` of bailingmoe2 a token chooses half.
    ``nextn_layers`` are prediction blocks after the last layer, with ``mtp_agreement`` right in so
    many cases: 0 to 1, None for random ones; ``eagle_agreement`` is that of a head's file,
    ``draft_agreement`` that of this model if it drafts for another with one of these. With
    ``expand_to_f32`` the same weights are written dequantized. ``key_outliers``, if not 0, is the
    bias of two channels of every KV head, or their norm weight where keys are normed."""

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
    query_growth: float = 0.0
    yarn_log_multiplier: float = 0.0
    long_rope: bool = False
    window: int = 0
    expand_to_f32: bool = False
    nextn_layers: int = 0
    key_outliers: float = 0.0
    mtp_agreement: float | None = None
    eagle_agreement: float | None = None
    draft_agreement: float | None = None
    leading_dense: int = 0
    expert_groups: int = 1
    head_norms: bool = False
    parallel: bool = False
    logit_scale: float = 1.0
    experts: ExpertSpec | None = None
    recurrent: Recurrent | None = None
    short_conv: ShortConvSpec | None = None
    mamba: MambaSpec | None = None
    latent: LatentSpec | None = None
    gemma: Gemma | None = None
    scales: Scales | None = None

    def validate(self) -> None:
        """Raise ConfigError naming the first field with an invalid value."""
        for name, broken, accepted in _rules(self):
            if broken:
                raise refused(name, _value(self, name), accepted)

    @property
    def blocks(self) -> int:
        """The number of layers and prediction blocks."""
        return self.layers + self.nextn_layers

    @property
    def planted(self) -> bool:
        """Whether the likeliest token after each token is known."""
        return bool(self.agreements)

    @property
    def agreements(self) -> tuple[float, ...]:
        """How often the drafter of a planted model is right; nothing for another model."""
        given = (getattr(self, name) for name in AGREEMENTS)
        return tuple(agreement for agreement in given if agreement is not None)

    @property
    def feed_forward_widths(self) -> tuple[int, ...]:
        """The feed-forward width of every block."""
        if isinstance(self.feed_forward, tuple):
            return self.feed_forward
        return (self.feed_forward,) * self.blocks

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        biased = (
            *("qwen", "qwen2", "qwen2moe", "qwen2vl", "gpt-oss", "glm4moe", "seed_oss"),
            *("pangu-embedded", *BIASED),
        )
        return self.architecture in biased if self.qkv_bias is None else self.qkv_bias

    @property
    def has_sinks(self) -> bool:
        """Whether attention has sinks, and every projection of experts a bias."""
        return self.architecture == "gpt-oss"

    @property
    def rope_dims(self) -> int:
        """The number of rotated channels of a head."""
        if self.latent is not None:
            return self.latent.rotated
        if self.architecture in HALF_ROTATES:
            return self.head_dim // 2
        quarter = self.recurrent or self.architecture in QUARTER_ROTATES
        return self.head_dim // 4 if quarter else self.head_dim

    def is_recurrent(self, block: int) -> bool:
        """Whether this block keeps a recurrent state instead of attending."""
        kind = self.recurrent or self.short_conv or self.mamba
        if kind is None or block >= self.layers or self.architecture == FALCON_H1:
            return False
        if self.architecture == MAMBA2:
            return True
        if self.architecture == KIMI_LINEAR and block == self.layers - 1:
            return False
        return (block + 1) % kind.interval != 0 and not self.is_feed_forward_only(block)

    def is_feed_forward_only(self, block: int) -> bool:
        """Whether this block is a feed forward and nothing else: every second one of Nemotron's
        that does not attend."""
        mamba = self.mamba if self.architecture in NEMOTRONS else None
        return mamba is not None and block % 2 == 1 and (block + 1) % mamba.interval != 0

    def is_windowed(self, block: int) -> bool:
        """Whether this block attends only to a window."""
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
        """Whether this block computes its own keys and values."""
        return self.gemma is None or block < self.layers - self.gemma.shared_kv_layers

    def owns_values(self, block: int) -> bool:
        """Whether this block has a projection for its values."""
        from_keys = self.gemma is not None and self.gemma.values_from_keys
        return self.owns_kv(block) and (self.is_windowed(block) or not from_keys)

    @property
    def name(self) -> str:
        """A short name for ``general.name`` and for messages."""
        # llama.cpp takes a name with "phi3" in it for a file that has Phi 3's special tokens.
        family = self.architecture.replace("phi3", "phi 3")
        return f"synthetic {family} {self.quant} seed {self.seed}"


AGREEMENTS = ("mtp_agreement", "eagle_agreement", "draft_agreement")
GROUPS: Mapping[str, type] = {
    "experts": ExpertSpec,
    "recurrent": Recurrent,
    "short_conv": ShortConvSpec,
    "mamba": MambaSpec,
    "latent": LatentSpec,
    "gemma": Gemma,
    "scales": Scales,
}
"""Fields of a specification that are specifications themselves, with their types."""
LATER = {"experts": {"every": 1}, "mamba": {"inner": 0, "normed": True}}
"""Fields of groups that came later, with the values that are left out."""


def spec_of(values: Mapping[str, Any]) -> SynthSpec:
    """The specification with these fields; groups are mappings, tuples may be lists. Raises
    ConfigError for an unknown field and for invalid values."""
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
    """The fields from which ``spec_of`` makes the same specification, without absent groups and
    counts."""
    absent = dict.fromkeys(GROUPS) | {
        "nextn_layers": 0, "mtp_agreement": None, "eagle_agreement": None, "draft_agreement": None,
        "key_outliers": 0.0, "long_rope": False, "window": 0, "query_growth": 0.0,
        "yarn_log_multiplier": 0.0, "leading_dense": 0, "logit_scale": 1.0, "head_norms": False,
        "expert_groups": 1, "parallel": False,
    }  # fmt: skip
    given = asdict(spec)
    for group, later in LATER.items():
        if given[group] is not None:
            kept = (name for name in given[group] if given[group][name] != later.get(name, ...))
            given[group] = {name: given[group][name] for name in tuple(kept)}
    return {k: v for k, v in given.items() if k not in absent or v != absent[k]}


def refused(name: str, value: object, accepted: str) -> ConfigError:
    """The error for a field with an invalid value."""
    return ConfigError(f"synthetic model: {name} is {value!r}, must be {accepted}")


def _refuse_unknown(values: Mapping[str, Any], kind: type, prefix: str = "") -> None:
    unknown = set(values) - {field.name for field in fields(kind)}
    if unknown:
        raise refused("field", prefix + sorted(unknown)[0], f"a field of {kind.__name__}")


def _value(spec: SynthSpec, name: str) -> Any:
    """A field by name, or ``group.field`` of a group; None when there is no such group."""
    value: Any = spec
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    return value


def _rules(spec: SynthSpec) -> Iterator[tuple[str, object, str]]:
    """Yield (field, whether its value is invalid, what it must be); later rules rely on earlier
    ones."""
    architecture = spec.architecture
    values = {"architecture": ARCHITECTURES, "quant": QUANTS, "rope_scaling": ROPE_SCALINGS}
    for name, known in values.items():
        yield name, getattr(spec, name) not in known, f"one of {', '.join(known)}"
    for name, needing, allowing in (
        ("experts", WITH_EXPERTS, (*WITH_EXPERTS, *MAYBE_EXPERTS)),
        ("recurrent", (*HYBRIDS, KIMI_LINEAR), (*HYBRIDS, KIMI_LINEAR)),
        ("short_conv", CONVOLVING, CONVOLVING),
        ("mamba", MAMBAS, MAMBAS),
        ("latent", LATENTS, LATENTS),
        ("gemma", GEMMAS, GEMMAS),
        ("scales", GRANITES, GRANITES),
    ):
        missing = getattr(spec, name) is None
        yield name, missing and architecture in needing, f"given for {architecture}"
        yield name, not missing and architecture not in allowing, f"absent for {architecture}"
    for name, least in MINIMUM.items():
        if (value := _value(spec, name)) is not None:
            yield name, value < least, f"at least {least}"
            yield name, value > MAXIMUM[name], f"at most {MAXIMUM[name]}"
    yield "kv_heads", spec.heads % spec.kv_heads, f"a divisor of {spec.heads} heads"
    yield "head_dim", spec.head_dim % 2, "even"
    yield from _own_rules(spec, architecture)
    drafts = architecture in WITH_DRAFT_BLOCKS
    yield "nextn_layers", spec.nextn_layers and not drafts, f"0 for {architecture}"
    given = [name for name in AGREEMENTS if getattr(spec, name) is not None]
    for name in given:
        yield name, not 0 <= getattr(spec, name) <= 1, "0 to 1"
        yield name, name != given[0], f"absent with {given[0]}"
        yield "tied", spec.tied, f"False with {name}"
    without_block = spec.mtp_agreement is not None and spec.nextn_layers < 1
    yield "nextn_layers", without_block, "at least 1 with mtp_agreement"
    widths = spec.feed_forward_widths
    yield "feed_forward", len(widths) != spec.blocks, f"one width or {spec.blocks} of them"
    yield "feed_forward", min(widths) < 1, "at least 1"
    if (experts := spec.experts) is not None:
        yield from _expert_rules(architecture, experts)
    if (recurrent := spec.recurrent) is not None:
        broken = recurrent.value_heads % recurrent.key_heads
        yield "recurrent.value_heads", broken, f"a multiple of {recurrent.key_heads} key heads"
        packings = SSM_PACKINGS if architecture == "qwen3next" else SSM_PACKINGS[:1]
        broken = recurrent.packing not in packings
        yield "recurrent.packing", broken, f"one of {', '.join(packings)}"
        yield "head_dim", spec.head_dim % 8, "a multiple of 8, a quarter of it rotates"
        listed = recurrent.listed and architecture == KIMI_LINEAR
        yield "recurrent.listed", listed, f"False for {architecture}"
    if (mamba := spec.mamba) is not None:
        yield from mamba_rules(spec, mamba)
    if spec.latent is not None:
        yield "latent.rotated", spec.latent.rotated % 2, "even"
    if (gemma := spec.gemma) is not None:
        yield from gemma_rules(spec, gemma)


def _own_rules(spec: SynthSpec, architecture: str) -> Iterator[tuple[str, object, str]]:
    """The rules of fields that few architectures have."""
    for name, having in (
        ("query_growth", ("mistral3", LLAMA4)),
        ("yarn_log_multiplier", ("mistral3", *LATENTS)),
    ):
        value = getattr(spec, name)
        yield name, value and architecture not in having, f"0 for {architecture}"
        yield name, value < 0, "at least 0"
    leading = spec.layers if architecture in LEADING else 0
    yield "leading_dense", spec.leading_dense > leading, f"at most {leading} for {architecture}"
    grouped = spec.expert_groups > 1 and architecture != "bailingmoe2"
    yield "expert_groups", grouped, f"1 for {architecture}"
    yield "long_rope", spec.long_rope and architecture != "phi3", f"False for {architecture}"
    needed = architecture in ("gpt-oss", "cohere2", "exaone-moe", "afmoe")
    windowed = needed or architecture in ("phi3", "olmo2", "exaone4", LLAMA4, "mellum")
    windowed |= architecture == "smallthinker"
    yield "window", spec.window and not windowed, f"0 for {architecture}"
    yield "window", not spec.window and needed, f"at least 1 for {architecture}"
    scaled = spec.logit_scale != 1.0 and architecture not in COHERES
    yield "logit_scale", scaled, f"1.0 for {architecture}"
    yield "logit_scale", spec.logit_scale <= 0, "above 0"
    unnormed = architecture not in HEAD_NORMED
    yield "head_norms", spec.head_norms and unnormed, f"False for {architecture}"
    beside = architecture in ("stablelm", "gptneox", "falcon")
    yield "parallel", spec.parallel and not beside, f"False for {architecture}"
    whole = architecture in ("olmo2", "olmoe", "minimax-m2", "afmoe", *LATENTS)
    whole |= spec.head_norms and architecture != "glm4moe"
    yield "fused_qkv", spec.fused_qkv and whole, f"False for {architecture}"
    divided = spec.rope_freqs and architecture not in DIVIDED
    yield "rope_freqs", divided, f"False for {architecture}"


def _expert_rules(architecture: str, experts: ExpertSpec) -> Iterator[tuple[str, object, str]]:
    yield "experts.used", experts.used > experts.count, f"at most {experts.count}"
    shared, needed = experts.shared_width > 0, architecture in (*HYBRIDS, "qwen2moe")
    needed |= architecture in ("nemotron_h_moe", "hunyuan-moe", LLAMA4)
    either = architecture in ("granitehybrid", "granitemoe", "ernie4_5-moe", "hy_v3", *COUNTED)
    accepted = f"{'at least 1' if needed else '0'} for {architecture}"
    yield "experts.shared_width", shared != needed and not either, accepted
    uneven = architecture in COUNTED and experts.shared_width % experts.width
    yield "experts.shared_width", uneven, f"a multiple of {experts.width} for {architecture}"
    yield "experts.every", experts.every > 1 and architecture != LLAMA4, f"1 for {architecture}"
    unfused = experts.fused and architecture not in (*HYBRIDS, "gemma4")
    yield "experts.fused", unfused, f"False for {architecture}"
