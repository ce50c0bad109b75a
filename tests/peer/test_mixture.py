"""The mixture ``q4_k_m`` is the one llama.cpp's quantizer makes of the same model."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from reference.model.gguf import open_gguf
from tests.families_table import DENSE, FAMILIES
from tests.peer.llama_cpp_peer import llama_cpp

pytestmark = pytest.mark.peer

FILE_TYPE_Q4_K_M = 15
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


def quantized_by_peer(source: Path, out: Path) -> Path:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPE_Q4_K_M
    parameters.nthread = 2
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(out).encode(), ctypes.byref(parameters)
    )
    assert status == 0
    return out


@pytest.mark.parametrize("name", MODELS)
def test_types_are_those_of_llama_cpps_quantizer(synthetic_model, tmp_path, name):
    source = synthetic_model(quant="f32", **MODELS[name])
    peer = types_of(quantized_by_peer(source, tmp_path / "peer.gguf"))
    ours = types_of(synthetic_model(quant="q4_k_m", **MODELS[name]))
    if AS_CONVERTED in ours:
        assert (ours.pop(AS_CONVERTED), peer.pop(AS_CONVERTED)) == ("bf16", "f32")
    assert ours == peer
    assert len(set(ours.values())) > 2
