"""An open GGUF model: one file, or all shards of a split model, which are named
``<stem>-00001-of-000NN.gguf`` by GGUF's convention."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

import numpy as np

from contract.context_manager import ContextManager
from contract.errors import ModelFileError, UnsupportedModel
from contract.file_reads import read_pages
from reference.model.gguf.cursor import shown
from reference.model.gguf.limits import MAX_SHARDS, MAX_TENSORS
from reference.model.gguf.metadata import Kind, Value, typed_value
from reference.model.gguf.shard import Shard, open_shard
from reference.model.gguf.tensors import TensorInfo
from reference.model.gguf.types import GgufType

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_NUMBER_KEY = "split.no"
_COUNT_KEY = "split.count"
_TENSORS_KEY = "split.tensors.count"
_ARCHITECTURE_KEY = "general.architecture"
_FETCH = "fetch all files of the model again"


def open_shards(path: Path) -> tuple[Shard, ...]:
    """Every file of the model whose first file is ``path``, in order. Raises ModelFileError when
    ``path`` is not the first file, or another one is missing, is not the shard its name says, or
    belongs to another model."""
    with ExitStack() as opened:
        shards = [open_shard(path, 0)]
        opened.callback(shards[0].close)
        count = _shard_count(shards[0])
        for number in range(1, count):
            sibling = _sibling(path, number, count)
            shard = open_shard(sibling, number)
            opened.callback(shard.close)
            _check_sibling(shard, shards[0], number, count)
            shards.append(shard)
        _check_tensors(shards)
        opened.pop_all()
    return tuple(shards)


def _integer(shard: Shard, key: str) -> int:
    return typed_value(shard.path, shard.header.metadata, key, int)


def _shard_count(first: Shard) -> int:
    """The number of files of the model; raises ModelFileError unless ``first`` is the first of
    them."""
    path = first.path
    named = _NAME.fullmatch(path.name)
    if _COUNT_KEY not in first.header.metadata:
        if named and int(named["count"]) > 1:
            raise ModelFileError(
                path, f"key {shown(_COUNT_KEY)}", "is missing in a file named as a shard", _FETCH
            )
        return 1
    count = _integer(first, _COUNT_KEY)
    if not 1 <= count <= MAX_SHARDS:
        raise ModelFileError(
            path, f"key {shown(_COUNT_KEY)}", f"{count} is not from 1 to {MAX_SHARDS}", _FETCH
        )
    number = _integer(first, _NUMBER_KEY) if count > 1 else 0
    if number != 0:
        name = _sibling(path, 0, count).name if named else f"...-00001-of-{count:05}.gguf"
        raise ModelFileError(
            path,
            f"key {shown(_NUMBER_KEY)}",
            f"this is shard {number + 1} of {count}",
            f"open the first one, {name}",
        )
    return count


def _sibling(path: Path, number: int, count: int) -> Path:
    """The path of shard ``number`` (from 0) in the folder of ``path``, which may be any link."""
    for candidate in (path, path.resolve()):
        named = _NAME.fullmatch(candidate.name)
        if named and int(named["count"]) == count:
            return candidate.with_name(f"{named['stem']}-{number + 1:05}-of-{count:05}.gguf")
    raise ModelFileError(
        path,
        "the file name",
        f"does not end in -00001-of-{count:05}.gguf, so its other shards cannot be found",
        "give the files the names they were made with",
    )


def _check_sibling(shard: Shard, first: Shard, number: int, count: int) -> None:
    expected = {_NUMBER_KEY: number, _COUNT_KEY: count, _TENSORS_KEY: _integer(first, _TENSORS_KEY)}
    for key, value in expected.items():
        found = _integer(shard, key)
        if found != value:
            raise ModelFileError(
                shard.path, f"key {shown(key)}", f"is {found}, not {value}: not this shard", _FETCH
            )
    architecture = shard.header.metadata.get(_ARCHITECTURE_KEY)
    if architecture is not None and architecture != first.header.metadata.get(_ARCHITECTURE_KEY):
        raise ModelFileError(
            shard.path,
            f"key {shown(_ARCHITECTURE_KEY)}",
            f"differs from that of {first.path.name}: a shard of another model",
            _FETCH,
        )


def _check_tensors(shards: list[Shard]) -> None:
    """Check that names are unique over all shards and as many as the first file says."""
    first = shards[0]
    homes: dict[str, Shard] = {}
    for shard in shards:
        for tensor in shard.header.tensors:
            if tensor.name in homes:
                raise ModelFileError(
                    shard.path,
                    f"tensor {shown(tensor.name)}",
                    f"is also in {homes[tensor.name].path.name}",
                    _FETCH,
                )
            homes[tensor.name] = shard
        if len(homes) > MAX_TENSORS:
            raise ModelFileError(
                shard.path, "the tensor list", f"brings more than {MAX_TENSORS} tensors", _FETCH
            )
    if _TENSORS_KEY in first.header.metadata and _integer(first, _TENSORS_KEY) != len(homes):
        raise ModelFileError(
            first.path,
            f"key {shown(_TENSORS_KEY)}",
            f"is {_integer(first, _TENSORS_KEY)}, but the files hold {len(homes)} tensors",
            _FETCH,
        )


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

    def path_of(self, name: str) -> Path:
        """The path of the file that holds a tensor, or of the first file where none does."""
        shards, tensor = self.shards, self._tensors.get(name)
        return self.path if tensor is None else shards[tensor.shard].path

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
            self.path_of(tensor.name),
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
