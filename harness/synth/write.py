"""Writing a synthetic model file, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.dtypes import F32
from harness.cli.progress import NullProgress, Progress
from harness.synth.draw import Bytes
from harness.synth.spec import GENERATOR_VERSION, MIXED_QUANT, SynthSpec
from harness.synth.tensors import SynthTensor, plan_tensors, tensor_data
from harness.synth.vocabulary import TOKENS_KEY, copied_tokenizer, own_tokenizer
from reference.model.gguf.writer import TensorSource, write_gguf

RMS_EPSILON = 1e-6
FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q2_k": 10,
    "q3_k": 11,
    "q4_k": 14,
    MIXED_QUANT: 15,
    "q5_k": 16,
    "q6_k": 18,
    "iq4_nl": 25,
    "iq4_xs": 30,
    "bf16": 32,
    "mxfp4": 38,
}
"""``general.file_type``, informational: the nearest of llama.cpp's numbers."""


def write_synthetic(
    path: str | Path,
    spec: SynthSpec,
    *,
    tokenizer_from: str | Path | None = None,
    progress: Progress | None = None,
) -> SynthSpec:
    """Write the model of ``spec`` at ``path``; the same specification gives the same bytes.

    With ``tokenizer_from`` the vocabulary is that of another GGUF file, padded to ``spec.vocab``
    or, when it is longer, as long as it is. Returns the specification as written. Raises
    ConfigError, and ModelFileError when a file cannot be read or written.
    """
    spec.validate()
    if tokenizer_from is None:
        tokenizer = own_tokenizer(spec)
    else:
        tokenizer = copied_tokenizer(Path(tokenizer_from), None)
        spec = replace(spec, vocab=max(spec.vocab, len(tokenizer[TOKENS_KEY])))
        spec.validate()
        tokenizer = copied_tokenizer(Path(tokenizer_from), spec.vocab)
    progress = progress or NullProgress()
    tensors = plan_tensors(spec)
    sources: dict[str, TensorSource] = {}
    for tensor in tensors:
        stored = replace(tensor, dtype=F32) if spec.expand_to_f32 else tensor
        data = _reported(spec, tensor, progress)
        sources[tensor.name] = (stored.dtype, stored.shape, data)
    total = sum(
        replace(tensor, dtype=F32).nbytes if spec.expand_to_f32 else tensor.nbytes
        for tensor in tensors
    )
    progress.start("writing random weights", total, "B")
    try:
        write_gguf(path, {**model_metadata(spec), **tokenizer}, sources)
    finally:
        progress.close()
    return spec


def _reported(spec: SynthSpec, tensor: SynthTensor, progress: Progress) -> Iterator[Bytes]:
    for chunk in tensor_data(spec, tensor):
        yield chunk
        progress.advance(chunk.nbytes)


def model_metadata(spec: SynthSpec) -> dict[str, Any]:
    """The keys of the model apart from its tokenizer."""
    widths = spec.feed_forward
    keys: dict[str, Any] = {
        "block_count": spec.layers,
        "context_length": spec.context,
        "embedding_length": spec.hidden,
        "feed_forward_length": list(widths) if isinstance(widths, tuple) else widths,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": RMS_EPSILON,
        "rope.dimension_count": spec.head_dim,
        "rope.freq_base": spec.rope_base,
    }
    if spec.rope_scaling != "none":
        keys["rope.scaling.type"] = spec.rope_scaling
        keys["rope.scaling.factor"] = spec.rope_factor
        keys["rope.scaling.original_context_length"] = spec.rope_original_context
    return {
        "general.architecture": spec.architecture,
        "general.name": spec.name,
        "general.file_type": FILE_TYPES["f32" if spec.expand_to_f32 else spec.quant],
        "general.quantization_version": 2,
        "zinc_rt.synth.generator_version": GENERATOR_VERSION,
        **{f"{spec.architecture}.{key}": value for key, value in keys.items()},
    }
