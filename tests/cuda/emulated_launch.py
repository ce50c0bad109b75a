"""Launches that several emulated devices execute together: the blocks of all devices take turns,
and a device begins its next launch when its own blocks have ended the one before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from accel.cuda.program import Source
from tests.cuda.emulator import emulate

MAX_TURNS = 200_000
TOGETHER = """
struct CALL { U64 scratch, inputs, table, workspace; };
extern "C" __global__ void all_devices(U64 calls, U64 ended, U64 steps, U64 devices) {
    const unsigned device = blockIdx.x / BLOCKS, threads = BLOCKS * blockDim.x;
    unsigned *count = (unsigned *)ended + device;
    for (unsigned step = 0; step < steps; step++) {
        const CALL &call = ((const CALL *)calls)[step * devices + device];
        if (call.table) step_phases(call.scratch, call.inputs, call.table, call.workspace);
        if (++*count % threads == 0) emulator::end_launch(device * BLOCKS, BLOCKS);
        while (*count < (step + 1) * threads) spin_pause();
    }
}
"""


def run_all(
    source: Source,
    blocks: int,
    threads: int,
    calls: Sequence[Sequence[Sequence[int]]],
    seed: int,
    folder: Path,
    turns: int = MAX_TURNS,
) -> bool:
    """The step kernel ``source`` with ``blocks`` blocks of ``threads`` threads on every device, in
    an order drawn from ``seed``; ``calls`` are the arguments of each device in each launch. False
    where devices wait for more than ``turns``."""
    devices = len(calls[0])
    text = source.text.replace("blockIdx.x", "(blockIdx.x % BLOCKS)").replace("gridDim.x", "BLOCKS")
    together = Source("together", text + TOGETHER, (*source.macros, ("BLOCKS", blocks)))
    arguments, ended = np.array(calls, np.uint64), np.zeros(devices, np.uint32)
    return emulate(together, folder).run_together(
        "all_devices",
        blocks * devices,
        threads,
        seed,
        arguments.ctypes.data,
        ended.ctypes.data,
        len(calls),
        devices,
        device=blocks,
        turns=turns,
    )
