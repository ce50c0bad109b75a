"""Host copies of device memory, and the transfers that keep the two in sync."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from accel.packets.footprint import MAPPED_OUTPUT_BYTES
from contract.arrays import Bytes
from contract.ir.nodes import BufferDecl, BufferKind
from contract.lazy_dataclass import dataclass


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


@dataclass(slots=True)
class StagingBuffers(Generic[A, T]):
    """The mapped memory of one device.

    ``transfer(allocation, host, to_device, first)`` enqueues a copy between ``host`` and the
    allocation from its byte ``first`` on. ``make(nbytes)`` allocates zeroed host memory."""

    transfer: Callable[[A, Bytes, bool, int], T]
    make: Callable[[int], Bytes]
    _mapped: list[A] = field(default_factory=list)

    def map(self, allocation: A) -> Bytes:
        """The host copy of an allocation, kept in sync from now on as ``sent`` and ``fetched``
        say."""
        host = allocation.host
        if host is None:
            host = allocation.host = self.make(allocation.nbytes)
            self._mapped.append(allocation)
        elif allocation.fetched:
            return host
        if allocation.nbytes:
            self.transfer(allocation, host, False, 0).wait()
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

    def forget(self, allocation: A) -> None:
        """Stop synchronizing an allocation that is about to be freed."""
        self._mapped = [mapped for mapped in self._mapped if mapped is not allocation]

    def to_device(self) -> list[T]:
        """Enqueue the transfers of memory that the host may have written."""
        return self._sync([mapped for mapped in self._mapped if mapped.sent], True)

    def to_host(self) -> list[T]:
        """Enqueue the transfers of memory that the device may have written."""
        return self._sync([mapped for mapped in self._mapped if mapped.fetched], False)

    def states_to_host(self) -> list[T]:
        """Enqueue the part of ``to_host`` for memory that the host may also write."""
        both = [mapped for mapped in self._mapped if mapped.fetched and mapped.sent]
        return self._sync(both, False)

    def outputs_to_host(
        self, transfer: Callable[[A, Bytes, bool, int], T], written: Collection[A]
    ) -> list[T]:
        """Enqueue the part of ``to_host`` for the outputs among ``written``, by ``transfer``."""
        outputs = [
            mapped
            for mapped in self._mapped
            if mapped.fetched and not mapped.sent and mapped in written
        ]
        return self._sync(outputs, False, transfer)

    def _sync(
        self,
        allocations: list[A],
        to_device: bool,
        transfer: Callable[[A, Bytes, bool, int], T] | None = None,
    ) -> list[T]:
        transfer = transfer or self.transfer
        return [
            transfer(allocation, allocation.host, to_device, 0)
            for allocation in allocations
            if allocation.host is not None and allocation.nbytes
        ]


class StagedMemory(Generic[A, T]):
    """Device memory that the host accesses through ``staging``."""

    staging: StagingBuffers[A, T]

    def map(self, allocation: A) -> Bytes:
        return self.staging.map(allocation)

    def read(self, allocation: A, offset: int, nbytes: int) -> Bytes:
        return self.staging.read(allocation, offset, nbytes)

    def write(self, allocation: A, offset: int, data: Bytes) -> None:
        self.staging.write(allocation, offset, data)

    def to_device(self) -> list[T]:
        return self.staging.to_device()

    def to_host(self) -> list[T]:
        return self.staging.to_host()
