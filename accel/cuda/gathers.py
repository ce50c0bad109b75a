"""Launches that bring shares of tensors to every device: the ops of ``accel.packets.shares``.

ALL_GATHERs that follow each other are one launch of ``kernels/all_gather.cu`` on every device. In
addition to its own packets it gets ``peer_argument``: addresses of the tensors and counters of the
other devices. Memory of a step may move, so these are read at the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.shares import ALL_GATHER
from accel.packets.step import Op

MOST_TENSORS = 4
THREADS = 512
MOST_BLOCKS = 64
BLOCK_FLOATS = 4096
"""Floats of a share for each block."""
WORD_BYTES = 4
WHOLE = 1
"""Index of the operand of which all devices have a share."""


def gather_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces all ALL_GATHERs that come next, as many as a launch can take."""
    count = 0
    while count < min(len(ops), MOST_TENSORS) and ops[count].device is ALL_GATHER:
        count += 1
    if count == 0:
        return None
    launch = gathering(ops, range(count))
    return Replacement(count, (launch,), workspace_bytes(launch))


def gathering(ops: Sequence[Op], gathers: range, workspace_at: int = 0) -> KernelLaunch:
    """The launch of ALL_GATHERs that follow each other in a replacement, whose workspace begins at
    ``workspace_at``."""
    devices = ops[gathers.start].most_sizes()["devices"]
    wholes = [(ops[at], ops[at].operands[WHOLE]) for at in gathers]
    # All devices have the same number of blocks, however the columns divide.
    floats = [op.count.most * whole.columns for op, whole in wholes if whole is not None]
    blocks = max(1, min(-(-max(floats, default=0) // devices // BLOCK_FLOATS), MOST_BLOCKS))
    return KernelLaunch(
        "all_gather",
        (blocks, 1, 1),
        (THREADS, 1, 1),
        macros={"TENSORS": len(floats), "FIRST_TENSOR": gathers.start, "PEERS": devices - 1},
        gathers=True,
        workspace_at=workspace_at,
    )


def workspace_bytes(launch: KernelLaunch) -> int:
    """Bytes of the words of its blocks."""
    return (2 * launch.macros["PEERS"] + 1) * launch.grid[0] * WORD_BYTES


@dataclass(frozen=True, slots=True)
class Peer:
    """Another device's part of a launch: addresses of its scratch memory and of the launch's
    workspace, and the packets that the launch replaces."""

    scratch: int
    workspace: int
    packets: NDArray[np.void]


def peer_argument(stop: int, index: int, peers: Sequence[Peer]) -> np.void:
    """The argument ``OTHERS`` of the kernel on device ``index``; ``stop`` is the address of its
    stop word."""
    words = [stop, index]
    for peer in peers:
        words += [peer.scratch, peer.workspace]
        words += [int(packet["operand"][WHOLE]) for packet in peer.packets]
    return np.void(np.array(words, np.uint64).tobytes())
