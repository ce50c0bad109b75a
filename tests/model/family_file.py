"""A small random-weight file, as dictionaries a test can change before writing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from contract.dtypes import F16, F32
from reference.model.config import ModelConfig
from reference.model.gguf.writer import HOLE, write_gguf
from reference.model.open import open_model

HIDDEN, VOCAB = 80, 96

Array = np.ndarray


@dataclass
class FamilyFile:
    """``keys`` are without the architecture's prefix; ``values`` are row-major."""

    architecture: str
    keys: dict[str, Any]
    values: dict[str, Array] = field(default_factory=dict)

    def add(self, name: str, *shape: int) -> None:
        """A tensor of random numbers that its name alone decides."""
        self.values[name] = random_values(name, shape)

    def rows(self, name: str, rows: int, columns: int = HIDDEN) -> None:
        """A matrix."""
        self.add(f"{name}.weight", rows, columns)

    def vector(self, name: str, width: int = HIDDEN) -> None:
        """A vector with the suffix of a weight."""
        self.add(f"{name}.weight", width)

    def stack(self, name: str, *parts: str, axis: int = 0) -> None:
        """Tensor ``name`` from ``parts``, which go, joined along ``axis``."""
        self.values[name] = np.concatenate([self.values.pop(part) for part in parts], axis)

    def stack_qkv(self, layer: int, suffix: str = "weight") -> None:
        """Queries, keys and values of a layer as one tensor."""
        prefix = f"blk.{layer}.attn_"
        self.stack(f"{prefix}qkv.{suffix}", *(f"{prefix}{side}.{suffix}" for side in "qkv"))

    def interleave(self, name: str, groups: int, *parts: str) -> None:
        """Tensor ``name``: for each of ``groups``, the rows of that group of every part."""
        pieces = [self.values.pop(part) for part in parts]
        split = [piece.reshape(groups, -1, piece.shape[-1]) for piece in pieces]
        self.values[name] = np.concatenate(split, axis=1).reshape(-1, pieces[0].shape[-1])

    @property
    def metadata(self) -> dict[str, Any]:
        """All keys, as the file has them."""
        return {
            "general.architecture": self.architecture,
            "tokenizer.ggml.tokens": [f"token {n}" for n in range(VOCAB)],
            **{self._whole(key): value for key, value in self.keys.items()},
        }

    def _whole(self, key: str) -> str:
        return key if key.startswith("xielu.") else f"{self.architecture}.{key}"

    def write(
        self, path: Path, changed: Mapping[str, Any] = MappingProxyType({}), *, bare: bool = False
    ) -> Path:
        """The file with ``changed`` metadata, F32 but for values of another width. A ``bare`` one
        has holes for values."""
        stored = {np.dtype(np.float32): F32, np.dtype(np.float16): F16}
        tensors = {
            name: (stored[value.dtype], value.shape, HOLE if bare else np.ascontiguousarray(value))
            for name, value in self.values.items()
        }
        write_gguf(path, {**self.metadata, **changed}, tensors)
        return path


def config_of(file: FamilyFile, folder: Path) -> ModelConfig:
    """The configuration that is read from ``file``, written to ``folder``: no value decides it."""
    with closing(open_model(file.write(folder / "model.gguf", bare=True))) as model:
        return model.config


def random_values(name: str, shape: tuple[int, ...]) -> Array:
    """Products that keep their inputs' size; norms and scales near 1, decays below 0."""
    return _drawn(name, shape).copy()


@lru_cache(maxsize=256)
def _drawn(name: str, shape: tuple[int, ...]) -> Array:
    """Tests write a file many times, of which one tensor or key is another each time."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    drawn = np.random.default_rng(seed).standard_normal(shape)
    if name.endswith("ssm_a"):
        drawn = -np.exp(drawn)
    elif "conv1d" in name or name.endswith(".bias"):
        drawn = drawn * 0.5
    elif len(shape) == 1 and "shexp" not in name:
        drawn = 1.0 + 0.3 * drawn
    elif name != "token_embd.weight":
        drawn = drawn / math.sqrt(shape[-1])
    return drawn.astype(np.float32)
