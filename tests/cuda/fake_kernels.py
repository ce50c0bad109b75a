"""What the kernels of the driver's test double do, by name, in numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from accel.cuda.input_shift import NO_QUERY, THREADS, packed
from accel.kernels.device_probe import RESULTS, Samples
from accel.packets.ops import NUMBERS, TABLE
from accel.packets.packet import INPUT_MEMORY, PACKET, SCRATCH_MEMORY
from contract.draft_shift import SequenceShift, shift_inputs
from contract.records import OUTPUT_EVENT
from tests.cuda.fake_context import CUresult, floats, words

SHIFTS_BYTES = packed([]).nbytes
OFFSET_MASK = (1 << 56) - 1
PLAIN = (8, 8, PACKET.itemsize)
"""Sizes of the arguments of a plain kernel, in bytes."""


def _self_test(driver: Any, scratch: int, inputs: int, argument: int) -> None:
    packet = np.frombuffer(argument.to_bytes(PACKET.itemsize, "little"), PACKET)[0]
    count = int(packet["size"][0])
    a, b = (floats(int(place), count) for place in packet["operand"][:2])
    pattern = words(int(packet["operand"][2]), count)
    results = words(int(packet["operand"][3]), count * 9).reshape(count, 9)
    with np.errstate(all="ignore"):
        expected = Samples(a, b, pattern.view(np.uint32)).expected
    for column, name in enumerate(RESULTS):
        results[:, column] = expected[name].view(np.uint32)


def _operands(name: str, scratch: int, inputs: int, argument: int) -> dict[str, Any]:
    """What the packet says of an op of rows: arrays of its operands, counts resolved."""
    packet = np.frombuffer(argument.to_bytes(PACKET.itemsize, "little"), PACKET)[0]
    assert packet["op"] == NUMBERS[name]
    count, width = (int(size) for size in packet["size"][:2])
    if packet["counted"]:
        count *= int(words(inputs, 4)[packet["counted"] - 1])
    arrays: dict[str, Any] = {}
    for number, operand in enumerate(TABLE[name].operands):
        stored = int(packet["operand"][number])
        base = scratch * bool(stored & SCRATCH_MEMORY) + inputs * bool(stored & INPUT_MEMORY)
        stride = int(packet["stride"][number])
        data = floats(base + (stored & OFFSET_MASK), max(1, count) * stride)
        arrays[operand.name] = data.reshape(-1, stride)[:count, :width]
    return arrays


def add(driver: Any, *arguments: int) -> None:
    """The op of that name."""
    found = _operands("add", *arguments)
    found["y"][:] = found["a"] + found["b"]


def scale(driver: Any, *arguments: int) -> None:
    """The op of that name."""
    found = _operands("scale", *arguments)
    packet = np.frombuffer(arguments[-1].to_bytes(PACKET.itemsize, "little"), PACKET)[0]
    found["y"][:] = found["x"] * packet["real"][0]


def _fault(driver: Any, *arguments: int) -> None:
    """From then on the driver refuses the whole process, as NVIDIA's does."""
    driver.faulted = driver.current.error = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


def _hang(driver: Any, *arguments: int) -> None:
    driver.current.hangs = True


def _find_broken(driver: Any, stored: int, found: int, *numbers: int) -> None:
    blocks, nbytes, first, second, width, exponent = numbers
    data = np.ctypeslib.as_array((ctypes.c_uint8 * (blocks * nbytes)).from_address(stored))
    for place in (first, second):
        word = np.ascontiguousarray(data.reshape(blocks, nbytes)[:, place : place + width])
        if (word.view(f"<u{width}") & exponent == exponent).any():
            words(found, 1)[0] = 1


def _shift_inputs(driver: Any, inputs: int, ring: int, events: int, *given: int) -> None:
    count, argument = given
    own = np.frombuffer(argument.to_bytes(SHIFTS_BYTES, "little"), np.uint32).reshape(THREADS, -1)
    rows = own[:count].tolist()
    sequences = [SequenceShift(*row[:4], None if row[4] == NO_QUERY else row[4]) for row in rows]
    nbytes = 4 + 4 * max(word for one in sequences for word in one[2:] if word is not None)
    block = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(inputs))
    shift_inputs(block, words(ring, events * OUTPUT_EVENT.itemsize // 4).view(np.uint8), sequences)


KERNELS: dict[str, tuple[tuple[int, ...], Callable[..., None]]] = {
    "launch_self_test": (PLAIN, _self_test),
    "launch_add": (PLAIN, add),
    "launch_scale": (PLAIN, scale),
    "launch_arrange": (PLAIN, lambda driver, *arguments: None),
    "find_broken": ((8, 8, 4, 4, 4, 4, 4, 4), _find_broken),
    "shift_inputs": ((8, 8, 4, 4, SHIFTS_BYTES), _shift_inputs),
    "arrange_units": ((8, 8, 4, 4, 4, 4), lambda driver, *arguments: None),
}
"""Sizes of a kernel's arguments, and what it does."""
FAULT = (PLAIN, _fault)
HANG = (PLAIN, _hang)
TUNED = (8, 8, PACKET.itemsize, 8)
"""Sizes of the arguments of a tuned kernel that replaces one op."""
