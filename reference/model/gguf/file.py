"""An open GGUF model: one file, or all shards of a split model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

import numpy as np

from contract.context_manager import ContextManager
from contract.errors import ModelFileError, UnsupportedModel
from contract.file_reads import read_pages
from reference.model.gguf.cursor import shown
from reference.model.gguf.metadata import Kind, Value, typed_value
from reference.model.gguf.shard import Shard
from reference.model.gguf.split import open_shards
from reference.model.gguf.tensors import TensorInfo
from reference.model.gguf.types import GgufType

_ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
}


class GgufFile(ContextManager):
    """An open model file; every array it returns is a read-only view of the mapped file.

    A file must not be truncated while it is mapped: reading a lost part ends the process (SIGBUS)
    unless a tier guards the mapping, as the native one does. ``check_unchanged`` runs before every
    tensor is returned and should run at step boundaries, but cannot see a truncation between the
    check and the use. Replacing the file by renaming another over it is always safe.

    After ``close`` the object raises ValueError. Views returned before stay valid, and the file
    stays mapped until the last of them is gone."""

    __slots__ = ("_metadata", "_shards", "_tensors", "_value_types", "path")

    def __init__(self, path: Path, shards: tuple[Shard, ...]) -> None:
        first = shards[0].header
        self.path = path
        self._shards = shards
        self._metadata = MappingProxyType(first.metadata)
        self._value_types = MappingProxyType(first.value_types)
        self._tensors = MappingProxyType(
            {tensor.name: tensor for shard in shards for tensor in shard.header.tensors}
        )

    def close(self) -> None:
        """Close the files. Closing twice is harmless."""
        shards, self._shards = self._shards, ()
        for shard in shards:
            shard.close()
        self._metadata = MappingProxyType({})
        self._value_types = MappingProxyType({})
        self._tensors = MappingProxyType({})

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The mapped files, in order."""
        self._check_open()
        return self._shards

    def read_ahead(self) -> Thread:
        """Start reading the tensors into memory, for a caller about to read all of them. The daemon
        thread ends by itself."""
        return read_ahead(self.shards)

    @property
    def version(self) -> int:
        """The GGUF version of the first file: 2 or 3."""
        return self.shards[0].header.version

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(shard.size for shard in self.shards)

    @property
    def metadata(self) -> Mapping[str, Value]:
        """Values by key, in file order; for a split model those of the first file."""
        self._check_open()
        return self._metadata

    @property
    def value_types(self) -> Mapping[str, GgufType]:
        """The stored type of every metadata value; an array's item type is its dtype."""
        self._check_open()
        return self._value_types

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name, over all files, in file order."""
        self._check_open()
        return self._tensors

    def require(self, key: str, kind: type[Kind]) -> Kind:
        """The metadata value of ``key``; ``kind`` is int, float, str, bool, ndarray or StringArray.

        Integers may have any stored width, and a float may be stored as an integer. Raises
        ModelFileError when the key is missing or of another kind."""
        return typed_value(self.path, self.metadata, key, kind)

    def get(self, key: str, kind: type[Kind], default: Kind) -> Kind:
        """Like ``require``, but ``default`` when the key is missing."""
        return self.require(key, kind) if key in self.metadata else default

    def tensor_bytes(self, name: str) -> np.ndarray:
        """A tensor's blocks, uint8 [rows, row_bytes]; rows run over all dimensions but the last.
        Raises ModelFileError when there is no such tensor or its file has changed, and
        UnsupportedModel when this build knows only the size of its type."""
        tensor = self._tensor(name)
        if tensor.dtype is None:
            raise self._unsupported(tensor, "a type this build has no arithmetic for")
        return self._view(tensor).reshape(tensor.rows, tensor.row_bytes)

    def tensor_array(self, name: str) -> np.ndarray:
        """A tensor of plain numbers in its logical shape: f32, f16, i32, i64, or bf16 as uint16.
        Raises as ``tensor_bytes`` does, and UnsupportedModel when the tensor is quantized."""
        tensor = self._tensor(name)
        if tensor.ggml_type.name not in _ARRAY_DTYPES:
            raise self._unsupported(tensor, "where f32, f16, bf16, i32 or i64 is needed")
        return self._view(tensor).view(_ARRAY_DTYPES[tensor.ggml_type.name]).reshape(tensor.shape)

    def check_unchanged(self) -> None:
        """Raise ModelFileError when any of the files was resized or written since it was opened."""
        for shard in self.shards:
            shard.check_unchanged()

    def _check_open(self) -> None:
        if not self._shards:
            raise ValueError(f"{self.path} is closed")

    def _tensor(self, name: str) -> TensorInfo:
        self._check_open()
        if name not in self._tensors:
            raise ModelFileError(
                self.path,
                f"tensor {shown(name)}",
                "is missing",
                "the file was converted wrongly or is of another architecture",
            )
        return self._tensors[name]

    def _view(self, tensor: TensorInfo) -> np.ndarray:
        shard = self._shards[tensor.shard]
        shard.check_unchanged()
        return shard.view(tensor.offset, tensor.nbytes)

    def _unsupported(self, tensor: TensorInfo, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            self._shards[tensor.shard].path,
            f"tensor {shown(tensor.name)}",
            f"is of type {tensor.ggml_type}, {why}",
            "use another quantization of the model",
        )


def open_gguf(path: str | Path) -> GgufFile:
    """Open a GGUF model for reading. For a split model pass the first file; the others are found.

    Only the headers are read. Raises ModelFileError for a file that is missing, cannot be mapped,
    is not a well-formed little-endian GGUF file of version 2 or 3, or is a shard whose companions
    are missing or belong to another model."""
    path = Path(path)
    return GgufFile(path, open_shards(path))


MAX_BYTES = 1 << 30
"""Most bytes to read ahead; reading more takes so long that the first bytes no longer matter."""


def read_ahead(shards: Sequence[Shard]) -> Thread:
    """Start a daemon thread that reads the first shard into memory and the process's page table."""
    thread = Thread(target=_read, args=(shards[:1],), name="read ahead", daemon=True)
    thread.start()
    return thread


def _read(shards: Sequence[Shard]) -> None:
    for shard in shards:
        # The view keeps the mapping alive even when the file is closed meanwhile.
        read_pages(np.frombuffer(shard.mapping, np.uint8, min(shard.size, MAX_BYTES)))
