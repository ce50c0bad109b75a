"""Writes a synthetic model file, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.arrays import Bytes
from contract.dtypes import F32
from harness.progress import SILENT, Progress
from harness.synth.metadata import architecture_keys, shared_keys
from harness.synth.plan import plan_tensors
from harness.synth.spec import EXPERTS_QUANT, GENERATOR_VERSION, MIXED_QUANT, SynthSpec
from harness.synth.tensors import SynthTensor, tensor_data
from harness.synth.vocabulary import TOKENS_KEY, copied_tokenizer, own_tokenizer
from reference.model.gguf.writer import HOLE, TensorSource, write_gguf

FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k": 11, "q4_k": 14, MIXED_QUANT: 15, "q5_k": 16, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30,
    "bf16": 32, "mxfp4": 38, EXPERTS_QUANT: 38,
}  # fmt: skip
"""Values of ``general.file_type``: the nearest of llama.cpp's numbers, for information only."""


def write_synthetic(
    path: str | Path,
    spec: SynthSpec,
    *,
    tokenizer_from: str | Path | None = None,
    sparse: bool = False,
    progress: Progress = SILENT,
) -> SynthSpec:
    """Write the model of ``spec`` at ``path``; the same specification gives the same bytes.

    With ``tokenizer_from`` the vocabulary is that of another GGUF file, padded to ``spec.vocab``
    unless it is longer. ``sparse`` writes the tensors' data as a hole in the file, which needs no
    disk space and reads as zeros: enough to plan, build and export the largest models. Returns the
    specification as written. Raises ConfigError, and ModelFileError when a file cannot be read or
    written."""
    spec.validate()
    if tokenizer_from is None:
        tokenizer = own_tokenizer(spec)
    else:
        tokenizer = copied_tokenizer(Path(tokenizer_from), None)
        spec = replace(spec, vocab=max(spec.vocab, len(tokenizer[TOKENS_KEY])))
        spec.validate()
        tokenizer = copied_tokenizer(Path(tokenizer_from), spec.vocab)
    tensors = plan_tensors(spec)
    sources: dict[str, TensorSource] = {}
    for tensor in tensors:
        stored = replace(tensor, dtype=F32) if spec.expand_to_f32 else tensor
        data = HOLE if sparse else _reported(spec, tensor, progress)
        sources[tensor.name] = (stored.dtype, stored.shape, data)
    total = sum(
        replace(tensor, dtype=F32).nbytes if spec.expand_to_f32 else tensor.nbytes
        for tensor in tensors
    )
    progress.start("writing random weights", 0 if sparse else total, "B")
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
    return {
        "general.architecture": spec.architecture,
        "general.name": spec.name,
        "general.file_type": FILE_TYPES["f32" if spec.expand_to_f32 else spec.quant],
        "general.quantization_version": 2,
        "zinc_rt.synth.generator_version": GENERATOR_VERSION,
        **shared_keys(spec),
        **{f"{spec.architecture}.{k}": value for k, value in architecture_keys(spec).items()},
    }
