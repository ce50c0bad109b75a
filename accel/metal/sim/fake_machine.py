"""The properties of the simulated Mac, and the state that the objects of its Metal share."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.metal.sim.fake_compiler import FakeCompiler
from accel.metal.sim.fake_objc import FakeObjc

APPLE_M1 = frozenset((1001, 1002, 1003, 1004, 1005, 1006, 1007, 2002, 3001, 3002, 3003, 5001))
"""MTLGPUFamily values of an M1 with macOS 13: up to Apple7, Mac2, Common3, Metal3."""


@dataclass(slots=True)
class Behaviour:
    """The properties of the simulated Mac.

    ``refuse`` is called with each selector that makes an object, and returns whether it makes none.
    ``math_mode`` says that compile options include those of macOS 15. A command buffer nobody waits
    for ends after it was polled ``looks`` times; a device that ``hangs`` ends nothing."""

    name: str = "Apple M1 (simulated)"
    present: bool = True
    families: frozenset[int] = APPLE_M1
    unified: bool = True
    memory_bytes: int = 4 << 30
    max_buffer_bytes: int = 2 << 30
    group_memory_bytes: int = 32 << 10
    pipeline_items: int = 1024
    math_mode: bool = True
    looks: int = 8
    hangs: bool = False
    refuse: Callable[[str], bool] = field(default=lambda selector: False)


@dataclass(slots=True)
class Machine:
    """One simulated Mac. ``taken`` are the bytes of its buffers, ``kernels`` the loaded
    libraries."""

    objc: FakeObjc
    compiler: FakeCompiler
    behaviour: Behaviour
    taken: int = 0
    kernels: dict[Path, Any] = field(default_factory=dict)

    def launch(self, path: Path) -> Any:
        """The C++ function of a kernel, which stays loaded."""
        if path not in self.kernels:
            self.kernels[path] = self.objc.ffi.dlopen(str(path))
        return self.kernels[path].run

    def make(self, selector: str, kind: str, state: Any) -> int:
        """The object that method ``selector`` returns, 0 if the behaviour refuses it."""
        return 0 if self.behaviour.refuse(selector) else self.objc.make(kind, state)

    def pooled(self, selector: str, kind: str, state: Any) -> int:
        """As ``make``, with the object in the innermost pool."""
        made = self.make(selector, kind, state)
        return self.objc.pooled(made) if made else 0

    def string(self, text: str) -> int:
        """An NSString in the innermost pool."""
        return self.objc.pooled(self.objc.make("NSString", FakeString(self, text)))

    def fail(self, error: int, said: str) -> int:
        """Store an NSError where ``error`` points, and return nil."""
        if error:
            made = self.objc.make("NSError", FakeError(self, said))
            target = self.objc.ffi.cast("uint64_t *", error)
            target[0] = self.objc.pooled(made)
        return 0


@dataclass(slots=True)
class FakeString:
    """An NSString."""

    machine: Machine
    text: str
    characters: Any = None

    def utf8(self) -> int:
        """The characters, which live as long as the string."""
        ffi = self.machine.objc.ffi
        self.characters = ffi.new("char[]", self.text.encode())
        return int(ffi.cast("uintptr_t", self.characters))


@dataclass(slots=True)
class FakeError:
    """An NSError."""

    machine: Machine
    said: str


@dataclass(slots=True)
class FakeBuffer:
    """An MTLBuffer: pages at ``host`` for the host and at ``device`` for the GPU.

    ``access`` is what kernels may do there now, ``max_access`` what they may ever do. ``guarded``
    is False for a view whose pages cannot be mapped again. ``busy`` counts commands that use it."""

    machine: Machine
    nbytes: int
    host: int
    device: int
    view: bool = False
    guarded: bool = True
    access: int = 0
    busy: int = 0

    @property
    def max_access(self) -> int:
        """A mapped file can only be read."""
        return mmap.PROT_READ if self.view else mmap.PROT_READ | mmap.PROT_WRITE

    def give(self, access: int) -> None:
        """Allow kernels this access from now on."""
        access &= self.max_access
        if self.guarded and access != self.access:
            objc = self.machine.objc
            objc.library.fake_give(objc.pointer(self.device), self.pages, access)
            self.access = access

    @property
    def pages(self) -> int:
        """Bytes of its pages."""
        return -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def released(self) -> None:
        """Unmap the pages."""
        objc = self.machine.objc
        if self.busy:
            objc.tell("a buffer was released that committed commands use")
        if self.guarded:
            objc.library.fake_unmap(objc.pointer(self.device), self.pages)
        if not self.view:
            objc.library.fake_unmap(objc.pointer(self.host), self.pages)
            self.machine.taken -= self.nbytes


def new_buffer(machine: Machine, nbytes: int) -> FakeBuffer | None:
    """A buffer of zeroed pages, None if memory has run out."""
    objc, behaviour = machine.objc, machine.behaviour
    if nbytes == 0 or nbytes > behaviour.max_buffer_bytes:
        objc.tell(f"a buffer of {nbytes} bytes, at most {behaviour.max_buffer_bytes}")
        return None
    if machine.taken + nbytes > behaviour.memory_bytes:
        return None
    pages = objc.ffi.new("Pages *")
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if not objc.library.fake_map(whole, pages):
        return None
    machine.taken += nbytes
    host, device = (int(objc.ffi.cast("uintptr_t", p)) for p in (pages.host, pages.device))
    return FakeBuffer(machine, nbytes, host, device)


def buffer_of_pages(machine: Machine, host: int, nbytes: int) -> FakeBuffer | None:
    """A view of whole pages of one region of the process's memory; None if they are not."""
    if host % mmap.PAGESIZE or nbytes % mmap.PAGESIZE or not nbytes:
        machine.objc.tell("a view of memory that is not whole pages")
        return None
    if not _one_region(host, nbytes):
        machine.objc.tell("a view of memory that is not one region")
        return None
    objc = machine.objc
    device = int(objc.ffi.cast("uintptr_t", objc.library.fake_alias(objc.pointer(host), nbytes)))
    return FakeBuffer(machine, nbytes, host, device or host, view=True, guarded=bool(device))


def _one_region(start: int, nbytes: int) -> bool:
    with open(f"/proc/{os.getpid()}/maps", encoding="ascii") as regions:
        for line in regions:
            first, _, last = line.split(maxsplit=1)[0].partition("-")
            if int(first, 16) <= start and start + nbytes <= int(last, 16):
                return True
    return False
