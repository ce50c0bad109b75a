"""Writes EAGLE-3 heads for synthetic models: random ones, and ones that are right for a given part
of the vocabulary.

Of a planted model (``planted.py``) the likeliest token after u is s(u). The head's attention finds
a token's own position: queries and keys are the token's embedding. Its values are as many channels
of the embedding as they have, which the output projection makes so large that the row of the
position before counts for little. Rows of the head's output matrix are embeddings of the tokens u
after which it shall be right, and stand for s(u): the others are not in its vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Bytes, Floats
from contract.dtypes import F32, DType
from harness.synth.draw import draw_matrix, normal_like, random_bits
from harness.synth.metadata import RMS_EPSILON
from harness.synth.planted import (
    CERTAINTY,
    EMBEDDING_DEVIATION,
    embedding_rows,
    output_rows,
    planted_type,
    right_drafts,
)
from harness.synth.spec import SynthSpec
from harness.synth.tensors import SynthTensor, rope_divisors, stored_type
from harness.synth.vocabulary import own_tokenizer
from reference.model.config.read import EAGLE
from reference.model.draft_head import LAYERS, TOKENS
from reference.model.eagle import READ_LAYERS
from reference.model.gguf.types import GGML_TYPES
from reference.model.gguf.writer import TensorSource, write_gguf
from reference.quant import FORMATS

SHARPNESS = 2.0
"""Factor of queries and keys: a token's own score is 4 sqrt(head_dim), others' deviate by 4."""
NORM_DEVIATION = 0.1
I64 = next(kind for kind in GGML_TYPES.values() if kind.name == "i64")
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class HeadForm:
    """The optional parts of a head: an embedding of its own, an output matrix of its own and a
    reduced vocabulary, norms, and a width other than the model's, 0 for that."""

    own_embedding: bool = False
    own_output: bool = True
    fc_norm: bool = False
    normed_residual: bool = False
    hidden: int = 0


PLANTED_FORM = HeadForm(normed_residual=True)
RANDOM_FORM = HeadForm()


def write_eagle_head(path: str | Path, spec: SynthSpec, form: HeadForm | None = None) -> None:
    """Write the head for the model of ``spec`` at ``path``, of a ``form`` if it has random weights;
    with ``spec.eagle_agreement`` it is right in that part of the cases. The same arguments give the
    same bytes."""
    planted = spec.eagle_agreement is not None
    form = PLANTED_FORM if planted else form or RANDOM_FORM
    tokens = head_tokens(spec)
    shapes = _shapes(spec, form, len(tokens))
    sources: dict[str, TensorSource] = {}
    for name, shape in shapes.items():
        dtype = _dtype(spec, name, shape)
        sources[name] = (dtype, shape, _data(spec, name, dtype, shape, tokens))
    if spec.rope_freqs:
        divisors = rope_divisors(spec, ROPE_FREQS)
        sources[ROPE_FREQS] = (F32, (spec.head_dim // 2,), divisors)
    if form.own_output:
        sources[TOKENS] = (I64, tokens.shape, tokens.astype("<i8"))
    keys = {f"{EAGLE}.{key}": value for key, value in _keys(spec, form).items()}
    about = {"general.architecture": EAGLE, "general.name": f"EAGLE-3 head of {spec.name}"}
    write_gguf(path, {**about, **keys, **own_tokenizer(spec)}, sources)


def head_keys(spec: SynthSpec, layers: int, hidden: int) -> dict[str, Any]:
    """The sizes of a head of ``layers`` layers for the model ``spec``, with rows of ``hidden``
    elements, by the names of their metadata keys without the architecture."""
    return {
        "block_count": layers,
        "context_length": spec.context,
        "embedding_length": hidden,
        "feed_forward_length": spec.feed_forward_widths[0],
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": RMS_EPSILON,
        "rope.dimension_count": spec.head_dim,
        "rope.freq_base": spec.rope_base,
        "target_hidden_size": spec.hidden,
    }


def _keys(spec: SynthSpec, form: HeadForm) -> dict[str, Any]:
    layers = spec.layers
    return head_keys(spec, 1, form.hidden or spec.hidden) | {
        LAYERS: [min(2, layers - 1), layers // 2, max(0, layers - 3)],
        "norm_before_residual": form.normed_residual,
        "norm_before_fc": form.fc_norm,
    }


def _shapes(spec: SynthSpec, form: HeadForm, tokens: int) -> dict[str, tuple[int, ...]]:
    hidden, width = form.hidden or spec.hidden, spec.feed_forward_widths[0]
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inner = READ_LAYERS * spec.hidden
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, inner)}
    if form.fc_norm:
        shapes["enc.output_norm.weight"] = (inner,)
    if form.own_embedding:
        shapes["token_embd.weight"] = (spec.vocab, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_norm_2": (hidden,),
        "attn_q": (queries, 2 * hidden),
        "attn_k": (keys, 2 * hidden),
        "attn_v": (keys, 2 * hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (width, hidden),
        "ffn_up": (width, hidden),
        "ffn_down": (hidden, width),
    }
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    shapes["output_norm.weight"] = (hidden,)
    if form.own_output:
        shapes["output.weight"] = (tokens, hidden)
    return shapes


def head_tokens(spec: SynthSpec) -> NDArray[np.int64]:
    """The model's ids of the head's tokens: of a random head every other token, of a planted one
    what follows the tokens for which it shall be right, or half of all if there are none."""
    if spec.eagle_agreement is None or spec.eagle_agreement == 0:
        return np.arange(0, spec.vocab, 2)
    return np.flatnonzero(right_drafts(spec)[output_rows(spec)])


def _dtype(spec: SynthSpec, name: str, shape: tuple[int, ...]) -> DType:
    tensor = SynthTensor(name, shape, (), 0.0)
    dtype = stored_type(spec, tensor, [name])
    if spec.eagle_agreement is None or tensor.kind != "output":
        return dtype
    embedding = SynthTensor("token_embd.weight", (spec.vocab, spec.hidden), (), 0.0)
    return planted_type(spec, "output", stored_type(spec, embedding, [])) or dtype


def _data(
    spec: SynthSpec, name: str, dtype: DType, shape: tuple[int, ...], tokens: NDArray[np.int64]
) -> Iterator[Bytes]:
    """The stored bytes of a tensor, uint8[some rows, row_bytes] at a time."""
    drawn, kind = f"{EAGLE}.{name}", name.removesuffix(".weight").rpartition(".")[2]
    planted, columns = spec.eagle_agreement is not None, shape[-1]
    if len(shape) == 1:
        mean = 1.0
        if planted and kind == "output_norm":
            channels = min(spec.hidden, spec.kv_heads * spec.head_dim)
            certain = math.log(spec.vocab) + CERTAINTY
            mean = certain / (EMBEDDING_DEVIATION * math.sqrt(spec.hidden * channels))
        values = normal_like(random_bits(spec.seed, drawn), columns, NORM_DEVIATION * mean)
        yield (np.float32(mean) + values).astype("<f4").view(np.uint8)
    elif planted and kind == "output":
        right = output_rows(spec)[tokens]
        yield embedding_rows(spec, dtype)[right if spec.eagle_agreement else np.roll(right, 1)]
    elif planted and kind in ("attn_q", "attn_k", "attn_v", "attn_output"):
        yield FORMATS[dtype].quantize(_chosen(spec, kind, shape))
    else:
        large = EMBEDDING_DEVIATION if planted and kind == "fc" else 1.0
        deviation = 1.0 / (large * math.sqrt(columns))
        yield from draw_matrix(spec.seed, drawn, dtype, shape[0], columns, deviation)


def _chosen(spec: SynthSpec, kind: str, shape: tuple[int, ...]) -> Floats:
    """A projection that copies channels: of the embedding to each head of queries and to keys and
    values, and of the first head of queries of each head of values to the stream."""
    size, group = spec.head_dim, spec.heads // spec.kv_heads
    rows, channels = np.arange(shape[0]), np.arange(spec.kv_heads * size)
    values = np.zeros(shape, np.float32)
    if kind == "attn_output":
        heads, inside = np.divmod(channels, size)
        values[channels % spec.hidden, heads * group * size + inside] = EMBEDDING_DEVIATION
        return values
    heads, inside = np.divmod(rows, size)
    of_keys = heads // group if kind == "attn_q" else heads
    factor = 1.0 if kind == "attn_v" else SHARPNESS
    values[rows, (of_keys * size + inside) % spec.hidden] = factor
    return values
