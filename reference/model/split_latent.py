"""Files of deepseek2 that were converted before latent rows: one matrix makes the keys and values
of all heads. It is split here as converters do now: the part for keys is transposed, head by
head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from contract.arrays import Bytes
from contract.dtypes import F32
from contract.errors import ModelFileError
from contract.lazy_dataclass import dataclass
from reference.model.config import ModelConfig
from reference.model.gguf.file import GgufFile
from reference.model.gguf.tensors import TensorInfo
from reference.model.gguf.types import GGML_TYPES
from reference.quant import FORMATS

JOINED, KEYS, VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"


def is_joined(file: GgufFile, config: ModelConfig) -> bool:
    """Whether keys and values of ``file`` are made by one matrix."""
    return config.latent is not None and any(name.endswith(JOINED) for name in file.tensors)


@dataclass(frozen=True)
class SplitFile:
    """The tensors of such a file, with two for each that is joined.

    The one for keys has the joined one's type if that is of plain numbers. Columns of blocks cannot
    be transposed: then it holds the numbers that the blocks mean, in binary32."""

    file: GgufFile
    config: ModelConfig

    @property
    def path(self) -> Path:
        """The path of the model file."""
        return self.file.path

    def path_of(self, name: str) -> Path:
        """The path of the file that holds a tensor, or the one that it is a part of."""
        return self.file.path_of(name if name in self.file.tensors else _whole(name))

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name. Raises ModelFileError for a joined one of another shape than the
        metadata say."""
        return {
            part.name: part
            for name, info in self.file.tensors.items()
            for part in (self._parts(info) if name.endswith(JOINED) else (info,))
        }

    def tensor_bytes(self, name: str) -> Bytes:
        """A tensor's blocks, uint8[rows, row_bytes]."""
        joined = _whole(name)
        if name in self.file.tensors or joined not in self.file.tensors:
            return self.file.tensor_bytes(name)
        heads, unrotated, _, rank = self._sizes
        rows = self.file.tensor_bytes(joined)
        by_head = rows.reshape(heads, -1, rows.shape[1])
        if name.endswith(VALUES):
            return by_head[:, unrotated:].reshape(-1, rows.shape[1])
        dtype = self.file.tensors[joined].dtype
        assert dtype is not None
        keys = by_head[:, :unrotated]
        if dtype.block_elements > 1:
            numbers = FORMATS[dtype].dequantize(keys.reshape(-1, rows.shape[1])).astype("<f4")
            keys, dtype = numbers.view(np.uint8), F32
        elements = keys.reshape(heads, unrotated, rank, dtype.block_bytes)
        return np.ascontiguousarray(elements.swapaxes(1, 2)).reshape(heads * rank, -1)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """Heads, the channels of their keys that do not rotate and of their values, and of rows."""
        latent = self.config.latent
        assert latent is not None
        return self.config.heads[0], latent.unrotated, latent.value, latent.rank

    def _parts(self, info: TensorInfo) -> Iterator[TensorInfo]:
        """The tensors for keys and for values."""
        heads, unrotated, value, rank = self._sizes
        if info.shape != (heads * (unrotated + value), rank):
            problem = f"has shape {list(info.shape)}"
            expected = f"the metadata asks for {[heads * (unrotated + value), rank]}"
            raise ModelFileError(self.path, f"tensor {info.name}", problem, expected)
        plain = info.dtype is None or info.dtype.block_elements == 1
        kind = info.ggml_type if plain else GGML_TYPES[F32.ggml_id]
        prefix, element = info.name.removesuffix(JOINED), info.row_bytes // rank if plain else 4
        keys, values = (heads, rank, unrotated), (heads, value, rank)
        yield replace(
            info, name=prefix + KEYS, shape=keys, ggml_type=kind, nbytes=math.prod(keys) * element
        )
        yield replace(
            info, name=prefix + VALUES, shape=values, nbytes=heads * value * info.row_bytes
        )


def _whole(name: str) -> str:
    """The name of the joined tensor that a part is of."""
    return name.removesuffix(KEYS).removesuffix(VALUES) + JOINED
