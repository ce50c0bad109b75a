"""Tuned kernels: what stands in for one op of a step, or for a run of them, where it is faster.

A rule looks at the ops that are still to be launched and says how many of them, from the first one
on, it replaces by which launches; the first rule of ``accel.cuda.registered`` that answers wins,
and an op no rule answers for runs as the plain kernel of its name. So every op also exists alone,
and a rule may give up a case (a format, a width, a number of tokens, an architecture) by answering
None.

A ``.cu`` file of ``accel/cuda/kernels`` is compiled by itself, behind the text that plain kernels
of ``accel/kernels`` have in this language: ``cu.h``, the constants, ``PACKET`` and the exact
primitives; with ``op`` named, ``OP`` and ``opened`` of that op as well. It may include files of
its folder and of ``accel/kernels``. Each of its kernels includes ``packets.h`` and has these
parameters::

    extern "C" __global__ void entry(U64 scratch, U64 inputs,
                                     const __grid_constant__ PACKETS packets, U64 workspace)

``packets`` are those of the ops replaced, in the order of the step: arguments, so that they are at
hand at once, of which a launch takes 4 KiB. Counts are data: the first size of a packet is read
with what the inputs begin with, and a grid, which is chosen for the most of the form, must be right
for fewer. Every kernel begins with ``PRECEDING_DONE;`` before it touches memory that a step writes:
it may be launched before the kernel in front of it has ended, namely once all blocks of that one
have ended or have said ``FOLLOWING_MAY_START;``. ``workspace`` is memory that nothing else writes.

A layout of its own for stored weights is a row of LAYOUTS; LAYOUT_RULES say which weights have it.
A weight has one layout. So whoever gives a weight a layout must have a rule for every op that reads
it, in every form: what is left over is refused when the graph is lowered, not run on wrong bytes.
"""

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
    """One launch of kernel ``entry`` of ``kernels/<file>``.

    ``shared_bytes`` is dynamic shared memory, and all there is: kernels declare none of a fixed
    size beside it. ``macros`` are defined when the file is compiled, so
    that one file serves several formats or widths; each set is a module of its own. ``op`` is the
    op whose packet it reads by name. All blocks of a ``cooperative`` launch run at once. One that
    ``gathers`` has one more parameter, see ``accel.cuda.gathers``.
    """

    file: str
    entry: str
    grid: Extent
    block: Extent
    shared_bytes: int = 0
    macros: Mapping[str, int] = field(default_factory=dict)
    cooperative: bool = False
    op: str = ""
    gathers: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """``launches`` in order, instead of those of the next ``ops`` ops.

    ``workspace_bytes`` of device memory, zeroed when the graph is lowered, are theirs from step to
    step; all launches of one replacement get the same address. One that has none may pass
    ``passing_bytes`` from launch to launch, in memory that other replacements write as well.
    """

    ops: int
    launches: tuple[KernelLaunch, ...]
    workspace_bytes: int = 0
    passing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Remaining(Sequence[Op]):
    """The ops of a step from ``start`` on. ``last_read`` says of each buffer which op of the whole
    step reads it last."""

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

    def is_read_behind(self, buffer: str, length: int) -> bool:
        """Whether an op behind the first ``length`` of these reads ``buffer``."""
        return self.last_read.get(buffer, -1) >= self.start + length


def last_reads(step: Sequence[Op], local: Collection[str] | None = None) -> dict[str, int]:
    """Of each buffer the place of the last op that reads it.

    What is not ``local`` to the step, where that is known, is read behind all of its ops.
    """
    last = {
        tensor.buffer: number
        for number, op in enumerate(step)
        for place, tensor in enumerate(op.operands)
        if tensor is not None and place not in op.written
    }
    if local is not None:
        outside = {name for op in step for name in op.results()} - set(local)
        last |= dict.fromkeys(outside, len(step))
    return last


Rule = Callable[[Remaining, Device], Replacement | None]
"""What replaces the first of the ops given, all that follow in the step."""


@dataclass(frozen=True, slots=True)
class ArrangedLayout:
    """A way of keeping stored weights: ``group_rows`` rows are ``group_bytes(dtype, columns)``.

    Each matrix of a stack begins a group of its own. Kernel ``entry`` of ``kernels/<file>``,
    compiled with DTYPE defined as the GGML type id, makes ``groups`` of them from ``first`` on::

        extern "C" __global__ void entry(const unsigned char *stored, unsigned char *arranged,
                                         unsigned rows, unsigned columns,
                                         unsigned first, unsigned groups)

    ``stored`` is where the rows of the first of these groups begin, ``arranged`` where that group
    goes. ``grid(dtype, columns, groups)`` is the launch's, of blocks of ``block`` threads.
    """

    file: str
    entry: str
    group_rows: int
    group_bytes: Callable[[DType, int], int]
    grid: Callable[[DType, int, int], Extent]
    block: int


LayoutRule = Callable[[BufferDecl, Device], WeightLayout | None]
