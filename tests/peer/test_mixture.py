"""The mixture ``q4_k_m`` is the one llama.cpp's quantizer makes of the same model."""

from pathlib import Path
from typing import Any

import pytest

from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.model.gguf.file import open_gguf
from tests.families_table import DENSE, FAMILIES

pytestmark = pytest.mark.peer

FILE_TYPES = {"q4_k_m": 15, "mxfp4_moe": 38}
"""Numbers of llama.cpp's file types."""
WIDE = {"hidden": 256}
"""Rows of whole super-blocks, where the table's models fall back to smaller blocks."""
SPARSE_AND_HYBRID = {name: FAMILIES[name] for name in FAMILIES if name not in DENSE}
AS_CONVERTED = "per_layer_model_proj.weight"
"""Not quantized: bf16 in published files, here what the file that is quantized has."""
MODELS: dict[str, dict[str, Any]] = {
    **{name: dict(fields) for name, fields in SPARSE_AND_HYBRID.items()},
    **{f"{name}-wide": {**fields, **WIDE} for name, fields in SPARSE_AND_HYBRID.items()},
    **{
        f"{name}-12-layers": {**FAMILIES[name], **WIDE, "layers": 12}
        for name in ("qwen3", "llama-8-experts", "qwen35moe-nextn", "gemma4-values-from-keys")
    },
    "llama": {"architecture": "llama"},
    "qwen2-fused-qkv": {"architecture": "qwen2", "fused_qkv": True},
    "llama-70b-layers": {"architecture": "llama", "layers": 80, "feed_forward": 256},
    "qwen3-70b-layers": {"architecture": "qwen3", "layers": 80, "feed_forward": 256},
}


def types_of(path: Path) -> dict[str, str]:
    with open_gguf(path) as file:
        return {name: str(tensor.ggml_type) for name, tensor in file.tensors.items()}


@pytest.mark.parametrize(
    ("name", "quant"), [*((name, "q4_k_m") for name in MODELS), ("gpt-oss-experts", "mxfp4_moe")]
)
def test_types_are_those_of_llama_cpps_quantizer(peer, tmp_path, name, quant):
    """Types follow from names and shapes, so that the weights may be zeros."""
    source, mixed = tmp_path / "source.gguf", tmp_path / "mixed.gguf"
    for path, stored in ((source, "f32"), (mixed, quant)):
        write_synthetic(path, sized_spec("tiny", quant=stored, **MODELS[name]), sparse=True)
    theirs = types_of(peer.quantize(source, tmp_path / "peer.gguf", FILE_TYPES[quant]))
    ours = types_of(mixed)
    if AS_CONVERTED in ours:
        assert (ours.pop(AS_CONVERTED), theirs.pop(AS_CONVERTED)) == ("bf16", "f32")
    assert ours == theirs
    assert len(set(ours.values())) > 2
