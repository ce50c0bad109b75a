"""The CUDA tier on a device: kernels that fault or hang, graphs against single launches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda.driver import open_driver
from accel.cuda.packed_tiles import TUNED_STACKS
from accel.cuda.program import Source
from accel.cuda.runtime import Choices
from accel.cuda.tier import CudaTier
from contract.dtypes import DType
from contract.errors import DeviceLost
from contract.ir.nodes import BufferDecl, BufferKind
from tests.cuda.test_tier import Lowered, block_of, values_of
from tests.needs import need_device
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS

pytestmark = pytest.mark.device

FAULT = """extern "C" __global__ void fault(unsigned long long scratch) {
    *(volatile int *)(scratch % 16) = 1;
}"""
SPIN_SECONDS = 4
SPIN = f"""extern "C" __global__ void spin() {{
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begun < {SPIN_SECONDS}000000000ull);
}}"""
STACKS = [(1, 37, 3), (3, 19, 2), (1, 100, 8)]
"""Matrices, rows, units a row."""


@pytest.fixture(autouse=True)
def device() -> None:
    """There is one."""
    need_device(open_driver)


@pytest.fixture
def tier(kernel_cache: Path) -> Iterator[CudaTier]:
    with CudaTier(choices=Choices(cache=kernel_cache)) as opened:
        yield opened


def submit_with(tier: CudaTier, lowered: Lowered, text: str, name: str) -> object:
    """A step whose first kernel is another one."""
    function = tier._runtime.modules.function(Source(f"{name}.cu", text), name)
    recording = lowered.batch.launch.whole
    first, *others = recording.launches
    kernel = replace(first.kernel, function=function, grid=(1, 1, 1), threads=1)
    recording.launches = [replace(first, kernel=kernel), *others]
    recording._executables.clear()
    return lowered.submit(block_of(values_of(3, 1)))


FAULTING = """
import sys
from pathlib import Path
import pytest
from accel.cuda.runtime import Choices
from accel.cuda.tier import CudaTier
from accel.cuda.packed_tiles import TUNED_STACKS
from contract.errors import DeviceLost, TierUnavailable
from tests.cuda.test_device import FAULT, submit_with
from tests.cuda.test_tier import Lowered, block_of, values_of

choices = Choices(cache=Path(sys.argv[1]))
with CudaTier(choices=choices) as tier:
    lowered = Lowered(tier)
    lowered.run()
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        tier.wait(submit_with(tier, lowered, FAULT, "fault"))
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        lowered.submit(block_of(values_of(3, 1)))
with pytest.raises(TierUnavailable, match="start a new process"):
    CudaTier(choices=choices)
print("lost and said so")
"""


def test_a_faulting_kernel_is_a_lost_device(tier: CudaTier, kernel_cache: Path) -> None:
    """The error names the fault, and all later calls do too. The driver refuses that process from
    then on, which is said; others compute on."""
    command = [sys.executable, "-c", FAULTING, str(kernel_cache)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PROCESS_SECONDS, cwd=ROOT
    )
    assert done.stdout == "lost and said so\n", done.stderr
    Lowered(tier).run()


def test_a_hanging_kernel_is_a_lost_device(tier: CudaTier, kernel_cache: Path) -> None:
    """Given up after the deadline, while it still runs; a new context computes beside it."""
    lowered = Lowered(tier)
    lowered.run()
    fence = submit_with(tier, lowered, SPIN, "spin")
    with pytest.raises(DeviceLost, match=r"did not end within 0\.2 s"):
        tier.wait(fence, timeout=0.2)
    assert not fence.done
    tier.close()
    with CudaTier(choices=Choices(cache=kernel_cache)) as again:
        Lowered(again).run()


@pytest.mark.parametrize("way", [{}, {"graphs": False}, {"programmatic": False}], ids=str)
def test_every_way_of_launching(kernel_cache: Path, way: dict[str, bool]) -> None:
    """As a graph or one by one, before the kernel in front has ended or after it."""
    with CudaTier(choices=Choices(cache=kernel_cache, **way)) as tier:
        lowered = Lowered(tier)
        for seed in range(20):
            lowered.run(tokens=1 + seed, seed=seed)


@pytest.mark.parametrize("dtype", TUNED_STACKS, ids=str)
@pytest.mark.parametrize("shape", STACKS, ids=str)
def test_a_stack_in_units_is_its_matrices_one_behind_the_other(
    tier: CudaTier, dtype: DType, shape: tuple[int, int, int]
) -> None:
    blocks = random_blocks(dtype, shape)
    alone = [arranged(tier, dtype, shape[1:], own) for own in np.split(blocks, shape[0])]
    assert np.array_equal(arranged(tier, dtype, shape, blocks), np.concatenate(alone))


def random_blocks(dtype: DType, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Rows of that many units each, of all matrices."""
    matrices, rows, units = shape
    row_bytes = dtype.row_bytes(units * dtype.block_elements)
    rng = np.random.default_rng(rows * units)
    return rng.integers(0, 256, (matrices * rows, row_bytes), np.uint8)


def arranged(
    tier: CudaTier, dtype: DType, shape: tuple[int, ...], blocks: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """What the device has of a weight of that shape, the last size of which is in units."""
    dims = (*shape[:-1], shape[-1] * dtype.block_elements)
    buffer = tier.upload(BufferDecl("w", BufferKind.WEIGHT, dtype, dims, "w"), blocks)
    assert buffer.matrix is not None
    tier._runtime.uploader.finish()
    place = buffer.matrix.allocation
    got = tier._memory.read(place, 0, place.nbytes)
    tier.free(buffer)
    return got
