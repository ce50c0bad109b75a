"""LoRA adapters: files of low-rank matrices that requests add to projections of a model.

An adapter changes a projection y = W x to y + s (r (B (A x))): A is ``NAME.lora_a`` of its file, B
``NAME.lora_b``, r its alpha divided by its rank, s the scale of the request. The matrices of all
adapters of a projection are one stacked tensor each, like those of experts, padded with zeros to
the largest rank. The first entries are zeros, one for each adapter that a request may combine: rows
without an adapter use them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Set
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from contract.arrays import Bytes, Floats
from contract.errors import ModelFileError, RequestError, UnsupportedModel
from contract.lazy_dataclass import dataclass
from reference.model.gguf.file import GgufFile, open_gguf
from reference.model.gguf.tensors import TensorInfo
from reference.quant import FORMATS

MAX_COMBINED = 4
"""Most adapters that one request combines."""
STACKED = "lora:"
"""Prefix of the names of stacked tensors, which no model file has."""
A, B, FACTOR = ".lora_a", ".lora_b", ".factor"
"""Endings of a projection's tensors: in files, but for the factors r, and of stacked ones."""
LARGEST_SCALE = 1e6
INVOKED = "adapter.alora.invocation_tokens"
"""The key of adapters that take effect only from certain tokens of a prompt on."""

Scales = tuple[tuple[int, float], ...]
"""The adapters of a request: (index, scale) with distinct indices."""


class TensorFile(Protocol):
    """Tensors by name: a model file, or one with adapters."""

    def path_of(self, name: str) -> Path:
        """The path of the file that holds a tensor."""
        ...

    def tensor_bytes(self, name: str) -> Bytes:
        """A tensor's blocks, uint8[rows, row_bytes]."""
        ...


def numbers_of(file: GgufFile, name: str) -> Floats:
    """The numbers of a tensor, float32[rows, columns]. Raises ModelFileError for one that is not
    finite."""
    dtype = file.tensors[name].dtype
    assert dtype is not None
    values: Floats = FORMATS[dtype].dequantize(file.tensor_bytes(name))
    if not np.isfinite(values).all():
        problem = "holds a number that is not finite"
        remedy = "fetch the file again or convert it again"
        raise ModelFileError(file.path_of(name), f"tensor {name}", problem, remedy)
    return values


@dataclass(frozen=True)
class Adapter:
    """An open adapter file. ``shapes`` has (outputs, rank, inner) of every tensor of the model that
    it changes; ``digest`` is the SHA-256 of the file, or of all its parts, in hex."""

    file: GgufFile
    shapes: Mapping[str, tuple[int, int, int]]
    alpha: float
    digest: str

    def factor(self, tensor: str) -> float:
        """Alpha over the tensor's rank; 1 in files without alpha."""
        return self.alpha / self.shapes[tensor][1] if self.alpha else 1.0

    def values(self, tensor: str, part: str) -> Floats:
        """The matrix A or B of a tensor. Raises ModelFileError for a number that is not finite."""
        return numbers_of(self.file, tensor + part)


@dataclass(frozen=True)
class Adapters:
    """The adapters of an open model, by index."""

    opened: tuple[Adapter, ...] = ()

    @property
    def combined(self) -> int:
        """Most adapters that one request combines, 0 if there are none."""
        return min(len(self.opened), MAX_COMBINED)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, int, int]]:
        """(outputs, largest rank, inner) of every tensor that some adapter changes."""
        found: dict[str, tuple[int, int, int]] = {}
        for adapter in self.opened:
            for name, (outputs, rank, inner) in adapter.shapes.items():
                found[name] = outputs, max(rank, found.get(name, (0, 0, 0))[1]), inner
        return MappingProxyType(found)

    @property
    def entries(self) -> int:
        """Entries of a stacked tensor."""
        return self.combined + len(self.opened)

    @property
    def nbytes(self) -> int:
        """Bytes of all stacked tensors."""
        numbers = [1 + rank * (outputs + inner) for outputs, rank, inner in self.shapes.values()]
        return np.dtype(np.float32).itemsize * self.entries * sum(numbers)

    def tensor_bytes(self, name: str) -> Bytes:
        """A stacked tensor of binary32 numbers, uint8[rows, row_bytes]."""
        tensor, part = _split(name.removeprefix(STACKED))
        outputs, rank, inner = self.shapes[tensor]
        shapes = {A: (rank, inner), B: (outputs, rank), FACTOR: (1,)}
        stacked = np.zeros((self.entries, *shapes[part]), np.float32)
        for entry, adapter in zip(stacked[self.combined :], self.opened, strict=True):
            if tensor not in adapter.shapes:
                continue
            if part == FACTOR:
                entry[0] = adapter.factor(tensor)
            else:
                values = adapter.values(tensor, part)
                entry[: values.shape[0], : values.shape[1]] = values
        rows = 1 if part == FACTOR else self.entries * shapes[part][0]
        return stacked.reshape(rows, -1).view(np.uint8)

    def check(self, scales: Scales) -> None:
        """Raise RequestError for an invalid choice of adapters."""
        if not scales:
            return
        indices = [index for index, _ in scales]
        for index, scale in scales:
            if type(index) is not int or not 0 <= index < len(self.opened):
                known = f"0 to {len(self.opened) - 1}" if self.opened else "none"
                raise RequestError("lora", f"names adapter {index!r}; this model has {known}")
            if type(scale) not in (int, float) or not abs(scale) <= LARGEST_SCALE:
                raise RequestError("lora", f"has the scale {scale!r}, not a number within 1e6")
        if len(set(indices)) < len(indices):
            raise RequestError("lora", "names an adapter twice")
        if len(self.used(scales)) > self.combined:
            count = len(self.used(scales))
            raise RequestError("lora", f"combines {count} adapters, at most {self.combined} work")

    def reject_unread(self, read: Set[str], drafting: tuple[str, ...] = ()) -> None:
        """Raise UnsupportedModel for the first tensor of an adapter that no projection reads. Names
        of blocks that draft tokens begin with one of ``drafting``."""
        for adapter in self.opened:
            for tensor in adapter.shapes:
                if tensor not in read:
                    problem = "changes an embedding, the output, a router or a shared expert"
                    if tensor.startswith(drafting):
                        problem = "changes a block that drafts tokens"
                    raise _unsupported(adapter.file, tensor + A, problem)

    def used(self, scales: Scales) -> Scales:
        """The adapters with an effect, in the order in which they are added: by digest."""
        if not scales:
            return ()
        changing = [one for one in scales if np.float32(one[1]) != 0.0]
        return tuple(sorted(changing, key=lambda one: (self.opened[one[0]].digest, one[1])))

    def identity(self, scales: Scales) -> tuple[str, ...]:
        """The identity of the adapters of a request: digests of files, and scales."""
        if not scales:
            return ()
        used = [(self.opened[index].digest, np.float32(s)) for index, s in self.used(scales)]
        return tuple(f"{digest}*{float(scale).hex()}" for digest, scale in used)


NO_ADAPTERS = Adapters()


@dataclass(frozen=True, slots=True)
class AdaptedFile:
    """The tensors of a model file, and the stacked ones of its adapters."""

    file: TensorFile
    adapters: Adapters

    def path_of(self, name: str) -> Path:
        """The path of the file that holds a tensor, the model's for stacked ones."""
        return self.file.path_of(name)

    def tensor_bytes(self, name: str) -> Bytes:
        """A tensor's blocks, uint8[rows, row_bytes]."""
        source = self.adapters if name.startswith(STACKED) else self.file
        return source.tensor_bytes(name)


def open_adapter(path: Path, model: GgufFile) -> Adapter:
    """Map an adapter file and check it against the model. Raises ModelFileError for a file that is
    malformed or of another model, UnsupportedModel for an adapter this build cannot apply."""
    file = open_gguf(path)
    try:
        _check_keys(file, model)
        # Imported here, because most models have no adapters.
        import hashlib

        digest = hashlib.sha256()
        for shard in file.shards:
            # The file that is open: another may have its name by now.
            with os.fdopen(os.dup(shard.descriptor), "rb") as data:
                data.seek(0)
                hashlib.file_digest(data, lambda: digest)
        alpha = file.get("adapter.lora.alpha", float, 0.0)
        if not math.isfinite(alpha):
            raise _broken(file, "key adapter.lora.alpha", f"is {alpha}")
        shapes = MappingProxyType(_shapes(file, model))
        file.check_unchanged()
        return Adapter(file, shapes, alpha, digest.hexdigest())
    except BaseException:
        file.close()
        raise


def _check_keys(file: GgufFile, model: GgufFile) -> None:
    for key, expected in (
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
        ("general.architecture", model.require("general.architecture", str)),
    ):
        found = file.get(key, str, "")
        if found != expected:
            state = f"is {found!r}" if found else "is missing"
            raise _broken(file, f"key {key}", f"{state}; an adapter of this model has {expected!r}")
    if INVOKED in file.metadata:
        raise UnsupportedModel(
            file.path, f"key {INVOKED}", "begins to work at certain tokens", "use a LoRA adapter"
        )


def _shapes(file: GgufFile, model: GgufFile) -> dict[str, tuple[int, int, int]]:
    """(outputs, rank, inner) of every tensor that the adapter changes."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, info in file.tensors.items():
        tensor, part = _split(name)
        if part not in (A, B):
            raise _unsupported(file, name, f"is neither {A[1:]} nor {B[1:]} of a matrix")
        base, other = model.tensors.get(tensor), file.tensors.get(tensor + (B if part == A else A))
        if base is None:
            raise _broken(file, f"tensor {name}", f"belongs to {tensor}, which the model lacks")
        if other is None:
            missing = B if part == A else A
            raise _broken(file, f"tensor {name}", f"has no {tensor}{missing} with it")
        if len(base.shape) != 2 or len(info.shape) != 2:
            raise _unsupported(file, name, "changes experts or a vector, not a projection's matrix")
        if info.dtype is None:
            raise _unsupported(file, name, f"is of type {info.ggml_type}")
        if part == A:
            found[tensor] = _shape(file, base, info, other)
    if not found:
        raise _broken(file, "the file", "has no tensors")
    return found


def _shape(file: GgufFile, base: TensorInfo, a: TensorInfo, b: TensorInfo) -> tuple[int, int, int]:
    (outputs, inner), rank = base.shape, a.shape[0]
    for info, expected in ((a, (rank, inner)), (b, (outputs, rank))):
        if info.shape != expected:
            raise _broken(
                file,
                f"tensor {info.name}",
                f"has shape {list(info.shape)}, not {list(expected)} as {base.name} asks for",
            )
    return outputs, rank, inner


def _split(name: str) -> tuple[str, str]:
    """The model tensor that an adapter's tensor belongs to, and the suffix that names its part."""
    tensor, dot, part = name.rpartition(".")
    return tensor, dot + part


def _broken(file: GgufFile, subject: str, problem: str) -> ModelFileError:
    return ModelFileError(file.path, subject, problem, "use an adapter of this model")


def _unsupported(file: GgufFile, name: str, problem: str) -> UnsupportedModel:
    advice = "use an adapter of attention and dense projections"
    return UnsupportedModel(file.path, f"tensor {name}", problem, advice)
