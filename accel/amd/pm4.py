"""Packets of the command processor of gfx12 and gfx11, as 32-bit words.

Type-3 packets of a compute queue, after ``nvd.h`` and ``soc15d.h`` of the amdgpu driver and the
packet tables of Mesa. Only the packets that the tiers send and the simulated processor reads are
here. Addresses are those of the GPU, in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

Words = list[int]


class Opcode(IntEnum):
    """Opcodes of type-3 packets."""

    NOP = 0x10
    DISPATCH_DIRECT = 0x15
    COND_EXEC = 0x22
    WAIT_REG_MEM = 0x3C
    INDIRECT_BUFFER = 0x3F
    EVENT_WRITE = 0x46
    RELEASE_MEM = 0x49
    ACQUIRE_MEM = 0x58
    SET_SH_REG = 0x76
    PROTECTED_FENCE_SIGNAL = 0xD0


COUNTS: Mapping[Opcode, int] = {
    Opcode.DISPATCH_DIRECT: 3,
    Opcode.COND_EXEC: 3,
    Opcode.WAIT_REG_MEM: 5,
    Opcode.INDIRECT_BUFFER: 2,
    Opcode.EVENT_WRITE: 0,
    Opcode.RELEASE_MEM: 6,
    Opcode.ACQUIRE_MEM: 6,
    Opcode.PROTECTED_FENCE_SIGNAL: 0,
}
"""The count field, one less than the words after the header; other opcodes have no fixed count."""
PADDING = 0xFFFF1000
"""A NOP of a single word."""


class Register(IntEnum):
    """Registers of a dispatch, as word offsets in the SH space."""

    START_X = 0x204
    NUM_THREAD_X = 0x207
    PGM_LO = 0x20C
    PGM_HI = 0x20D
    RSRC1 = 0x212
    RSRC2 = 0x213
    RESOURCE_LIMITS = 0x215
    TMPRING_SIZE = 0x218
    RESTART_X = 0x21B
    RSRC3 = 0x228
    USER_DATA_0 = 0x240
    USER_DATA_1 = 0x241


SH_REGISTERS = 0x400
"""Words of the SH space."""

WAVE32 = 0x8005
"""DISPATCH_INITIATOR: compute shader, start at group 0, waves of 32 lanes."""
WHOLE_MEMORY = (0xFFFFFFFF, 0xFF)
POLL = 0xA
GLI_INV, GLK_INV, GLV_INV, GL2_INV, GL2_WB = 1, 1 << 7, 1 << 8, 1 << 14, 1 << 15
ACQUIRE_ALL = GLI_INV | GLK_INV | GLV_INV | GL2_INV | GL2_WB
"""GCR_CNTL: what the host wrote becomes visible and nothing is lost; gfx12 has no GL1 and GLM."""
ACQUIRE_LEVEL = GLK_INV | GLV_INV
"""GCR_CNTL between launches of a step, which share the second-level cache."""

CS_PARTIAL_FLUSH = 0x407
"""EVENT_WRITE type 7, index 4: everything launched before has ended."""
FENCE_EVENT = 0x14 | 5 << 8
"""CACHE_FLUSH_AND_INV_TS at the end of the pipe."""
RELEASE_GL2_WB, RELEASE_GL2_INV, RELEASE_GLV_INV = 1 << 21, 1 << 20, 1 << 14
RELEASE_SEQ = 1 << 22
RELEASE_CACHES = RELEASE_GL2_WB | RELEASE_GL2_INV | RELEASE_GLV_INV | RELEASE_SEQ
GLM_WB, GLM_INV, GLK_WB, GL1_INV = 1 << 4, 1 << 5, 1 << 6, 1 << 9
RELEASE_GLM_WB, RELEASE_GLM_INV, RELEASE_GL1_INV = 1 << 12, 1 << 13, 1 << 15
DATA_64 = 2 << 29
IB_VALID, IB_INHERIT_COMPUTE = 1 << 23, 1 << 30
MAX_IB_WORDS = (1 << 20) - 1
MAX_CONDITIONAL_WORDS = (1 << 14) - 1


@dataclass(frozen=True, slots=True)
class Caches:
    """A generation's cache operations: before a step, between launches, after a step."""

    acquire_all: int
    acquire_level: int
    release: int


GFX12_CACHES = Caches(ACQUIRE_ALL, ACQUIRE_LEVEL, RELEASE_CACHES)
GFX11_CACHES = Caches(
    ACQUIRE_ALL | GLM_WB | GLM_INV | GLK_WB | GL1_INV,
    ACQUIRE_LEVEL | GL1_INV,
    RELEASE_CACHES | RELEASE_GLM_WB | RELEASE_GLM_INV | RELEASE_GL1_INV,
)
"""gfx11 has a cache between the first level and the second, and one of metadata."""


def packet(opcode: Opcode, *body: int) -> Words:
    """A type-3 packet: its header, then ``body``, at least one word."""
    return [3 << 30 | (len(body) - 1) << 16 | opcode << 8, *body]


def low_high(value: int) -> tuple[int, int]:
    """A 64-bit value as two words, the lower one first."""
    return value & 0xFFFFFFFF, value >> 32


def set_registers(first: int, *values: int) -> Words:
    """Set consecutive SH registers from number ``first`` on."""
    return packet(Opcode.SET_SH_REG, first, *values)


def acquire_memory(caches: int = ACQUIRE_ALL) -> Words:
    """Apply the cache operations ``caches`` (GCR_CNTL) to the whole memory."""
    return packet(Opcode.ACQUIRE_MEM, 0, *WHOLE_MEMORY, 0, 0, POLL, caches)


def wait_for_launches() -> Words:
    """Nothing after this packet starts before all launches have ended."""
    return packet(Opcode.EVENT_WRITE, CS_PARTIAL_FLUSH)


def release_memory(address: int, value: int, caches: int = RELEASE_CACHES) -> Words:
    """Write the 64 bits of ``value`` to ``address`` once all launches before it have ended and
    their results are in memory. Raises no interrupt."""
    words = *low_high(address), *low_high(value)
    return packet(Opcode.RELEASE_MEM, FENCE_EVENT | caches, DATA_64, *words, 0)


def indirect_buffer(address: int, words: int, flags: int = IB_VALID) -> Words:
    """Execute ``words`` words at ``address`` before what follows."""
    assert 0 < words <= MAX_IB_WORDS
    return packet(Opcode.INDIRECT_BUFFER, *low_high(address), words | flags)


def conditional(address: int, words: int) -> Words:
    """Skip the ``words`` words after this packet while the 32 bits at ``address`` are 0."""
    assert 0 < words <= MAX_CONDITIONAL_WORDS
    return packet(Opcode.COND_EXEC, *low_high(address), 0, words)


def signal_driver() -> Words:
    """On a user queue, tell the driver's fence how far the ring was read."""
    return packet(Opcode.PROTECTED_FENCE_SIGNAL, 0)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A launch of ``groups`` work-groups of ``items`` work-items.

    ``code`` and ``arguments`` are addresses, ``rsrc`` the registers RSRC1, RSRC2 and RSRC3."""

    code: int
    arguments: int
    rsrc: tuple[int, int, int]
    items: int
    groups: int


class Writer:
    """Writes the words of one indirect buffer; registers that already have their value are not set
    again."""

    def __init__(self) -> None:
        self.words: Words = []
        self._registers: dict[int, int] = {}

    def put(self, words: Sequence[int]) -> None:
        """Append packets that do not set registers."""
        self.words.extend(words)

    def dispatch(self, launch: Dispatch) -> None:
        """Append a launch of ``groups`` groups along x."""
        low, high = low_high(launch.code >> 8)
        self._set(Register.PGM_LO, low, high)
        self._set(Register.RSRC1, *launch.rsrc[:2])
        self._set(Register.RSRC3, launch.rsrc[2])
        self._set(Register.TMPRING_SIZE, 0)
        self._set(Register.RESOURCE_LIMITS, 0)
        self._set(Register.RESTART_X, 0, 0, 0)
        self._set(Register.USER_DATA_0, *low_high(launch.arguments))
        self._set(Register.START_X, 0, 0, 0, launch.items, 1, 1)
        self.put(packet(Opcode.DISPATCH_DIRECT, launch.groups, 1, 1, WAVE32))

    def guard(self, first: int, address: int) -> int:
        """Put a COND_EXEC before the words from index ``first`` on: they are skipped while the 32
        bits at ``address`` are 0. Returns the index after them."""
        if first == len(self.words):
            return first
        self.words[first:first] = conditional(address, len(self.words) - first)
        return len(self.words)

    def _set(self, first: int, *values: int) -> None:
        if any(self._registers.get(first + n) != value for n, value in enumerate(values)):
            self._registers |= {first + n: value for n, value in enumerate(values)}
            self.put(set_registers(first, *values))
