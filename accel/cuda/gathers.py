"""Launches that exchange shares of tensors among devices: the ops of ``accel.packets.shares``.

Consecutive ALL_GATHERs are part of the launch that makes all their shares, if its kernel can store
them on every device (``kernels/sending.h``), else a launch of ``kernels/all_gather.cu``. After its
packets the kernel finds the barrier words of the other devices, and the distance of each tensor
there from the one in its own memory. Memory of a step may move, so these are read at the launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from accel.cuda.device import Device
from accel.cuda.runs import OPERANDS_OF_A_PACKET, operand_index
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.packet import PACKET, SCRATCH_MEMORY
from accel.packets.shares import ALL_GATHER
from accel.packets.step import Op, Tensor
from contract.arrays import Records

MAX_TENSORS = 4
THREADS = 512
MAX_BLOCKS = 64
BLOCK_FLOATS = 4096
"""Floats of a share for each block."""
WORD_BYTES, ADDRESS_BYTES = 4, 8
MAX_ARGUMENT_BYTES = 4096 - 4 * ADDRESS_BYTES
PART, WHOLE = 0, 1
"""Indices of the operand that a device sends, and of the operand gathered from all devices."""
OF_MATRICES = ("Y0", "Y1", "Y2", "Y3")
RESULTS = {
    "unit_product": OF_MATRICES,
    "unit_groups": OF_MATRICES,
    "unit_fold": ("Y",),
    "expert_gates": ("H", "SHARED_H"),
    "expert_down": ("Y",),
    "attention_clusters": ("Y_AT",),
    "attention_tokens": ("Y_AT",),
}
"""The macros of the results that a kernel can store on every device."""


def gather_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces all ALL_GATHERs that come next, as many as a launch can take."""
    count = min(_gathers_from(ops, 0), MAX_TENSORS)
    return Replacement(count, (gathering(ops, range(count)),)) if count else None


def gathering(ops: Sequence[Op], gathers: range) -> KernelLaunch:
    """The launch of ALL_GATHERs that follow each other in a replacement."""
    devices = ops[gathers.start].max_sizes()["devices"]
    wholes = [(ops[at], ops[at].operands[WHOLE]) for at in gathers]
    floats = [op.count.maximum * whole.columns for op, whole in wholes if whole is not None]
    blocks = max(1, min(-(-max(floats, default=0) // devices // BLOCK_FLOATS), MAX_BLOCKS))
    macros = {
        "TENSORS": len(floats),
        "FIRST_TENSOR": gathers.start,
        "PEERS": devices - 1,
        "SENDS": len(floats),
    }
    sends = tuple(map(_whole_of, gathers[: len(floats)]))
    return KernelLaunch("all_gather", (blocks,), THREADS, 0, macros, gathers=True, sends=sends)


def _whole_of(gather: int) -> int:
    """The operand number of what packet ``gather`` brings together."""
    return OPERANDS_OF_A_PACKET * gather + WHOLE


def with_gathers(replacement: Replacement, ops: Remaining) -> Replacement:
    """The replacement without launches that gather, with the ALL_GATHERs behind it, as far as its
    launches can send what is gathered.

    ALL_GATHERs that one launch could not gather stay as they are, so that devices that send meet as
    often as those that gather."""
    first, count = replacement.ops, _gathers_from(ops, replacement.ops)
    behind = range(first, first + (count if count <= MAX_TENSORS else 0))
    sent = sending(replacement.launches, ops, behind, behind.stop) if behind else None
    packets = first if sent is None else behind.stop
    launches: list[KernelLaunch] = []
    for launch in sent or replacement.launches:
        between = gathered_by(launch)
        sent = sending(launches, ops, between, packets) if launches and between else None
        launches = [*launches, launch] if sent is None else [*sent]
    return replace(replacement, ops=packets, launches=tuple(launches))


def gathered_by(launch: KernelLaunch) -> range:
    """The ALL_GATHERs among a replacement's ops that a launch of ``gathering`` does."""
    if launch.entry != "all_gather":
        return range(0)
    first = launch.macros["FIRST_TENSOR"]
    return range(first, first + launch.macros["TENSORS"])


def sending(
    launches: Sequence[KernelLaunch], ops: Sequence[Op], gathers: range, packets: int
) -> list[KernelLaunch] | None:
    """The launches, of so many packets, of which the last ones also send what is gathered, those
    that run beside each other: devices meet in the last. None if these cannot."""
    peers = ops[gathers.start].max_sizes()["devices"] - 1
    nbytes = packets * PACKET.itemsize + words_of_others(peers, len(gathers)) * ADDRESS_BYTES
    if nbytes > MAX_ARGUMENT_BYTES:
        return None
    parts = {ops[at].operands[PART]: number for number, at in enumerate(gathers)}
    sends, left, at = tuple(map(_whole_of, gathers)), set(parts), len(launches)
    found: list[KernelLaunch] = []
    while at and left and (not found or found[0].macros.get("BESIDE")):
        at -= 1
        numbers = {
            f"TO_{name}": parts[made]
            for name, made in _sendable_results(launches[at], ops).items()
            if made in parts
        }
        left -= {made for made in _sendable_results(launches[at], ops).values() if made in parts}
        sent = sent_by(launches[at], peers, numbers, sends)
        if found:
            sent = replace(sent, macros={**sent.macros, "MEETS": 0}, gathers=False)
        found.insert(0, sent)
    return None if left else [*launches[:at], *found]


def _sendable_results(launch: KernelLaunch, ops: Sequence[Op]) -> dict[str, Tensor]:
    """The results that the launch can store on every device, by the names of their macros."""
    operands = {name: launch.macros.get(name, -1) for name in RESULTS.get(launch.entry, ())}
    numbers = {n: divmod(at, OPERANDS_OF_A_PACKET) for n, at in operands.items() if at >= 0}
    tensors = {name: ops[number].operands[index] for name, (number, index) in numbers.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def sent_by(
    launch: KernelLaunch, peers: int, numbers: Mapping[str, int], sends: tuple[int, ...]
) -> KernelLaunch:
    """The launch that sends the operands ``sends`` to so many peers; ``numbers`` are the macros
    that say which of them each result is."""
    macros = {**launch.macros, **numbers, "PEERS": peers, "SENDS": len(sends)}
    return replace(launch, macros=macros, gathers=True, sends=sends)


def gathered_alone(ops: Remaining, at: int, made: Tensor | None) -> tuple[int, Tensor | None]:
    """The number of the op after op ``at`` if that one alone gathers ``made``, and what it is then;
    else ``at`` and ``made``."""
    if _gathers_from(ops, at) != 1 or ops[at].operands[PART] != made:
        return at, made
    return at + 1, ops[at].operands[WHOLE]


def packed_on_all(
    launch: KernelLaunch, ops: Sequence[Op], gather: int, quantize: int, units: int
) -> KernelLaunch:
    """The launch that packs what op ``gather`` would gather, for ``quantize``, which packs
    ``units`` units of a row, and stores it on every device."""
    names = ("m", "scale", "sums")
    numbers = {f"TO_{name.upper()}": number for number, name in enumerate(names)}
    macros = {"GATHER": gather, "GATHER_FIRST": ALL_GATHER.sizes.index("first"), "ROW_UNITS": units}
    sends = tuple(operand_index(ops, quantize, name) for name in names)
    peers = ops[gather].max_sizes()["devices"] - 1
    return sent_by(replace(launch, macros={**launch.macros, **macros}), peers, numbers, sends)


def _gathers_from(ops: Sequence[Op], first: int) -> int:
    """How many ALL_GATHERs follow each other from op ``first`` on."""
    at = first
    while at < len(ops) and ops[at].device is ALL_GATHER:
        at += 1
    return at - first


def barrier_bytes(devices: int) -> int:
    """Bytes of the words by which ``devices`` devices meet in a launch."""
    return (2 + devices) * WORD_BYTES


def words_of_others(peers: int, sends: int) -> int:
    """64-bit words of ``others_argument``."""
    return 3 + peers * (1 + max(1, sends))


def addresses_of(sends: Sequence[int], packets: Records, scratch: int) -> tuple[int, ...]:
    """The addresses on a device of the operands ``sends`` of a launch's ``packets``."""
    found = []
    for send in sends:
        number, index = divmod(send, OPERANDS_OF_A_PACKET)
        stored = int(packets["operand"][number][index])
        in_scratch = stored & SCRATCH_MEMORY
        found.append(scratch + (stored ^ in_scratch) if in_scratch else stored)
    return tuple(found)


def others_argument(
    stop: int,
    index: int,
    barrier: int,
    own: Sequence[int],
    peers: Sequence[tuple[int, Sequence[int]]],
) -> bytes:
    """What follows the packets on device ``index``, ``OTHERS`` of the kernels. ``stop`` is the
    address of its stop word, ``barrier`` that of the
    launch's words for meeting, ``own`` those of what it sends;
    ``peers`` has the same two of the other devices."""
    found = [stop, index, barrier]
    for peer_barrier, addresses in peers:
        found.append(peer_barrier)
        found += [there - here for here, there in zip(own, addresses, strict=True)] or [0]
    return np.array(found, np.int64).tobytes()
