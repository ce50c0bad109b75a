"""Files of LoRA adapters with random matrices, as llama.cpp writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from contract.dtypes import F32, DType
from reference.model.gguf.file import open_gguf
from reference.model.gguf.writer import write_gguf
from reference.quant import FORMATS

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
Changed = Callable[[str], bool]


def merge(path: Path, model: Path, adapter: Path, scale: float) -> Path:
    """The binary32 file ``model`` with W + scale (alpha / rank) B A for each matrix W that an
    adapter changes."""
    with open_gguf(model) as file, open_gguf(adapter) as changes:
        alpha = changes.require("adapter.lora.alpha", float)
        tensors = {}
        for name, info in file.tensors.items():
            values = file.tensor_array(name).astype(np.float64)
            if f"{name}.lora_a" in changes.tensors:
                a, b = (changes.tensor_array(f"{name}.lora_{part}").astype(float) for part in "ab")
                values += scale * alpha / len(a) * (b @ a)
            tensors[name] = info.dtype, info.shape, values.astype(np.float32)
        write_gguf(path, dict(file.metadata), tensors)
    return path


def is_projection(name: str) -> bool:
    """Whether adapters usually change the tensor: attention and dense projections of a layer."""
    return name.split(".")[-2] in PROJECTIONS and name.endswith(".weight")


def write_adapter(
    path: Path, model: Path, *, rank: int = 4, alpha: float = 8.0, seed: int = 1,
    dtype: DType = F32, changed: Changed = is_projection, size: float = 0.25, broken: str = "",
    keys: Mapping[str, Any] | None = None, more: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:  # fmt: skip
    """An adapter of the model file ``model`` for the tensors that ``changed`` accepts; ``more`` are
    shapes of other tensors, and ``keys`` replace metadata, None removes one. Tensor ``broken``
    has a NaN; the others are ``size`` large."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    with open_gguf(model) as file:
        architecture = file.require("general.architecture", str)
        for name, info in file.tensors.items():
            if changed(name):
                outputs, inner = (1, *info.shape)[-2:]
                shapes[f"{name}.lora_a"] = (*info.shape[:-2], rank, inner)
                shapes[f"{name}.lora_b"] = (*info.shape[:-2], outputs, rank)
    tensors = {}
    for name, shape in {**shapes, **(more or {})}.items():
        values = (random.standard_normal(shape) * size).astype(np.float32)
        if name == broken:
            values[0] = np.nan
        stored = (
            FORMATS[dtype].quantize(values.reshape(-1, shape[-1])) if dtype is not F32 else values
        )
        tensors[name] = (dtype, shape, stored)
    metadata: dict[str, Any] = {
        "general.architecture": architecture, "general.type": "adapter", "adapter.type": "lora",
        "adapter.lora.alpha": alpha, **(keys or {}),
    }  # fmt: skip
    write_gguf(path, {k: v for k, v in metadata.items() if v is not None}, tensors)
    return path
