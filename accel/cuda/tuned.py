"""Tuned kernels: faster replacements for one op of a step or for a run of ops.

A rule looks at the ops that have no launch yet and returns how many of them, from the first on, it
replaces by which launches. The first rule of ``accel.cuda.registered`` that returns a replacement
wins, and an op without one runs as the plain kernel of its name. So every op can also run alone,
and a rule may reject a case (a format, a width, a number of tokens, an architecture) by returning
None.

A ``.cu`` file of ``accel/cuda/kernels`` is compiled by itself, after the text that plain kernels of
``accel/kernels`` have in this language: ``cu.h``, the constants, ``PACKET`` and the exact
primitives; with ``op`` named, ``OP`` and ``opened`` of that op as well. It may include files of its
folder and of ``accel/kernels``. Each of its kernels includes ``packets.h`` and has these
parameters::

    extern "C" __global__ void entry(U64 scratch, U64 inputs,
                                     const __grid_constant__ PACKETS packets, U64 workspace)

``packets`` are those of the replaced ops, in the order of the step, as arguments, which are read
fastest; a launch has 4 KiB for them. Counts are data: a kernel multiplies the first size of a
packet with a number at the beginning of the inputs. A grid is chosen for the largest step of the
bucket and must be right for smaller ones. Every kernel begins with ``PRECEDING_DONE;`` before it
accesses memory that a step writes, because it may start before the previous kernel has ended: once
all blocks of that one have ended or reached ``FOLLOWING_MAY_START;``. Nothing else writes
``workspace``.

A special layout for stored weights is a row of LAYOUTS; LAYOUT_RULES decide which weights have it.
A weight has one layout. So a rule that gives a weight a layout needs rules for every op that reads
it, in every bucket: lowering refuses an op that would read the wrong layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from accel.cuda.device import Device
from accel.packets.layouts import WeightLayout
from accel.packets.step import Op
from contract.dtypes import DType
from contract.ir.nodes import BufferDecl

Extent = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch of kernel ``entry``, which has a file of its name in ``kernels``, in blocks of
    ``threads`` threads; the grid has one block along each axis that it leaves out.

    ``shared_bytes`` is dynamic shared memory; kernels have no other. ``macros`` are defined when
    the file is compiled, so that one file serves several formats or widths; each set is a module of
    its own. ``op`` is the op whose packet the kernel reads by name. In a launch that ``gathers``
    devices wait for each other, and each stores its part of the operands ``sends`` in the memory of
    all, see ``accel.cuda.gathers``; a launch that only sends belongs to the one after it. Blocks of
    a launch that ``waits`` wait for each other: all of them run at the same time, and their kernel
    has another parameter, ``U64 stop``, the address of the word by which the host ends them."""

    entry: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int = 0
    macros: Mapping[str, int] = field(default_factory=dict)
    op: str = ""
    gathers: bool = False
    sends: tuple[int, ...] = ()
    waits: bool = False

    @property
    def file(self) -> str:
        """The name of the kernel's file."""
        return f"{self.entry}.cu"


@dataclass(frozen=True, slots=True)
class Replacement:
    """``launches`` in order, instead of those of the next ``ops`` ops.

    ``workspace_bytes`` of device memory, zeroed when the graph is lowered, belong to them from step
    to step; all launches of one replacement get the same address. A replacement with
    ``transient_bytes`` has that many bytes instead, only from its first launch to its last: other
    replacements write the same memory."""

    ops: int
    launches: tuple[KernelLaunch, ...]
    workspace_bytes: int = 0
    transient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Remaining(Sequence[Op]):
    """The ops of a step from index ``start`` on. ``last_read`` has, for each buffer, the index of
    the last op of the step that reads it."""

    step: Sequence[Op]
    start: int
    last_read: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.step) - self.start

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Op]: ...
    def __getitem__(self, index: int | slice) -> Op | Sequence[Op]:
        if isinstance(index, int):
            if index < 0:
                raise IndexError(index)
            return self.step[self.start + index]
        first, last, step = index.indices(len(self))
        return self.step[self.start + first : self.start + last : step]

    def is_read_after(self, buffer: str, length: int) -> bool:
        """Whether an op after the first ``length`` of these reads ``buffer``."""
        return self.last_read.get(buffer, -1) >= self.start + length


def last_reads(step: Sequence[Op], local: Collection[str] | None = None) -> dict[str, int]:
    """For each buffer the index of the last op that reads it.

    If ``local`` is given, all other buffers count as read after the last op."""
    last = {tensor.buffer: number for number, op in enumerate(step) for tensor in op.read_tensors()}
    if local is not None:
        outside = {name for op in step for name in op.results()} - set(local)
        last |= dict.fromkeys(outside, len(step))
    return last


Rule = Callable[[Remaining, Device], Replacement | None]
"""Returns the replacement for the first of the remaining ops of a step, or None."""


@dataclass(frozen=True, slots=True)
class ArrangedLayout:
    """A layout of stored weights: ``group_rows`` rows take ``group_bytes(dtype, columns)``.

    Each matrix of a stack begins a new group. Kernel ``entry`` of ``kernels/<file>``, compiled with
    DTYPE defined as the GGML type id, arranges ``groups`` groups from ``first`` on::

        extern "C" __global__ void entry(const unsigned char *stored, unsigned char *arranged,
                                         unsigned rows, unsigned columns,
                                         unsigned first, unsigned groups)

    ``stored`` points to the first row of the first of these groups, ``arranged`` to the memory of
    that group. ``grid(dtype, columns, groups)`` is that of the launch, with blocks of
    ``threads`` threads."""

    file: str
    entry: str
    group_rows: int
    group_bytes: Callable[[DType, int], int]
    grid: Callable[[DType, int, int], Extent]
    threads: int


LayoutRule = Callable[[BufferDecl, Device], WeightLayout | None]
