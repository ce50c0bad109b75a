"""Simulates a GPU's processing of a compute queue: reads PM4 packets, stores registers, launches
kernels.

It refuses what the hardware would silently misunderstand: unknown packets, wrong counts, misaligned
addresses, registers outside their space, launches that break a limit."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from accel.amd import pm4
from accel.amd.generation import GFX12, Generation
from accel.amd.isa.decode import isa_of
from accel.amd.pm4 import COUNTS, Opcode, Register
from accel.amd.program import CODE_END
from accel.amd.sim.coherence import Coherence
from accel.amd.sim.execute import Launch, Program, run_launch
from accel.amd.sim.memory_view import PAGE, GpuFault, MemoryView
from contract.kernel import MAX_WORKGROUP

MAX_CODE_BYTES = 1 << 20
WAVE = 32
MAX_LDS_BYTES = 64 << 10
FLOAT_MODE = 0xF0
WAIT_AT_LEAST = 1 << 4 | 5
"""WAIT_REG_MEM: memory, at least the reference."""

_programs: dict[bytes, Program] = {}
"""Translated code by its digest, shared by all queues of this process."""


@dataclass(slots=True)
class _Stalled(Exception):
    """A packet waits for memory and is tried again later."""


@dataclass(slots=True)
class _Buffer:
    """Words, and the index of the next one."""

    words: Sequence[int]
    index: int = 0

    @property
    def ended(self) -> bool:
        """Whether all words were processed."""
        return self.index >= len(self.words)


@dataclass(slots=True)
class CommandProcessor:
    """The command processor of one compute queue.

    ``coherence`` checks reads. ``buffer_flags`` are required in INDIRECT_BUFFER, ``signal`` is
    called for PROTECTED_FENCE_SIGNAL, which only user queues accept. Code is that of a
    ``generation``. ``launches`` and ``instructions`` count what ran."""

    memory: MemoryView
    coherence: Coherence | None = None
    has_eop_buffer: bool = True
    buffer_flags: int = pm4.IB_VALID
    signal: Callable[[], None] | None = None
    generation: Generation = GFX12
    launches: int = 0
    instructions: int = 0
    _registers: dict[int, int] = field(default_factory=dict)
    _inner: _Buffer | None = None

    @property
    def inside(self) -> bool:
        """Whether an indirect buffer is in progress."""
        return self._inner is not None

    def run(self, words: Sequence[int], max_packets: int | None = None) -> int:
        """Process packets of a ring in order, the rest of an indirect buffer first; returns their
        words, fewer than all if a packet waits or ``max_packets`` were processed. Raises
        GpuFault."""
        ring = _Buffer(words)
        done = 0
        while max_packets is None or done < max_packets:
            if self._inner is not None:
                self._next(self._inner)
                if self._inner.ended:
                    self._inner = None
            elif ring.ended:
                break
            else:
                try:
                    self._next(ring)
                except _Stalled:
                    break
            done += 1
        return ring.index

    def _next(self, buffer: _Buffer) -> None:
        """Process one packet."""
        header = buffer.words[buffer.index]
        if header == pm4.PADDING:
            buffer.index += 1
            return
        count = header >> 16 & 0x3FFF
        body = buffer.words[buffer.index + 1 : self._end(buffer.words, buffer.index)]
        opcode = self._known(header >> 8 & 0xFF, count)
        left_out = self._packet(opcode, list(body), buffer is self._inner)
        buffer.index += 2 + count
        if left_out:
            buffer.index = self._after_skipped(buffer, left_out)

    def _end(self, words: Sequence[int], index: int) -> int:
        """The index after the packet at ``index``."""
        header = words[index]
        if header >> 30 != 3:
            raise GpuFault(f"packet {header:#010x} is not of type 3")
        end = index + 1 if header == pm4.PADDING else index + 2 + (header >> 16 & 0x3FFF)
        if end > len(words):
            raise GpuFault(f"packet {header:#010x} goes past the end of its buffer")
        return end

    def _after_skipped(self, buffer: _Buffer, left_out: int) -> int:
        """The index after skipped packets, which must end where COND_EXEC says."""
        index, end = buffer.index, buffer.index + left_out
        while index < min(end, len(buffer.words)):
            index = self._end(buffer.words, index)
        if index != end:
            raise GpuFault(f"COND_EXEC leaves out {left_out} words, in the midst of a packet")
        return end

    def _known(self, opcode: int, count: int) -> Opcode:
        try:
            known = Opcode(opcode)
        except ValueError:
            raise GpuFault(f"packet opcode {opcode:#x} is unknown") from None
        if COUNTS.get(known, count) != count:
            raise GpuFault(f"{known.name} has a count of {count}, not {COUNTS[known]}")
        return known

    def _packet(self, opcode: Opcode, body: list[int], nested: bool) -> int:
        """Execute a packet; returns how many words after it are skipped."""
        if opcode is Opcode.COND_EXEC:
            return self._conditional(body)
        if opcode is Opcode.SET_SH_REG:
            self._set(body[0], body[1:])
        elif opcode is Opcode.DISPATCH_DIRECT:
            self._dispatch(body)
        elif opcode is Opcode.ACQUIRE_MEM:
            self._acquire(body)
        elif opcode is Opcode.RELEASE_MEM:
            self._release(body)
        elif opcode is Opcode.EVENT_WRITE:
            if body[0] != pm4.CS_PARTIAL_FLUSH:
                raise GpuFault(f"EVENT_WRITE {body[0]:#x} is not supported")
            if self.coherence is not None:
                self.coherence.waited()
        elif opcode is Opcode.INDIRECT_BUFFER:
            self._indirect(body, nested)
        elif opcode is Opcode.WAIT_REG_MEM:
            self._wait(body, nested)
        elif opcode is Opcode.PROTECTED_FENCE_SIGNAL:
            if self.signal is None or body != [0]:
                raise GpuFault("PROTECTED_FENCE_SIGNAL belongs to user queues")
            self.signal()
        return 0

    def _conditional(self, body: list[int]) -> int:
        low, high, policy, words = body
        address = low | high << 32
        if address % 4 or policy or not 0 < words <= pm4.MAX_CONDITIONAL_WORDS:
            raise GpuFault(f"COND_EXEC {address:#x}, {policy}, {words} words")
        value = self.memory.bytes_at(address, 4, "COND_EXEC").view(np.uint32)[0]
        return 0 if value else words

    def _set(self, first: int, values: list[int]) -> None:
        if first >> 16 or first + len(values) > pm4.SH_REGISTERS or not values:
            raise GpuFault(f"SET_SH_REG of {len(values)} registers at {first:#x} leaves its space")
        self._registers |= {first + n: value for n, value in enumerate(values)}

    def _acquire(self, body: list[int]) -> None:
        if body[0] or tuple(body[1:3]) != pm4.WHOLE_MEMORY or body[3] or body[4]:
            raise GpuFault("ACQUIRE_MEM of less than the whole memory is not supported")
        caches = body[6]
        if self.coherence is None:
            return
        level = self.generation.caches.acquire_level
        if caches & level == level:
            self.coherence.invalidated()
        if caches & pm4.GL2_WB:
            self.coherence.wrote_back()

    def _release(self, body: list[int]) -> None:
        event, control, low, high, value_low, value_high, context = body
        if not self.has_eop_buffer:
            raise GpuFault("RELEASE_MEM needs the queue's end-of-pipe buffer")
        if event & 0xFFF != pm4.FENCE_EVENT or control != pm4.DATA_64 or context:
            raise GpuFault(f"RELEASE_MEM {event:#x} {control:#x} is not supported")
        address = low | high << 32
        if address % 8:
            raise GpuFault(f"RELEASE_MEM of 64 bits to {address:#x}")
        if self.coherence is not None:
            self.coherence.waited()
            if event & pm4.RELEASE_GL2_WB:
                self.coherence.wrote_back()
            self.coherence.check_signal()
        target = self.memory.bytes_at(address, 8, "RELEASE_MEM")
        target.view(np.uint64)[0] = value_low | value_high << 32

    def _indirect(self, body: list[int], nested: bool) -> None:
        address, words = body[0] | body[1] << 32, body[2] & pm4.MAX_IB_WORDS
        if nested:
            raise GpuFault("an indirect buffer inside an indirect buffer")
        if body[2] & ~pm4.MAX_IB_WORDS != self.buffer_flags or address % 4 or not words:
            raise GpuFault(f"INDIRECT_BUFFER {address:#x}, control {body[2]:#x}, is not valid")
        data = self.memory.bytes_at(address, 4 * words, "INDIRECT_BUFFER")
        self._inner = _Buffer(data.view(np.uint32).tolist())

    def _wait(self, body: list[int], nested: bool) -> None:
        control, low, high, reference, mask, _ = body
        if nested:
            raise GpuFault("WAIT_REG_MEM inside an indirect buffer")
        if control != WAIT_AT_LEAST:
            raise GpuFault(f"WAIT_REG_MEM {control:#x} is not supported")
        value = self.memory.bytes_at(low | high << 32, 4, "WAIT_REG_MEM").view(np.uint32)[0]
        if int(value) & mask < reference:
            raise _Stalled

    def _dispatch(self, body: list[int]) -> None:
        x, y, z, initiator = body
        if initiator != pm4.WAVE32:
            raise GpuFault(f"DISPATCH_INITIATOR {initiator:#x}: the code is for waves of 32")
        if (y, z) != (1, 1) or not x:
            raise GpuFault(f"a dispatch of {x} x {y} x {z} work-groups")
        launch = self._launch()
        if self.coherence is not None:
            self.coherence.launched()
        self.launches += 1
        try:
            executed = run_launch(self.memory, launch, x, self.coherence)
            self.instructions += executed.instructions
        except GpuFault as fault:
            where = f"launch {self.launches} ({launch.program.name})"
            raise GpuFault(f"{where}: {fault}", fault.address) from None

    def _value(self, register: int) -> int:
        if register not in self._registers:
            raise GpuFault(f"SH register {register:#x} was never set")
        return self._registers[register]

    def _launch(self) -> Launch:
        rsrc1, rsrc2 = self._value(Register.RSRC1), self._value(Register.RSRC2)
        starts = [self._value(Register.START_X + n) for n in range(3)]
        items = [self._value(Register.NUM_THREAD_X + n) for n in range(3)]
        for register in (Register.RSRC3, Register.TMPRING_SIZE, Register.RESOURCE_LIMITS):
            self._value(register)
        restarts = [self._value(Register.RESTART_X + n) for n in range(3)]
        local_bytes = (rsrc2 >> 15 & 0x1FF) * 512
        if any(starts) or any(restarts):
            raise GpuFault("a dispatch that does not start at its first work-group")
        if items[1:] != [1, 1] or not 0 < items[0] <= MAX_WORKGROUP or items[0] % WAVE:
            raise GpuFault(f"work-groups of {items} items")
        if rsrc1 >> 12 & 0xFF != FLOAT_MODE:
            raise GpuFault(f"float mode {rsrc1 >> 12 & 0xFF:#x}, not {FLOAT_MODE:#x}")
        if rsrc2 & 1 or rsrc2 >> 1 & 31 != self.generation.user_registers or not rsrc2 >> 7 & 1:
            raise GpuFault(f"RSRC2 {rsrc2:#x} is not that of a kernel of ours")
        if local_bytes > MAX_LDS_BYTES:
            raise GpuFault(f"{local_bytes} bytes of group memory")
        arguments = self._value(Register.USER_DATA_0) | self._value(Register.USER_DATA_1) << 32
        self.memory.bytes_at(arguments, 4, "kernel arguments")
        code = (self._value(Register.PGM_LO) | self._value(Register.PGM_HI) << 32) << 8
        registers = ((rsrc1 & 63) + 1) * 8
        return Launch(
            self._program(code),
            arguments,
            items[0] // WAVE,
            max(local_bytes, 4),
            registers,
            self.generation.group_register,
        )

    def _program(self, address: int) -> Program:
        """The program at ``address``, up to its padding."""
        self.memory.bytes_at(address, 4, "code")
        first = (address - self.memory.base) // 4
        words = self.memory.words[first : first + MAX_CODE_BYTES // 4]
        length = 0
        while length < len(words):
            ends = np.flatnonzero(words[length : length + PAGE] == CODE_END)
            if len(ends):
                length += int(ends[0])
                break
            length += PAGE
        code = self.memory.bytes_at(address, 4 * max(length, 1), "code").tobytes()
        digest = hashlib.sha256(self.generation.cpu.encode() + code).digest()
        if digest not in _programs:
            isa = isa_of(self.generation.target)
            _programs[digest] = Program(f"code at {address:#x}", code, isa)
        return _programs[digest]
