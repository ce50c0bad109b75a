"""The constants of exact arithmetic, version 2 (docs/arithmetic.md). Changing one changes bits."""

from __future__ import annotations

ARITHMETIC_VERSION = 2

SEGMENT = 256
"""Elements of a long axis summed as one segment (R3)."""
SPAN = 1024
"""Elements of a long axis whose segment values are folded into one span (R3)."""
KV_TILE = 64
"""Positions of one attention tile (R6)."""
KV_SPAN = 1024
"""Positions of one attention span: its tiles are merged first, then the spans (R6)."""
PAGE_TOKENS = 16
"""Positions stored in one KV page; a tile is a whole number of pages."""
HEAD_DIM_MAX = 576
"""Most elements of an attention head: with more, a product of integers could leave int32 (R6)."""
KV_ROW_BITS = 10
"""A row of keys or values is scaled so that its largest magnitude lies in [2^10, 2^11) (R6)."""
QUERY_BITS = 13
"""A query of up to 64 elements is scaled so that its largest magnitude lies in [2^13, 2^14)
(R6)."""
QUERY_PRODUCT_BITS = 19
"""A query of n elements has at most 19 - ceil(log2 n) bits (R6)."""
ROW_EXPONENT_LIMIT = 40
"""A row whose largest magnitude is not below 2^40 is broken, one below 2^-40 is zero (R6)."""
BROKEN_ROW = -128
"""The exponent that marks a broken row (R6)."""
ATTENTION_WEIGHT_BITS = 13
"""The weight of a position in a tile is rint(p * 2^(ev + 13)) (R6)."""
ATTENTION_EXP2_MIN = -80.0
"""The smallest argument of exp2 (R6)."""
TILE_MAXIMUM_BITS = 20
"""A tile whose maximum is not below 2^20 in magnitude breaks its query (R6)."""
MERGE_BITS = 60
"""A factor of a merge below 2^-60 is +0 (R6)."""
OUTPUT_BITS = 20
"""A sum of weighted values below 2^-20 in magnitude gives +0 (R6)."""
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
EXPERT_GROUPS_MAX = 64
"""Most groups that experts are chosen in (R7)."""
MASK_WORD_BITS = 32
"""Tokens that one word of a sampling mask covers, one bit each (R9)."""
MAX_LOG_PROBABILITIES = 20
"""Most tokens per row whose log-probabilities can be listed (R10)."""
CODED_CHANNELS = 32
"""Channels of a head that share a scale (R13)."""
CODE_SCALE_MAX = 255
"""The largest scale of a group, which a byte holds (R13)."""
CODE_SCALES, CODE_SCALE_PARTS = 6, 16
"""A group tries this many scales, which fall by sixteenths of the first (R13)."""
ROTATION_MIN_EXPONENT = -64
"""A channel whose magnitude is below 2^-64 counts as +0 when a head is rotated (R13)."""
DIGEST_LEAVES = 16
"""Leaves of the tree over a span's logits: leaf i has the logits i, i + 16, i + 32, ... (R12)."""
DIGEST_FAN = 4
"""Digests that one node of that tree covers (R12)."""
DIGEST_WORDS = 8
"""32-bit words of a digest (R12)."""


def rotation_block(head_dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides ``head_dim``
    (R13)."""
    return head_dim & -head_dim


def digest_words(vocab: int) -> int:
    """32-bit words of the digests of a row of logits: eight of each span (R12)."""
    return -(-vocab // SPAN) * DIGEST_WORDS


if KV_TILE % PAGE_TOKENS or KV_SPAN % KV_TILE or SPAN % SEGMENT:
    raise AssertionError("tiles hold whole pages, spans whole tiles and whole segments")
