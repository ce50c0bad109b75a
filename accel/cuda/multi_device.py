"""Several devices of one host as one tier: each has a share of the rows of every matrix.

Every device has a ``CudaTier`` that executes its share of each step in a CUDA graph
(``accel.packets.shares``); kernels of these graphs write to each other's memory and wait for each
other (``kernels/all_gather.cu``, or ``kernels/exchange.h`` in a persistent launch). So a step is
submitted to all devices or to none, and nothing that could wait for one device comes before the
launch on the last one. A device has KV pages of its own heads where these divide evenly, and whole
copies of what is not divided."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from accel.cuda.bound_bucket import BoundBucket
from accel.cuda.buffers import CudaBuffer
from accel.cuda.device import find_devices, find_together
from accel.cuda.driver import CudaError, open_driver
from accel.cuda.planning import share_of_decl
from accel.cuda.program import Compiler
from accel.cuda.runtime import Choices
from accel.cuda.sharded import ShardedBatch, ShardedBuffer, ShardedFence, read_heads, write_heads
from accel.cuda.tier import CudaTier
from accel.packets.build import Progress
from accel.packets.head_shares import has_own_heads
from accel.packets.in_flight import DEFAULT_TIMEOUT_SECONDS, CompletionWaiter
from accel.packets.shares import Share
from contract.arrays import Bytes
from contract.context_manager import ContextManager
from contract.errors import DeviceLost
from contract.footprint import Footprint
from contract.ir.inputs import InputLayout, InputRows, step_of
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.shape_key import ShapeKey
from contract.tier import DeviceTier, FiniteWords, TierInfo, UploadsLater, check_bucket

SEPARATOR, ALL = ",", "all"
STOPPING_SECONDS = 2.0
"""Longest that kernels which wait for another device have to notice that they must end."""


class MultiDeviceTier(ContextManager):
    """See ``contract.tier.Tier`` and ``UploadsLater``. ``devices`` are numbers or parts of names,
    all different devices of one architecture that can access each other's memory; sizes are those
    of one of them. Raises TierUnavailable if they cannot, and whatever ``CudaTier`` raises.
    ``binding`` and ``compiler`` as in ``CudaTier``."""

    def __init__(
        self,
        devices: Sequence[str],
        choices: Choices | None = None,
        progress: Progress | None = None,
        binding: Any = None,
        compiler: Compiler | None = None,
    ) -> None:
        choices = choices or Choices()
        driver = open_driver(binding)
        ordinals = find_together(driver, devices)
        self._members: list[CudaTier] = []
        self._names: tuple[str, ...] = ()
        self._lost = ""
        self._closed = False
        self._buffers: set[ShardedBuffer] = set()
        self._waiting = CompletionWaiter()
        self._progress = progress
        try:
            for index, ordinal in enumerate(ordinals):
                share = Share(index, len(ordinals))
                one = CudaTier(str(ordinal), choices, progress, driver.binding, compiler, share)
                self._members.append(one)
            self._names = tuple(one.name for one in self._members)
            for one in self._members:
                one.access_peers([other for other in self._members if other is not one])
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> TierInfo:
        """The info of the first device, with the names of all; ``memory_bytes`` is the least."""
        infos = [one.info for one in self._members]
        first = infos[0]
        return TierInfo(
            name=first.name,
            device=" + ".join(self._names),
            driver=first.driver,
            arithmetic=first.arithmetic,
            opcodes=first.opcodes,
            memory_bytes=min(info.memory_bytes for info in infos),
            host_unified=False,
            asynchronous=True,
            devices=len(infos),
            prompt_tokens=first.prompt_tokens,
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated on the device with the most."""
        return max(one.allocated_bytes for one in self._members)

    @property
    def available_bytes(self) -> int:
        """Free bytes of the device with the fewest."""
        with self._guarded("asking for free memory"):
            return min(one.available_bytes for one in self._members)

    def buckets(self, largest: ShapeKey) -> tuple[ShapeKey, ...]:
        return self._members[0].buckets(largest)

    def footprint(self, graph: Graph, largest: ShapeKey) -> Footprint:
        """The footprint on the device that needs most."""
        return max((one.footprint(graph, largest) for one in self._members), key=_bytes_of)

    def reserve(self, graph: Graph, largest: ShapeKey) -> None:
        with self._guarded("reserving memory"):
            for one in self._members:
                one.reserve(graph, largest)

    def alloc(self, decl: BufferDecl, nbytes: int) -> ShardedBuffer:
        """Zeroed memory on every device, of its own heads if it was planned so."""

        def make(one: CudaTier) -> CudaBuffer:
            if decl.name not in one.divided or not has_own_heads(decl, one.share.count):
                return one.alloc(decl, nbytes)
            return one.alloc(share_of_decl(decl, one.share), nbytes // one.share.count)

        with self._guarded(f"allocating {decl.name}"):
            parts = self._on_each(make)
        return self._keep(ShardedBuffer(decl, nbytes, parts))

    def upload(self, decl: BufferDecl, data: Bytes) -> ShardedBuffer:
        """A copy of ``data`` on every device, or each device's share if it was planned so."""
        return self._upload(decl, data, lambda one, *part: one.upload(*part))

    def upload_later(
        self, decl: BufferDecl, data: Bytes, finite: FiniteWords, on_bytes: Callable[[int], None]
    ) -> ShardedBuffer:
        """See ``contract.tier.UploadsLater``. Of data that all devices have whole, only the first
        reports progress."""

        def upload(one: CudaTier, own: BufferDecl, part: Bytes) -> CudaBuffer:
            counts = own is not decl or one is self._members[0]
            return one.upload_later(own, part, finite, on_bytes if counts else _ignore)

        return self._upload(decl, data, upload)

    def finish_uploads(self) -> bool:
        with self._guarded("uploading"):
            finite = [one.finish_uploads() for one in self._members]
        return all(finite)

    def free(self, buffer: ShardedBuffer) -> None:
        """Free the memory; nothing submitted may still use it."""
        self._buffers.remove(buffer)
        if not self._lost:
            with self._guarded(f"freeing {buffer.name}"):
                self._free(buffer.parts)

    def map(self, buffer: ShardedBuffer) -> Bytes:
        """The bytes in host memory, those of the first device. Of pages that devices divide a
        copy, which cannot be written."""
        if buffer.source is not None:
            return buffer.source
        if buffer.has_own_heads:
            whole = self.read(buffer, 0, buffer.nbytes)
            whole.flags.writeable = False
            return whole
        with self._guarded(f"mapping {buffer.name}"):
            buffer.mapped = True
            first, *_ = self._mapped(buffer)
            return first

    def read(self, buffer: ShardedBuffer, offset: int, nbytes: int) -> Bytes:
        with self._guarded(f"reading {buffer.name}"):
            if buffer.has_own_heads:
                return read_heads(buffer, offset, nbytes, self._read_part)
            return self._members[0].read(buffer.parts[0], offset, nbytes)

    def write(self, buffer: ShardedBuffer, offset: int, data: Bytes) -> None:
        with self._guarded(f"writing {buffer.name}"):
            if buffer.has_own_heads:
                write_heads(buffer, offset, data, self._read_part, self._write_part)
                return
            self._each(lambda n, one: one.write(buffer.parts[n], offset, data))

    def lower(
        self,
        graph: Graph,
        buffers: Mapping[str, ShardedBuffer],
        bucket: ShapeKey,
        inputs: InputLayout,
    ) -> ShardedBatch:
        """The launches of every device's share. Raises UnsupportedOp and OutOfMemory."""
        with self._guarded(f"lowering {graph.name}"):
            bound = []
            divided = {name: one.decl for name, one in buffers.items() if one.is_divided}
            for n, one in enumerate(self._members):
                parts = {name: buffer.parts[n] for name, buffer in buffers.items()}
                bound.append(one.bind(graph, parts, bucket, inputs, divided))
            self._tell_of_gathers(bound[0])
            # Counters that other devices write are zero before any device writes.
            self._each(lambda n, one: one.synchronize())
            pairs = list(zip(self._members, bound, strict=True))
            batches = [
                one.record(own, [pair for pair in pairs if pair[0] is not one])
                for one, own in pairs
            ]
        return ShardedBatch(bucket, tuple(batches))

    def _tell_of_gathers(self, bound: BoundBucket) -> None:
        """Say that devices wait for each other between the launches of a step of one token."""
        gathers = [launch for launch in bound.gathers if launch.table is None]
        if self._progress is not None and bound.bucket.tokens == 1 and gathers:
            self._progress(
                f"{bound.name} decodes by {len(bound.plan.launches)} launches a token on each of "
                f"{len(self._members)} devices, which exchange rows in {len(gathers)} of them: "
                f"one device may be faster"
            )

    def submit(
        self,
        batch: ShardedBatch,
        inputs: Bytes,
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> ShardedFence:
        """Enqueue the step on all devices. Raises DeviceLost once one has failed."""
        check_bucket(batch.bucket, step_of(inputs))
        with self._guarded("submitting a step"):
            self._spread()
            parts = batch.parts
            self._each(lambda n, one: one.prepare(parts[n]))
            with self._lose_all_on_failure():
                # A copy to the host may wait for its device, which waits for the others.
                begun = self._each(lambda n, one: one.start(parts[n], inputs, rows))
            fences = self._each(
                lambda n, one: one.finish(parts[n], begun[n], () if n else requested)
            )
        return ShardedFence(fences, self._names)

    def wait(self, fence: ShardedFence, timeout: float | None = None) -> None:
        """Return when the step is done; DeviceLost after ``timeout`` seconds or a device error."""
        seconds = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
        with self._guarded("a step"):
            if self._waiting.until_done(fence, seconds):
                return
        raise self._give_up(f"a step did not end within {seconds:g} s")

    def close(self) -> None:
        """Wait for the devices, then free all buffers."""
        if not self._closed:
            self._closed = True
            self._buffers.clear()
            with suppress(DeviceLost):
                for one in self._members:
                    one.close()

    @contextmanager
    def _guarded(self, purpose: str) -> Iterator[None]:
        """A block that raises DeviceLost when a device has failed, before it or in it; the other
        devices are closed too, since they would wait for it."""
        if self._lost:
            raise DeviceLost(self._lost)
        try:
            yield
        except (CudaError, DeviceLost) as error:
            raise self._give_up(f"{purpose} failed: {error}") from None

    @contextmanager
    def _lose_all_on_failure(self) -> Iterator[None]:
        """A block that submits a step; if it fails, all devices are lost, since those that have the
        step would wait for the others forever."""
        try:
            yield
        except (CudaError, DeviceLost):
            raise
        except BaseException as error:
            self._give_up(f"a step was submitted to some of the devices only ({error!r})")
            raise

    def _give_up(self, reason: str) -> DeviceLost:
        if not self._lost:
            self._lost = f"{' + '.join(self._names)}: {reason}"
            for one in self._members:
                one.stop_waiting()
            deadline = time.monotonic() + STOPPING_SECONDS
            ended = [one.close_by(self._lost, deadline) for one in self._members]
            names = [one.name for one, gone in zip(self._members, ended, strict=True) if not gone]
            if names:
                self._lost += f"; {' + '.join(names)} did not end when told to"
        return DeviceLost(self._lost)

    def _each(self, function: Callable[[int, CudaTier], Any]) -> tuple[Any, ...]:
        return tuple(function(n, one) for n, one in enumerate(self._members))

    def _on_each(self, make: Callable[[CudaTier], CudaBuffer]) -> tuple[CudaBuffer, ...]:
        """A buffer on every device, or on none."""
        parts: list[CudaBuffer] = []
        try:
            for one in self._members:
                parts.append(make(one))
        except BaseException:
            with suppress(DeviceLost):
                self._free(parts)
            raise
        return tuple(parts)

    def _free(self, parts: Sequence[CudaBuffer]) -> None:
        for one, part in zip(self._members, parts, strict=False):
            one.free(part)

    def _spread(self) -> None:
        """Copy what the host wrote into mapped memory to all devices.

        Such writes count only while nothing is running; afterwards the memory is the same on all
        devices."""
        for buffer in self._buffers:
            if buffer.mapped and buffer.decl.kind is not BufferKind.OUTPUT:
                first, *others = self._mapped(buffer)
                for other in others:
                    other[:] = first

    def _read_part(self, number: int, part: CudaBuffer, offset: int, nbytes: int) -> Bytes:
        return self._members[number].read(part, offset, nbytes)

    def _write_part(self, number: int, part: CudaBuffer, offset: int, data: Bytes) -> None:
        self._members[number].write(part, offset, data)

    def _mapped(self, buffer: ShardedBuffer) -> list[Bytes]:
        return [one.map(part) for one, part in zip(self._members, buffer.parts, strict=True)]

    def _upload(
        self,
        decl: BufferDecl,
        data: Bytes,
        upload: Callable[[CudaTier, BufferDecl, Bytes], CudaBuffer],
    ) -> ShardedBuffer:
        """Call ``upload`` with each device, its part of the buffer, and the data of that part."""

        def part(one: CudaTier) -> CudaBuffer:
            if decl.name not in one.divided:
                return upload(one, decl, data)
            *matrices, rows, _ = (int(dim) for dim in decl.shape)
            rows_here = one.share.of(rows)
            stored = data.reshape(*matrices, rows, data.shape[-1])
            own = share_of_decl(decl, one.share)
            return upload(one, own, stored[..., rows_here.start : rows_here.stop, :])

        with self._guarded(f"uploading {decl.name}"):
            parts = self._on_each(part)
        return self._keep(ShardedBuffer(decl, data.nbytes, parts, data))

    def _keep(self, buffer: ShardedBuffer) -> ShardedBuffer:
        self._buffers.add(buffer)
        return buffer


def open_cuda(
    device: str = "",
    choices: Choices | None = None,
    progress: Progress | None = None,
    binding: Any = None,
    compiler: Compiler | None = None,
) -> CudaTier | MultiDeviceTier:
    """The tier on one device, or on several separated by commas, or on all. Raises what the tiers
    raise."""
    names = [name.strip() for name in device.split(SEPARATOR)]
    if names == [ALL]:
        names = [str(one.ordinal) for one in find_devices(open_driver(binding))]
    if len(names) == 1:
        return CudaTier(names[0], choices, progress, binding, compiler)
    return MultiDeviceTier(names, choices, progress, binding, compiler)


def _ignore(nbytes: int) -> None:
    """Progress that another device reports too."""


def _bytes_of(footprint: Footprint) -> int:
    return sum(footprint.buffers.values()) + footprint.scratch + footprint.variants


if TYPE_CHECKING:
    _conforms: type[DeviceTier[ShardedBuffer, ShardedBatch, ShardedFence]] = MultiDeviceTier
    _uploads_later: type[UploadsLater] = MultiDeviceTier
