"""What is pushed to a kernel for a launch: ``LAUNCH`` of ``kernels/vk.h``."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.kernels.accessors import is_pushed, pushed_bytes, pushed_counts
from accel.packets.device_op import DeviceOp
from accel.packets.packet import ABSENT, BANK_SHIFT, INPUT_MEMORY, PACKET, SCRATCH_MEMORY
from accel.packets.step_memory import StepAddresses

BY_ADDRESS = struct.Struct("<3QI")
"""Where scratch, inputs and packets lie, and which packet it is."""
OFFSET_MASK = (1 << BANK_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class Packets:
    """PACKET[ops] of a step, which also lie at ``address`` in device memory."""

    host: NDArray[np.void]
    address: int


def resolved(places: StepAddresses, stored: int) -> int:
    """The address behind one of a packet."""
    if stored == ABSENT:
        return stored
    offset = stored & OFFSET_MASK
    if stored & SCRATCH_MEMORY:
        return places.scratch + offset
    return places.inputs + offset if stored & INPUT_MEMORY else offset


def push_size(op: DeviceOp) -> int:
    """Bytes a kernel of ``op`` is given."""
    return pushed_bytes(op) if is_pushed(op) else BY_ADDRESS.size


def pushed(op: DeviceOp, packets: Packets, index: int, places: StepAddresses) -> bytes:
    """What the kernel of packet ``index``, which is one of ``op``, is given."""
    if not is_pushed(op):
        return BY_ADDRESS.pack(places.scratch, places.inputs, packets.address, index)
    packet = packets.host[index]
    operands, sizes, reals = pushed_counts(op)
    data = struct.pack(
        f"<Q{operands}Q{operands}I{sizes}i{reals}f2I",
        places.inputs,
        *(resolved(places, int(stored)) for stored in packet["operand"][:operands]),
        *packet["stride"][:operands].tolist(),
        *packet["size"][:sizes].tolist(),
        *packet["real"][:reals].tolist(),
        int(packet["layout"]),
        int(packet["counted"]),
    )
    return data.ljust(pushed_bytes(op), b"\0")


def lone_packet(operands: list[int], sizes: tuple[int, ...]) -> NDArray[np.void]:
    """PACKET[1] of an op that belongs to no step."""
    packet = np.zeros(1, PACKET)
    packet["operand"] = ABSENT
    packet["operand"][0, : len(operands)] = operands
    packet["size"][0, : len(sizes)] = sizes
    return packet
