"""The push constants of a launch: ``LAUNCH`` of ``accel/kernels/vk.h``."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from accel.kernels.accessors import is_pushed, pushed_bytes, pushed_counts
from accel.packets.device_op import DeviceOp
from accel.packets.packet import ABSENT, BANK_SHIFT, INPUT_MEMORY, SCRATCH_MEMORY
from accel.packets.step_memory import StepAddresses
from contract.arrays import Records

BY_ADDRESS = struct.Struct("<3QI")
"""Addresses of scratch, inputs and packets, and the index of the packet."""
OFFSET_MASK = (1 << BANK_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class Packets:
    """PACKET[ops] of a step; ``address`` is that of their copy in device memory."""

    host: Records
    address: int


def resolved(addresses: StepAddresses, stored: int) -> int:
    """The device address for an address in a packet."""
    if stored == ABSENT:
        return stored
    offset = stored & OFFSET_MASK
    if stored & SCRATCH_MEMORY:
        return addresses.scratch + offset
    return addresses.inputs + offset if stored & INPUT_MEMORY else offset


def push_size(op: DeviceOp) -> int:
    """Bytes of the push constants for ``op``."""
    return pushed_bytes(op) if is_pushed(op) else BY_ADDRESS.size


def push_constants(op: DeviceOp, packets: Packets, index: int, addresses: StepAddresses) -> bytes:
    """The push constants of packet ``index``, whose op is ``op``."""
    if not is_pushed(op):
        return BY_ADDRESS.pack(addresses.scratch, addresses.inputs, packets.address, index)
    packet = packets.host[index]
    operands, sizes, reals = pushed_counts(op)
    data = struct.pack(
        f"<Q{operands}Q{operands}I{sizes}i{reals}f2I",
        addresses.inputs,
        *(resolved(addresses, int(stored)) for stored in packet["operand"][:operands]),
        *packet["stride"][:operands].tolist(),
        *packet["size"][:sizes].tolist(),
        *packet["real"][:reals].tolist(),
        int(packet["layout"]),
        int(packet["counted"]),
    )
    return data.ljust(pushed_bytes(op), b"\0")
