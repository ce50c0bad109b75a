"""A model's hyperparameters, read from GGUF metadata and checked before anything is built."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from contract.errors import ModelFileError, UnsupportedModel
from reference.exact.rotary import RotaryScaling
from reference.model.gguf import GgufFile

MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
"""Bounds on what a file may declare; the largest public models stay far below."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dense decoder hyperparameters. Tuples have one entry per layer."""

    architecture: str
    name: str
    layers: int
    hidden: int
    vocab: int
    context: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    feed_forward: tuple[int, ...]
    rms_eps: float
    rope_base: float
    rotary_dim: int
    rope_scaling: RotaryScaling

    @property
    def kv_width(self) -> int:
        """Elements of a key (or value) vector summed over the layers."""
        return sum(self.kv_heads) * self.head_dim


def read_config(file: GgufFile) -> ModelConfig:
    """The hyperparameters of ``file``; errors name the key, what it is and what it must be."""
    architecture = file.require("general.architecture", str)
    reader = _Reader(file, architecture)
    layers = reader.integer("block_count", 1, MAX_LAYERS)
    hidden = reader.integer("embedding_length", 1, MAX_WIDTH)
    heads = reader.per_layer("attention.head_count", layers, 1)
    kv_heads = reader.per_layer("attention.head_count_kv", layers, 1, heads)
    for layer, (query, key) in enumerate(zip(heads, kv_heads, strict=True)):
        if query % key:
            raise reader.error(
                "attention.head_count_kv", f"{key} does not divide {query} heads (layer {layer})"
            )
    if hidden % heads[0] and not reader.has("attention.key_length"):
        raise reader.error("attention.head_count", f"{heads[0]} does not divide {hidden}")
    head_dim = reader.integer("attention.key_length", 1, MAX_WIDTH, hidden // heads[0])
    value_length = reader.integer("attention.value_length", 1, MAX_WIDTH, head_dim)
    if value_length != head_dim:
        raise reader.error("attention.value_length", f"is {value_length}, the key's is {head_dim}")
    rotary_dim = reader.integer("rope.dimension_count", 2, MAX_WIDTH, head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise reader.error(
            "rope.dimension_count", f"is {rotary_dim}, must be even and at most {head_dim}"
        )
    context = reader.integer("context_length", 1, 1 << 24)
    return ModelConfig(
        architecture=architecture,
        name=file.get("general.name", str, architecture),
        layers=layers,
        hidden=hidden,
        vocab=_vocab(file),
        context=context,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        feed_forward=reader.per_layer("feed_forward_length", layers, 1),
        rms_eps=reader.positive("attention.layer_norm_rms_epsilon", allow_zero=True),
        rope_base=reader.positive("rope.freq_base", 10000.0),
        rotary_dim=rotary_dim,
        rope_scaling=_rope_scaling(reader, context),
    )


def _vocab(file: GgufFile) -> int:
    key = "tokenizer.ggml.tokens"
    if key in file.metadata:
        return len(file.metadata[key])  # type: ignore[arg-type]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(file.path, f"key {key}", "is missing", "the file has no vocabulary")
    return embedding.shape[0]


def _rope_scaling(reader: _Reader, context: int) -> RotaryScaling:
    kind = reader.file.get(f"{reader.architecture}.rope.scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            reader.file.path,
            f"key {reader.architecture}.rope.scaling.type",
            f"is {kind!r}",
            "none, linear and yarn are supported",
        )
    legacy = reader.positive("rope.scale_linear", 0.0, allow_zero=True)
    factor = reader.positive("rope.scaling.factor", legacy, allow_zero=True)
    if kind == "none" or factor == 0.0:
        return RotaryScaling()
    return RotaryScaling(
        factor=factor,
        yarn=kind == "yarn",
        original_context=reader.integer(
            "rope.scaling.original_context_length", 1, 1 << 24, context
        ),
        attention_factor=reader.positive("rope.scaling.attn_factor", 1.0),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed, range-checked access to the keys of one architecture."""

    file: GgufFile
    architecture: str

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        return self.key(name) in self.file.metadata

    def error(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(
            self.file.path, f"key {self.key(name)}", problem, "the file was converted wrongly"
        )

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        if default is None:
            value = self.file.require(self.key(name), int)
        else:
            value = self.file.get(self.key(name), int, default)
        if not low <= value <= high:
            raise self.error(name, f"is {value}, must be {low} to {high}")
        return value

    def positive(self, name: str, default: float | None = None, allow_zero: bool = False) -> float:
        if default is None:
            value = self.file.require(self.key(name), float)
        else:
            value = self.file.get(self.key(name), float, default)
        if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
            raise self.error(name, f"is {value}, must be a positive number")
        return value

    def per_layer(
        self, name: str, layers: int, low: int, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """A value for every layer from a scalar or an array of exactly ``layers`` entries."""
        value = self.file.metadata.get(self.key(name))
        if value is None and default is not None:
            return default
        if not isinstance(value, np.ndarray):
            return (self.integer(name, low, MAX_WIDTH),) * layers
        if len(value) != layers or not np.issubdtype(value.dtype, np.integer):
            raise self.error(name, f"has {len(value)} {value.dtype} entries for {layers} layers")
        if value.min() < low or value.max() > MAX_WIDTH:
            raise self.error(name, f"has entries outside {low} to {MAX_WIDTH}")
        return tuple(int(entry) for entry in value)
