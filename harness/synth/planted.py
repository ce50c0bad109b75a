"""Weights of a model whose drafter is right for a given part of the vocabulary.

The embedding is so large that a layer changes the residual stream little, and row s(u) of the
output matrix is the embedding of u. So the likeliest token after u is s(u), where s is one cycle
through the frequent tokens, which drafters prefer, and one through those behind them: an answer to
a prompt of frequent tokens has no others, as real text nearly does. The block copies its token's
embedding to its own stream. Its embedding of a token for which it shall be wrong is that of the
next token in the vocabulary. So is that of a model with ``draft_agreement``, which drafts for
another planted model: s depends on the size of the vocabulary alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Bytes
from contract.dtypes import Q8_0, DType
from harness.synth.draw import draw_matrix
from harness.synth.spec import SynthSpec
from reference.engine.drafter import FREQUENT_TOKENS
from reference.quant import FORMATS

EMBEDDING_DEVIATION = 64.0
"""Deviation of embeddings: what a layer adds to the residual stream has a deviation near 1."""
CERTAINTY = 3.0
"""Excess of the likeliest logit over the logarithm of the vocabulary's size."""
MIN_BLOCKS = 8
"""Fewest blocks of an embedding's row."""
FRACTION = 0x9E3779B1 / 2**32
"""The golden ratio's fraction: its multiples spread evenly over 0 to 1."""
HEAD_NORMS = ("output_norm", "nextn.shared_head_norm")
DRAWN_AS_EMBEDDING = ("output", "nextn.embed_tokens")
JOIN = "nextn.eh_proj"
JOIN_ROWS = 256
"""Rows of it that are quantized at a time."""
COPIED = (*DRAWN_AS_EMBEDDING, JOIN)
"""Kinds of matrices that are not drawn by themselves."""


def is_copied(spec: SynthSpec, kind: str) -> bool:
    """Whether ``planted_rows`` gives a matrix."""
    drafts = kind == "token_embd" and spec.draft_agreement is not None
    return spec.planted and (drafts or kind in COPIED)


def planted_mean(spec: SynthSpec, kind: str) -> float | None:
    """The mean of the values of a norm that planting sets, None for others."""
    if kind in HEAD_NORMS:
        return (math.log(spec.vocab) + CERTAINTY) / (EMBEDDING_DEVIATION * spec.hidden)
    return EMBEDDING_DEVIATION if kind == "nextn.enorm" else None


def planted_type(spec: SynthSpec, kind: str, embedding: DType) -> DType | None:
    """The storage type of a matrix that planting sets, None for others. Rows of few blocks have
    norms that differ too much, since every block has a random scale."""
    if kind not in ("token_embd", *DRAWN_AS_EMBEDDING):
        return None
    return embedding if embedding.block_elements * MIN_BLOCKS <= spec.hidden else Q8_0


def planted_rows(spec: SynthSpec, kind: str, dtype: DType) -> Iterator[Bytes]:
    """The stored rows of a copied matrix, uint8[some rows, row_bytes] at a time."""
    if kind == JOIN:
        for first in range(0, spec.hidden, JOIN_ROWS):
            rows = min(JOIN_ROWS, spec.hidden - first)
            yield FORMATS[dtype].quantize(np.eye(rows, 2 * spec.hidden, first, np.float32))
        return
    of = output_rows(spec) if kind == "output" else _read_rows(spec)
    yield embedding_rows(spec, dtype)[of]


def embedding_rows(spec: SynthSpec, dtype: DType) -> Bytes:
    """The stored rows of the embedding, uint8[vocab, row_bytes]."""
    drawn = draw_matrix(
        spec.seed, "token_embd.weight", dtype, spec.vocab, spec.hidden, EMBEDDING_DEVIATION
    )
    return np.concatenate(list(drawn))


def right_drafts(spec: SynthSpec) -> NDArray[np.bool_]:
    """Whether the drafter drafts the likeliest token after each token."""
    (agreement,) = spec.agreements
    spread = np.arange(spec.vocab) * FRACTION % 1.0
    return spread < agreement


def output_rows(spec: SynthSpec) -> NDArray[np.int64]:
    """The token of which each row of the output matrix is the embedding."""
    frequent = min(spec.vocab, FREQUENT_TOKENS)
    rare = _before_in_cycle(spec.vocab - frequent) + frequent
    return np.concatenate([_before_in_cycle(frequent), rare])


def _before_in_cycle(size: int) -> NDArray[np.int64]:
    """For each of ``size`` numbers the one before it in a cycle through all."""
    step = int(size * FRACTION)
    while math.gcd(step, size) > 1:
        step += 1
    return (np.arange(size) - step) % max(1, size)


def _read_rows(spec: SynthSpec) -> NDArray[np.int64]:
    """The token of which each row of the drafter's embedding is the embedding."""
    tokens = np.arange(spec.vocab)
    return np.where(right_drafts(spec), tokens, (tokens + 1) % spec.vocab)
