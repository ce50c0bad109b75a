"""The base of all device tiers: buffers, submission of steps, errors and closing.

A tier opens its device, passes this base its memory and submissions, and implements the methods
marked as hooks. Nothing here depends on a driver. ``packet_tier.py`` adds the lowering."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from accel.packets.buffers import Allocation, DeviceBuffer
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS, CompletionWaiter
from accel.packets.rules import OPCODES
from accel.packets.shape_buckets import shape_buckets
from accel.packets.staging_buffers import Synced, sync_as
from accel.packets.submissions import Completion, LoweredBatch, StepFence, Submissions
from contract.arithmetic import ARITHMETIC_VERSION
from contract.arrays import Bytes
from contract.context_manager import ContextManager
from contract.errors import DeviceLost
from contract.ir.inputs import InputRows
from contract.ir.nodes import BufferDecl
from contract.shape_key import ShapeKey
from contract.tier import PROMPT_TOKENS, TierInfo, check_range

A = TypeVar("A", bound=Allocation)
L = TypeVar("L")
C = TypeVar("C", bound=Completion)


class DeviceMemory(Protocol[A]):
    """The memory of one device. Sizes are in bytes."""

    @property
    def held(self) -> int:
        """Bytes allocated from the device, unused ones included."""

    @property
    def available(self) -> int:
        """Bytes that can still be allocated."""

    def allocate(self, purpose: str, nbytes: int, /) -> A:
        """Zeroed memory. Raises OutOfMemory naming its ``purpose``."""

    def adopt(self, purpose: str, data: Bytes, /) -> A:
        """Memory that contains ``data``. Raises OutOfMemory naming its ``purpose``."""

    def free(self, allocation: A, /) -> None:
        """Free memory that nothing submitted uses."""

    def map(self, allocation: A, /) -> Bytes:
        """See ``contract.tier.Tier.map``."""

    def read(self, allocation: A, offset: int, nbytes: int, /) -> Bytes:
        """A copy of some of the bytes."""

    def write(self, allocation: A, offset: int, data: Bytes, /) -> None:
        """Replace some of the bytes."""


def tier_info(
    name: str,
    device: str,
    driver: str,
    memory_bytes: int,
    host_unified: bool = False,
    prompt_tokens: int = PROMPT_TOKENS,
) -> TierInfo:
    """The identity and abilities of a tier of packets."""
    return TierInfo(
        name=name,
        device=device,
        driver=driver,
        arithmetic=f"exact-{ARITHMETIC_VERSION}",
        opcodes=OPCODES,
        memory_bytes=memory_bytes,
        host_unified=host_unified,
        asynchronous=True,
        prompt_tokens=prompt_tokens,
    )


class BaseTier(ContextManager, Generic[A, L, C]):
    """Everything that ``contract.tier.Tier`` requires except lowering.

    Hooks that a tier implements: ``_fill``, ``_finish``, ``_translated`` and ``_shut_down``."""

    def __init__(
        self, info: TierInfo, memory: DeviceMemory[A], submissions: Submissions[A, L, Any, C]
    ) -> None:
        self._info = info
        self._memory = memory
        self._submissions = submissions
        self._buffers: set[DeviceBuffer[A]] = set()
        self._scratch: A | None = None
        self._waiting = CompletionWaiter()
        self._lost = ""
        self._closed = False

    @property
    def info(self) -> TierInfo:
        """The device and its driver."""
        return self._info

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated from the device."""
        return self._memory.held

    @property
    def available_bytes(self) -> int:
        """Bytes that can still be allocated, as far as the device reports it."""
        with self._guarded("asking for free memory"):
            return self._memory.available

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        return shape_buckets(largest)

    def alloc(self, decl: BufferDecl, nbytes: int) -> DeviceBuffer[A]:
        """Zeroed memory. Raises OutOfMemory naming the buffer."""
        with self._guarded(decl.name):
            allocation = self._allocate(decl, nbytes)
        return self._keep(DeviceBuffer(decl, nbytes, allocation))

    def upload(self, decl: BufferDecl, data: Bytes) -> DeviceBuffer[A]:
        """Memory that contains ``data``; a matrix is arranged for the products. Raises OutOfMemory
        naming the buffer."""
        buffer: DeviceBuffer[A] = DeviceBuffer(decl, data.nbytes, source=data)
        with self._guarded(decl.name):
            self._fill(buffer)
        return self._keep(buffer)

    def free(self, buffer: DeviceBuffer[A]) -> None:
        """Free the memory; nothing submitted may still use it."""
        self._buffers.remove(buffer)
        if self._lost:
            return
        with self._guarded(buffer.name):
            self._finish_uploads()
            for allocation in buffer.allocations:
                self._memory.free(allocation)

    def map(self, buffer: DeviceBuffer[A]) -> Bytes:
        """The bytes in host memory; of a weight, those it was uploaded from."""
        if buffer.source is not None:
            return buffer.source
        with self._guarded(buffer.name):
            return self._memory.map(self._stored(buffer))

    def read(self, buffer: DeviceBuffer[A], offset: int, nbytes: int) -> Bytes:
        check_range(buffer, offset, nbytes)
        with self._guarded(buffer.name):
            return self._memory.read(self._stored(buffer), offset, nbytes)

    def write(self, buffer: DeviceBuffer[A], offset: int, data: Bytes) -> None:
        check_range(buffer, offset, data.nbytes)
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        with self._guarded(buffer.name):
            self._memory.write(self._stored(buffer), offset, flat)

    def submit(
        self,
        batch: LoweredBatch[A, L],
        inputs: Bytes,
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> StepFence[A, L, C]:
        """Start the step. Raises DeviceLost once the device has failed."""
        with self._guarded("submitting a step"):
            return self._submissions.submit(batch, inputs, requested, rows)

    def wait(self, fence: StepFence[A, L, C], timeout: float | None = None) -> None:
        """Return once the step has ended. Raises DeviceLost after ``timeout`` seconds or an
        error."""
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        with self._guarded("a step"):
            done = self._until_done(fence, seconds)
        if not done:
            reason = f"{self._info.device}: a step did not end within {seconds:g} s"
            self._lose(reason)
            raise DeviceLost(reason)

    def close(self) -> None:
        """Wait for the device unless it is lost, then free everything."""
        if self._closed:
            return
        self._closed = True
        try:
            self._shut_down()
        finally:
            self._buffers.clear()

    @abstractmethod
    def _fill(self, buffer: DeviceBuffer[A]) -> None:
        """Hook: copy an upload to the device in the layout that ops read."""

    @abstractmethod
    def _finish(self) -> None:
        """Hook: return once nothing submitted is running. Raises DeviceLost."""

    @abstractmethod
    def _translated(self, purpose: str) -> AbstractContextManager[None]:
        """Hook: a context that converts errors of the driver to those of the contract; ``purpose``
        names the operation."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Hook: wait for running work unless the device is lost, and free everything."""

    def _allocate(self, decl: BufferDecl, nbytes: int) -> A:
        """Hook: zeroed memory for a buffer of ``alloc``."""
        allocation = self._memory.allocate(decl.name, nbytes)
        if isinstance(allocation, Synced):
            sync_as(allocation, decl)
        return allocation

    def _upload_stored(self, name: str, data: Bytes) -> A:
        """Hook: upload ``data`` in the layout declared by the graph."""
        return self._memory.adopt(name, data)

    def _finish_uploads(self) -> None:
        """Hook: return when no upload is in progress."""

    def _until_done(self, fence: StepFence[A, L, C], seconds: float) -> bool:
        """Hook: wait for a step; False if it has not ended after ``seconds``."""
        eager = not self._info.host_unified and self._submissions.is_last(fence)
        return self._waiting.until_done(fence, seconds, eager=eager)

    def _give_up(self) -> None:
        """Hook: react to the loss of the device."""

    def _guarded(self, purpose: str) -> Guard:
        """A context that converts errors of the driver to those of the contract and remembers the
        loss of the device."""
        return Guard(self, purpose)

    def _lose(self, reason: str) -> None:
        self._lost = reason
        self._give_up()

    def _keep(self, buffer: DeviceBuffer[A]) -> DeviceBuffer[A]:
        self._buffers.add(buffer)
        return buffer

    def _stored(self, buffer: DeviceBuffer[A]) -> A:
        """The memory of a buffer in the layout declared by the graph."""
        if buffer.allocation is None:
            assert buffer.source is not None
            buffer.allocation = self._upload_stored(buffer.name, buffer.source)
        return buffer.allocation

    def _scratch_of(self, nbytes: int) -> A:
        """Scratch memory of all workers, grown to ``nbytes``."""
        self._scratch = self._grown("scratch", self._scratch, nbytes)
        return self._scratch

    def _free_shared(self, *others: A | None) -> None:
        """Free scratch memory and the ``others`` that steps share; no graph is lowered."""
        self._finish()
        self._submissions.retire()
        for allocation in (self._scratch, *others):
            if allocation is not None:
                self._memory.free(allocation)
        self._scratch = None

    def _grown(self, purpose: str, current: A | None, nbytes: int) -> A:
        """``current`` if it has ``nbytes``, else larger memory instead, once no step uses it.

        The larger memory is allocated first: after OutOfMemory, lowered steps still have
        ``current``."""
        if current is not None and current.nbytes >= nbytes:
            return current
        larger = self._memory.allocate(purpose, nbytes)
        if current is not None:
            self._finish()
            self._memory.free(current)
        return larger


class Guard:
    """A context that converts errors of a tier's driver to those of the contract, and records the
    loss of the device.

    A class, because it surrounds every step: a generator takes microseconds."""

    __slots__ = ("_tier", "_what")

    def __init__(self, tier: BaseTier[Any, Any, Any], purpose: str) -> None:
        self._tier = tier
        self._what = purpose

    def __enter__(self) -> None:
        """Raises DeviceLost if the device is lost."""
        if self._tier._lost:
            raise DeviceLost(self._tier._lost)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        try:
            with self._tier._translated(self._what):
                raise error
        except DeviceLost as lost:
            self._tier._lose(str(lost))
            if lost is not error:
                raise
        except BaseException as other:
            if other is not error:
                raise
