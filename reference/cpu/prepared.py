"""The CPU tier's caches of weights it has unpacked."""

from __future__ import annotations

import threading
from collections import OrderedDict

import psutil

from contract.dtypes import DType
from contract.memory_limits import most_memory
from reference.cpu.weights import PreparedWeight, prepare_weight
from reference.matrix import Matrix

EXPERT_MEMORY_SHARE = 4
"""Prepared experts may use 1 / this of the memory that the process may have."""

Key = tuple[int, DType, tuple[int, ...]]


def expert_memory_limit() -> int:
    """Most bytes of prepared experts in the cache."""
    return most_memory(psutil.virtual_memory().total) // EXPERT_MEMORY_SHARE


class PreparedExperts:
    """A cache of experts' matrices, prepared on first use; the least recently used are dropped.

    All prepared experts of a file may exceed the machine's memory. Safe to use from several
    threads: two that need the same new expert both prepare it, and one result is cached.
    ``limit_bytes`` limits the cache, which always holds at least the last expert."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        if limit_bytes is None:
            limit_bytes = expert_memory_limit()
        self._limit = limit_bytes
        self._prepared: OrderedDict[Key, PreparedWeight] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes of the experts in the cache."""

    def prepare(self, matrix: Matrix, index: int) -> PreparedWeight:
        """The prepared expert ``index`` of ``matrix``; the calling thread prepares it alone."""
        expert = matrix.expert(index)
        key = _memory_of(expert)
        with self._lock:
            if key in self._prepared:
                self._prepared.move_to_end(key)
                return self._prepared[key]
        made = prepare_weight(expert.dtype, expert.blocks, threads=1)
        with self._lock:
            if key not in self._prepared:
                self._prepared[key] = made
                self.nbytes += made.nbytes
            while self.nbytes > self._limit and len(self._prepared) > 1:
                _, dropped = self._prepared.popitem(last=False)
                self.nbytes -= dropped.nbytes
        return made

    def forget(self, matrix: Matrix) -> None:
        """Drop every expert of ``matrix``."""
        with self._lock:
            for index in range(matrix.shape[0]):
                dropped = self._prepared.pop(_memory_of(matrix.expert(index)), None)
                self.nbytes -= dropped.nbytes if dropped is not None else 0


class PreparedMatrices:
    """A cache of prepared weights by their memory address: a matrix is unpacked once."""

    def __init__(self) -> None:
        self._prepared: dict[Key, PreparedWeight] = {}
        self.experts = PreparedExperts()

    def prepare(self, matrix: Matrix) -> PreparedWeight:
        """The prepared form of ``matrix``, computed on first use; of the first rows of one it is a
        view."""
        if matrix.whole is not None:
            return self.prepare(matrix.whole).first_rows(matrix.shape[0])
        key = _memory_of(matrix)
        if key not in self._prepared:
            self._prepared[key] = prepare_weight(matrix.dtype, matrix.blocks)
        return self._prepared[key]

    def forget(self, matrix: Matrix) -> None:
        """Drop the prepared form, if any: another matrix may use the same memory next."""
        self._prepared.pop(_memory_of(matrix), None)
        if len(matrix.shape) == 3:
            self.experts.forget(matrix)

    @property
    def nbytes(self) -> int:
        """Bytes of all prepared weights."""
        return sum(weight.nbytes for weight in self._prepared.values()) + self.experts.nbytes


def _memory_of(matrix: Matrix) -> Key:
    return matrix.blocks.ctypes.data, matrix.dtype, matrix.blocks.shape
