"""Reads the metadata keys of rotary embeddings: base, rotated channels, scaling, frequency
divisors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.exact.rotary import RotaryScaling
from reference.model.config.keys import MAX_CONTEXT, MAX_WIDTH, Keys
from reference.model.config.records import Rope

FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
TABLE = "constant.rope_table"
SLIDING_TABLE = "constant.rope_table_sliding"
UNROTATED_TABLE = "constant.rope_table_unrotated"
GROWTH_TABLE = "constant.query_growth"
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
SECTIONS = "rope.dimension_sections"
DEFAULT_BASE = 10000.0
YARN_KEYS = ("yarn_ext_factor", "yarn_beta_fast", "yarn_beta_slow")
"""Keys ``rope.scaling.*`` that only YaRN has."""


def read_rope(keys: Keys, head_dim: int, context: int) -> Rope:
    """The rotation of layers with full attention."""
    dims = rotary_dims(keys, "rope.dimension_count", head_dim, head_dim)
    return Rope(
        table=TABLE,
        base=keys.positive("rope.freq_base", DEFAULT_BASE),
        dims=dims,
        neox=True,
        scaling=_scaling(keys, context, ("none", "linear", "yarn")),
    )


def read_divided_rope(keys: Keys, head_dim: int, context: int) -> Rope:
    """A rotation of halves, whose frequencies have divisors if the file has them."""
    rope = read_rope(keys, head_dim, context)
    return replace(rope, factors=FACTORS if FACTORS in keys.file.tensors else "")


def read_llama_rope(keys: Keys, head_dim: int, context: int) -> Rope:
    """Llama's rotation: whole heads in interleaved pairs.

    With ``longrope`` the file has two tensors of frequency divisors, for short and long contexts.
    """
    rope = read_interleaved_rope(keys, head_dim, context)
    if rope.dims != head_dim:
        raise keys.error(
            "rope.dimension_count", f"is {rope.dims}, must be the head size {head_dim}"
        )
    return rope


def read_interleaved_rope(keys: Keys, head_dim: int, context: int) -> Rope:
    """A rotation of the first channels of a head, in interleaved pairs."""
    long = keys.file.get(keys.key("rope.scaling.type"), str, "") == "longrope"
    factors = FACTORS if FACTORS in keys.file.tensors else ""
    return Rope(
        table=TABLE,
        base=keys.positive("rope.freq_base", DEFAULT_BASE),
        dims=rotary_dims(keys, "rope.dimension_count", head_dim, head_dim),
        neox=False,
        scaling=_scaling(keys, context, ("none", "linear", "yarn", "longrope")),
        factors=SHORT_FACTORS if long else factors,
        long_factors=LONG_FACTORS if long else "",
    )


def read_mistral_rope(keys: Keys, head_dim: int, context: int) -> Rope:
    """Llama's rotation, where YaRN may divide sine and cosine by a growth of its own."""
    rope = read_llama_rope(keys, head_dim, context)
    if not rope.scaling.yarn:
        return rope
    multiplier = keys.positive(LOG_MULTIPLIER, 0.0, allow_zero=True)
    return replace(rope, scaling=replace(rope.scaling, log_multiplier=multiplier))


def read_phi_rope(keys: Keys, head_dim: int, context: int) -> Rope:
    """Phi's rotation: halves, with two tensors of frequency divisors if the file has them."""
    if SHORT_FACTORS not in keys.file.tensors:
        return read_rope(keys, head_dim, context)
    return Rope(
        table=TABLE,
        base=keys.positive("rope.freq_base", DEFAULT_BASE),
        dims=rotary_dims(keys, "rope.dimension_count", head_dim, head_dim),
        neox=True,
        scaling=_scaling(keys, context, ("longrope",), "longrope"),
        factors=SHORT_FACTORS,
        long_factors=LONG_FACTORS,
    )


def unrotated(rope: Rope) -> Rope:
    """A table of angle 0 for layers that do not rotate, as wide as ``rope``."""
    return Rope(UNROTATED_TABLE, rope.base, rope.dims, rope.neox, RotaryScaling(), rotates=False)


def read_no_rope(keys: Keys, head_dim: int, context: int) -> Rope:
    """The rotation of a family of which no layer rotates. Raises UnsupportedModel where the file
    has another."""
    for name, plain in (("rope.scaling.type", "none"), ("rope.scaling.attn_factor", 1.0)):
        value = keys.file.metadata.get(keys.key(name), plain)
        if value != plain:
            raise keys.unsupported(name, f"is {value}", "no layer of this family rotates")
    return unrotated(read_rope(keys, head_dim, context))


def read_sliding_rope(keys: Keys, head_dim: int, full: Rope) -> Rope:
    """The rotation of sliding-window layers: their own base, sizes as in ``full``, angles not
    scaled."""
    return Rope(
        table=SLIDING_TABLE,
        base=keys.positive("rope.freq_base_swa", DEFAULT_BASE),
        dims=rotary_dims(keys, "rope.dimension_count_swa", head_dim, full.dims),
        neox=True,
        scaling=RotaryScaling(attention_factor=full.scaling.attention_factor),
    )


def check_text_sections(keys: Keys, dims: int) -> None:
    """Check that ``rope.dimension_sections`` means plain NeoX rotation for text.

    Pair m uses position stream t, h, w or e, depending on its index in the sections. For text t, h
    and w are equal and e is 0, so no pair may use e."""
    t, h, w, e = _sections(keys)
    for pair in range(dims // 2):
        index = pair % (t + h + w + e)
        if index >= 3 * (t, h, w)[index % 3]:
            raise keys.unsupported(
                SECTIONS,
                f"is {[t, h, w, e]}, which leaves pair {pair} of {dims // 2} to the fourth stream",
                "text needs every pair in one of the first three",
            )


def require_equal_sections(keys: Keys) -> None:
    """Check that every pair is of time, height or width, whose positions are equal for text."""
    sections = _sections(keys)
    if sections[3]:
        raise keys.unsupported(
            SECTIONS,
            f"is {list(sections)}, whose last pairs have a fourth stream",
            "text needs every pair in one of the first three",
        )


def _sections(keys: Keys) -> tuple[int, int, int, int]:
    """The counts of pairs that rotate by time, by height, by width and by a fourth stream."""
    sections = keys.file.require(keys.key(SECTIONS), np.ndarray)
    if len(sections) != 4 or not np.issubdtype(sections.dtype, np.integer):
        raise keys.error(
            SECTIONS,
            f"has {len(sections)} {sections.dtype} entries, must be 4 integers [t, h, w, e]",
        )
    t, h, w, e = (int(section) for section in sections)
    if min(t, h, w, e) < 0 or t + h + w + e == 0:
        raise keys.error(SECTIONS, f"is {[t, h, w, e]}, must be counts of pairs, not all 0")
    return t, h, w, e


def rotary_dims(keys: Keys, name: str, head_dim: int, default: int) -> int:
    """The number of rotated channels of a head: even, at most all."""
    dims = keys.integer(name, 2, MAX_WIDTH, default)
    if dims > head_dim or dims % 2:
        raise keys.error(name, f"is {dims}, must be even and at most {head_dim}")
    return dims


def _scaling(
    keys: Keys, context: int, supported: tuple[str, ...], default: str = "linear"
) -> RotaryScaling:
    kind = keys.file.get(keys.key("rope.scaling.type"), str, default)
    if kind not in supported:
        raise keys.unsupported(
            "rope.scaling.type", f"is {kind!r}", f"supported are {', '.join(supported)}"
        )
    legacy = keys.positive("rope.scale_linear", 0.0, allow_zero=True)
    factor = keys.positive("rope.scaling.factor", legacy, allow_zero=True)
    attention = keys.positive("rope.scaling.attn_factor", 1.0)
    if kind == "none" or (factor == 0.0 and kind != "longrope"):
        return RotaryScaling(attention_factor=attention)
    scaling = RotaryScaling(
        factor=factor or 1.0,
        yarn=kind == "yarn",
        original_context=keys.integer(
            "rope.scaling.original_context_length", 1, MAX_CONTEXT, context
        ),
        attention_factor=attention,
    )
    return _yarn(keys, scaling) if scaling.yarn else scaling


def _yarn(keys: Keys, scaling: RotaryScaling) -> RotaryScaling:
    extrapolation, fast, slow = (f"rope.scaling.{name}" for name in YARN_KEYS)
    mixed = keys.file.get(keys.key(extrapolation), float, 1.0)
    if mixed not in (1.0, -1.0):  # -1 stands for YaRN's own value
        raise keys.unsupported(extrapolation, f"is {mixed}", "supported is 1")
    return replace(
        scaling,
        beta_fast=keys.positive(fast, scaling.beta_fast),
        beta_slow=keys.positive(slow, scaling.beta_slow),
    )
