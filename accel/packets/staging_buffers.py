"""Device memory with copies in host memory, and the transfers that keep the two in sync."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from accel.packets.footprint import MAPPED_OUTPUT_BYTES
from contract.arrays import Bytes
from contract.ir.nodes import BufferDecl, BufferKind


@runtime_checkable
class Synced(Protocol):
    """``nbytes`` of device memory that may have a copy in host memory.

    Once mapped, the copy is written to the device before a submission to an idle device if
    ``sent``, and read from it after every submission if ``fetched``. Memory that is not fetched is
    read whenever it is mapped."""

    nbytes: int
    sent: bool
    fetched: bool


class Staged(Synced, Protocol):
    """Memory with the host copy ``host``, None until it is mapped."""

    host: Bytes | None


class Transfer(Protocol):
    """An enqueued copy."""

    def wait(self) -> object:
        """Return when the copy has ended."""


def sync_as(allocation: Synced, decl: BufferDecl) -> None:
    """Choose when the memory of graph buffer ``decl`` is synchronized: inputs and states before and
    after steps, small outputs after steps, large outputs on demand."""
    allocation.sent = decl.kind is not BufferKind.OUTPUT
    allocation.fetched = allocation.sent or allocation.nbytes < MAPPED_OUTPUT_BYTES


A = TypeVar("A", bound=Staged)
T = TypeVar("T", bound=Transfer)


class StagedMemory(ABC, Generic[A, T]):
    """Device memory that the host accesses through copies: ``_mapped`` is what has one.

    Hooks that a memory implements: ``transfer`` and ``_host_memory``."""

    _mapped: list[A]

    @abstractmethod
    def transfer(self, allocation: A, host: Bytes, to_device: bool, first: int = 0) -> T:
        """Hook: enqueue a copy between ``host`` and the allocation from its byte ``first`` on."""

    @abstractmethod
    def _host_memory(self, nbytes: int) -> Bytes:
        """Hook: zeroed host memory."""

    def map(self, allocation: A) -> Bytes:
        """The host copy of an allocation, kept in sync from now on as ``sent`` and ``fetched``
        say."""
        host = allocation.host
        if host is None:
            host = allocation.host = self._host_memory(allocation.nbytes)
            self._mapped.append(allocation)
        elif allocation.fetched:
            return host
        if allocation.nbytes:
            self.transfer(allocation, host, False).wait()
        return host

    def read(self, allocation: A, offset: int, nbytes: int) -> Bytes:
        """A copy of ``nbytes`` bytes from ``offset`` on; of mapped memory from the host copy, which
        is current."""
        if allocation.host is not None and allocation.fetched:
            return allocation.host[offset : offset + nbytes].copy()
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            self.transfer(allocation, data, False, offset).wait()
        return data

    def write(self, allocation: A, offset: int, data: Bytes) -> None:
        """Replace some of the bytes."""
        if allocation.host is not None:
            allocation.host[offset : offset + data.nbytes] = data
        if data.nbytes:
            self.transfer(allocation, np.ascontiguousarray(data), True, offset).wait()

    def to_device(self) -> list[T]:
        """Enqueue the transfers of memory that the host may have written."""
        return self._sync([mapped for mapped in self._mapped if mapped.sent], True)

    def to_host(self) -> list[T]:
        """Enqueue the transfers of memory that the device may have written."""
        return self._sync([mapped for mapped in self._mapped if mapped.fetched], False)

    def _forget(self, allocation: A) -> None:
        """Stop synchronizing an allocation that is about to be freed."""
        self._mapped = [mapped for mapped in self._mapped if mapped is not allocation]

    def _sync(self, allocations: list[A], to_device: bool) -> list[T]:
        return [
            self.transfer(allocation, allocation.host, to_device)
            for allocation in allocations
            if allocation.host is not None and allocation.nbytes
        ]
