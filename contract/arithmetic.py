"""The constants of exact arithmetic, version 1 (docs/arithmetic.md). Changing one changes bits."""

from __future__ import annotations

ARITHMETIC_VERSION = 1

SEGMENT = 256
"""Elements of a long axis summed as one segment (R3)."""
SPAN = 1024
"""Elements of a long axis whose segment values are folded into one span (R3)."""
DOT_CHUNK = 16
"""Elements of a query-key product folded before the chunks are folded (R6)."""
KV_TILE = 64
"""Positions of one attention tile (R6)."""
PAGE_TOKENS = 16
"""Positions stored in one KV page; a tile is a whole number of pages."""
ACTIVATION_BITS = 10
"""An activation segment is scaled so that its largest magnitude lies in [2^10, 2^11) (R5)."""
ACTIVATION_MAX = 2047
"""Largest quantized activation magnitude (R5)."""
ACTIVATION_MIN_EXPONENT = -64
"""A segment whose largest magnitude is below 2^-64 is all zero (R5)."""
EXP_LIMIT = 87.0
"""exp clamps its argument to [-87, 87] and is 0 below (R2)."""
SAMPLE_WEIGHT_BITS = 24
"""Sampling weights are rint(exp(l - max) * 2^24) (R9)."""
MASK_WORD_BITS = 32
"""Tokens a word of a sampling mask allows or forbids (R9)."""
MOST_LOG_PROBABILITIES = 20
"""Most tokens of a row whose log-probabilities are listed (R10)."""

if KV_TILE % PAGE_TOKENS or SPAN % SEGMENT:
    raise AssertionError("tiles hold whole pages and spans hold whole segments")
