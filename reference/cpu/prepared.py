"""What the CPU tier remembers of the weights it has unpacked."""

from __future__ import annotations

import threading
from collections import OrderedDict

import psutil

from contract.dtypes import DType
from reference.cpu.weights import PreparedWeight, prepare_weight
from reference.matrix import Matrix

EXPERT_MEMORY_SHARE = 4
"""Prepared experts may take one part in this many of the machine's memory."""

Key = tuple[int, DType, tuple[int, ...]]


def expert_memory_limit() -> int:
    """Bytes of prepared experts kept at most."""
    return int(psutil.virtual_memory().total) // EXPERT_MEMORY_SHARE


class PreparedExperts:
    """Slices of three-dimensional weights, prepared when first used; the least recently used go.

    A file's experts may be larger prepared than the machine's memory. Safe to use from several
    threads: two that want a new expert at once both prepare it, and one result is kept.
    ``limit_bytes`` is how much to keep, at least the expert asked for last.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        if limit_bytes is None:
            limit_bytes = expert_memory_limit()
        self._limit = limit_bytes
        self._prepared: OrderedDict[Key, PreparedWeight] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes of the experts held."""

    def prepare(self, matrix: Matrix, index: int) -> PreparedWeight:
        """Slice ``index`` of ``matrix``, prepared on the calling thread alone."""
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
        """Drop every slice of ``matrix``."""
        with self._lock:
            for index in range(matrix.shape[0]):
                dropped = self._prepared.pop(_memory_of(matrix.expert(index)), None)
                self.nbytes -= dropped.nbytes if dropped is not None else 0


class PreparedMatrices:
    """Prepared weights by the memory they were prepared from: a matrix is unpacked once."""

    def __init__(self) -> None:
        self._prepared: dict[Key, PreparedWeight] = {}
        self.experts = PreparedExperts()

    def prepare(self, matrix: Matrix) -> PreparedWeight:
        """The prepared form of ``matrix``, made on first use."""
        key = _memory_of(matrix)
        if key not in self._prepared:
            self._prepared[key] = prepare_weight(matrix.dtype, matrix.blocks)
        return self._prepared[key]

    def forget(self, matrix: Matrix) -> None:
        """Drop the prepared form, if any: the matrix's memory may hold another one next."""
        self._prepared.pop(_memory_of(matrix), None)
        if len(matrix.shape) == 3:
            self.experts.forget(matrix)

    @property
    def nbytes(self) -> int:
        """Bytes of all prepared weights."""
        return sum(weight.nbytes for weight in self._prepared.values()) + self.experts.nbytes


def _memory_of(matrix: Matrix) -> Key:
    return matrix.blocks.__array_interface__["data"][0], matrix.dtype, matrix.blocks.shape
