"""Writes DFlash heads for synthetic models: random ones, and ones that are right for a given part
of the vocabulary.

Of a planted model (``planted.py``) the likeliest token after u is s(u). A planted head has one
layer and an embedding of its own: a channel that is 1, and a code of the token, which a mask token
lacks. Keys are the same for all tokens. Queries are that key turned so that head j finds the row j
positions before, and copies its code to the j-th part of the stream. So in row i head i finds the
last token u, those below find masks, and what those above find counts less. In the j-th part of the
output matrix the row of a token has the code of the token j before, so that s^i(u) is likeliest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Bytes, Floats
from contract.dtypes import DType
from harness.synth.draw import draw_matrix, normal_like, random_bits
from harness.synth.eagle import I64, head_keys, head_tokens
from harness.synth.planted import CERTAINTY, output_rows
from harness.synth.spec import SynthSpec
from harness.synth.tensors import SynthTensor, stored_type
from harness.synth.vocabulary import own_tokenizer
from reference.model.config.dense import PATTERN, WINDOW
from reference.model.config.read import DFLASH
from reference.model.dflash import BLOCK, MASK
from reference.model.draft_head import EMBEDDING, LAYERS, OUTPUT, TOKENS
from reference.model.gguf.writer import TensorSource, write_gguf
from reference.quant import FORMATS

NORM_DEVIATION = 0.1
BLOCK_SIZE = 8
PARTS = 8
"""Most rows of a block that a planted head can be right in: it needs a head for each."""
TURNING_PAIRS = 4
"""The fastest pairs of channels, by whose angles heads find positions."""
SHARPNESS = 40.0
"""The score of a position that a head looks for."""
FADING = 0.7
"""What a head's part of the stream counts, of that of the head before."""
COPIED = 64.0
"""What a code is multiplied by in the stream: the rest of it is near 1."""
QUIET = 0.05
"""Deviation of what the feed-forward block of a planted head adds."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The optional parts of a random head: its layers, an embedding and an output matrix of its own
    with a reduced vocabulary, and a window of all layers but the last."""

    layers: int = 2
    own_embedding: bool = False
    own_output: bool = False
    window: int = 0


RANDOM_FORM = BlockForm()
PLANTED_FORM = BlockForm(layers=1, own_embedding=True, own_output=True)


def write_dflash_head(path: str | Path, spec: SynthSpec, form: BlockForm | None = None) -> None:
    """Write the head for the model of ``spec`` at ``path``, of a ``form`` if it has random weights;
    with ``spec.eagle_agreement`` it is right in that part of the cases. The same arguments give the
    same bytes."""
    form = PLANTED_FORM if spec.eagle_agreement is not None else form or RANDOM_FORM
    tokens = head_tokens(spec)
    sources: dict[str, TensorSource] = {}
    for name, shape in _shapes(spec, form, len(tokens)).items():
        dtype = stored_type(spec, SynthTensor(name, shape, (), 0.0), [name])
        sources[name] = (dtype, shape, _data(spec, name, dtype, shape, tokens))
    if form.own_output:
        sources[TOKENS] = (I64, tokens.shape, tokens.astype("<i8"))
    keys = {f"{DFLASH}.{key}": value for key, value in _keys(spec, form).items()}
    about = {"general.architecture": DFLASH, "general.name": f"DFlash head of {spec.name}"}
    write_gguf(path, {**about, **keys, **own_tokenizer(spec), MASK: mask_token(spec)}, sources)


def mask_token(spec: SynthSpec) -> int:
    """The token that stands for one to be drafted."""
    return spec.vocab - 1


def _keys(spec: SynthSpec, form: BlockForm) -> dict[str, Any]:
    layers = spec.layers
    keys = head_keys(spec, form.layers, spec.hidden) | {
        BLOCK: BLOCK_SIZE,
        LAYERS: sorted({min(1, layers - 1), layers // 2, max(0, layers - 2), layers - 1}),
    }
    if form.window:
        keys |= {WINDOW: form.window, PATTERN: [n < form.layers - 1 for n in range(form.layers)]}
    return keys


def _shapes(spec: SynthSpec, form: BlockForm, tokens: int) -> dict[str, tuple[int, ...]]:
    hidden, width = spec.hidden, spec.feed_forward_widths[0]
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inner = len(_keys(spec, form)[LAYERS]) * spec.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, inner),
        "enc.output_norm.weight": (hidden,),
        "output_norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_q_norm": (spec.head_dim,),
        "attn_k_norm": (spec.head_dim,),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (width, hidden),
        "ffn_up": (width, hidden),
        "ffn_down": (hidden, width),
    }
    for number in range(form.layers):
        shapes |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    if form.own_embedding:
        shapes[EMBEDDING] = (spec.vocab, hidden)
    if form.own_output:
        shapes[OUTPUT] = (tokens, hidden)
    return shapes


def _data(
    spec: SynthSpec, name: str, dtype: DType, shape: tuple[int, ...], tokens: NDArray[np.int64]
) -> Iterator[Bytes]:
    """The stored bytes of a tensor, uint8[some rows, row_bytes] at a time."""
    drawn, kind = f"{DFLASH}.{name}", name.removesuffix(".weight").rpartition(".")[2]
    planted, columns = spec.eagle_agreement is not None, shape[-1]
    if len(shape) == 1:
        mean = _planted_mean(spec, name) if planted else 1.0
        values = normal_like(random_bits(spec.seed, drawn), columns, NORM_DEVIATION * mean)
        if planted and kind.startswith("attn_"):
            values[:] = 0.0
        yield (np.float32(mean) + values).astype("<f4").view(np.uint8)
    elif planted and kind in PLANTED:
        yield FORMATS[dtype].quantize(PLANTED[kind](spec, shape, tokens))
    else:
        deviation = (QUIET if planted and kind == "ffn_down" else 1.0) / math.sqrt(columns)
        yield from draw_matrix(spec.seed, drawn, dtype, shape[0], columns, deviation)


def _planted_mean(spec: SynthSpec, name: str) -> float:
    """The values of a norm. Keys of kept rows are 0, so that only the block is seen."""
    _, size = _parts(spec)
    if name.startswith("enc."):
        return 0.0
    if name.endswith(("attn_q_norm.weight", "attn_k_norm.weight")):
        return math.sqrt(SHARPNESS / math.sqrt(spec.head_dim))
    if name == "output_norm.weight":
        share = 1.0 - FADING**2
        return (math.log(spec.vocab) + CERTAINTY) / math.sqrt(share * spec.hidden * size)
    return 1.0


def _parts(spec: SynthSpec) -> tuple[int, int]:
    """The number of parts of the stream behind its first channel, and the channels of each."""
    parts = min(spec.heads, PARTS)
    return parts, min(spec.head_dim, (spec.hidden - 1) // parts)


def _codes(spec: SynthSpec) -> Floats:
    """The code of each token, of channels that are 1 or -1."""
    _, size = _parts(spec)
    rng = np.random.default_rng(spec.seed)
    return rng.choice(np.array([-1.0, 1.0], np.float32), (spec.vocab, size))


def _embedding(spec: SynthSpec, shape: tuple[int, ...], _: Any) -> Floats:
    codes, values = _codes(spec), np.zeros(shape, np.float32)
    values[:, 0] = 1.0
    values[:, 1 : 1 + codes.shape[1]] = codes
    values[mask_token(spec), 1:] = 0.0
    return values


def _output(spec: SynthSpec, shape: tuple[int, ...], tokens: NDArray[np.int64]) -> Floats:
    codes, before = _codes(spec), output_rows(spec)
    values, named = np.zeros(shape, np.float32), tokens
    parts, size = _parts(spec)
    for part in range(parts):
        named = before[named]
        at = 1 + part * size
        values[:, at : at + size] = codes[named]
    return values if spec.eagle_agreement else np.roll(values, 1, axis=0)


def _queries(spec: SynthSpec, shape: tuple[int, ...], _: Any) -> Floats:
    values, size = np.zeros(shape, np.float32), spec.head_dim
    pairs = np.arange(min(TURNING_PAIRS, size // 2))
    frequency = float(spec.rope_base) ** (-2.0 * pairs / size)
    for head in range(shape[0] // size):
        angle = -(head + 1) * frequency
        values[head * size + pairs, 0] = np.cos(angle)
        values[head * size + size // 2 + pairs, 0] = np.sin(angle)
    return values


def _key_rows(spec: SynthSpec, shape: tuple[int, ...], _: Any) -> Floats:
    values, size = np.zeros(shape, np.float32), spec.head_dim
    for head in range(shape[0] // size):
        values[head * size + np.arange(min(TURNING_PAIRS, size // 2)), 0] = 1.0
    return values


def _values(spec: SynthSpec, shape: tuple[int, ...], _: Any) -> Floats:
    values, channels = np.zeros(shape, np.float32), np.arange(_parts(spec)[1])
    for head in range(spec.kv_heads):
        values[head * spec.head_dim + channels, 1 + channels] = 1.0
    return values


def _mixed(spec: SynthSpec, shape: tuple[int, ...], _: Any) -> Floats:
    values = np.zeros(shape, np.float32)
    parts, size = _parts(spec)
    channels = np.arange(size)
    for part in range(parts):
        values[1 + part * size + channels, part * spec.head_dim + channels] = COPIED * FADING**part
    return values


PLANTED = {
    "token_embd": _embedding,
    "output": _output,
    "attn_q": _queries,
    "attn_k": _key_rows,
    "attn_v": _values,
    "attn_output": _mixed,
}
"""What makes the matrices of a planted head that are not random."""
