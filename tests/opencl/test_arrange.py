"""Weights arranged by the device: byte for byte what the definition of the layout gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.opencl import arrange
from accel.opencl.device import Device
from accel.opencl.modules import ModuleLauncher
from accel.opencl.tier import OpenClTier
from contract.dtypes import Q4_K, Q8_0, WEIGHT_DTYPES, DType, StorageClass
from contract.errors import OutOfMemory
from contract.ir.nodes import BufferDecl, BufferKind
from tests.kernels.planes import planes
from tests.opencl.conftest import OpenTier
from tests.opencl.lanes import arranged
from tests.opencl.work_groups import open_work_groups

QUANTIZED = tuple(dtype for dtype in WEIGHT_DTYPES if dtype.storage is not StorageClass.FLOAT)
SHAPES = ((1, 1, 1), (1, 16, 1), (1, 37, 3), (3, 19, 2), (2, 48, 5), (4, 2, 9), (1, 100, 8))
"""Matrices, rows of each, blocks of a row: whole row groups, padded ones, headers that end within
a vector."""
KINDS = ("cpu", "one-worker", "banked", "work-groups", "banked-work-groups")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tier(
    kind: str, open_opencl: OpenTier, device: Device, monkeypatch: pytest.MonkeyPatch
) -> OpenClTier:
    """Rows in the lanes of a processor, in memory of its own too, or an item each."""
    if kind == "work-groups":
        return open_work_groups(open_opencl, device, monkeypatch)
    if kind == "banked-work-groups":
        return open_work_groups(open_opencl, device, monkeypatch, shared_addresses=False)
    if kind == "banked":
        return open_opencl(shared_addresses=False)
    return open_opencl(threads=1 if kind == "one-worker" else None)


def random_blocks(dtype: DType, rows: int, units: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(rows * units)
    return rng.integers(0, 256, (rows, dtype.row_bytes(units * dtype.block_elements)), np.uint8)


def grouped(tier: OpenClTier) -> bool:
    """Whether work-groups execute its ops."""
    return isinstance(tier._runtime.launcher, ModuleLauncher)


def check(tier: OpenClTier, dtype: DType, matrices: int, rows: int, units: int) -> None:
    blocks = random_blocks(dtype, matrices * rows, units)
    weight = (planes if grouped(tier) else arranged)(dtype, blocks, matrices)
    expected = weight.bytes
    dims: Sequence[int] = (matrices, rows, units * dtype.block_elements)
    decl = BufferDecl("w", BufferKind.WEIGHT, dtype, tuple(dims[matrices == 1 :]))
    buffer = tier.upload(decl, blocks)
    matrix = buffer.matrix
    assert matrix is not None
    tier._arranger.finish()
    assert (matrix.layout, matrix.row_bytes) == (weight.layout, expected.shape[1])
    assert matrix.allocation.nbytes == expected.nbytes
    got = tier._memory.read(matrix.allocation, 0, expected.nbytes).reshape(expected.shape)
    assert (got == expected).all(), (dtype, matrices, rows, units)
    assert (tier.map(buffer) == blocks).all()
    tier.free(buffer)


def test_bytes_of_every_format(tier: OpenClTier, kind: str) -> None:
    """Whole groups and partial ones, of one matrix and of several; a few formats on a processor
    with memory of its own, whose programs differ in where they write."""
    for dtype in QUANTIZED[::4] if kind == "banked" else QUANTIZED:
        for shape in SHAPES:
            check(tier, dtype, *shape)


@pytest.mark.parametrize("stored_rows", [1, 16, 40])
def test_staged_in_parts(
    open_opencl: OpenTier, monkeypatch: pytest.MonkeyPatch, stored_rows: int
) -> None:
    """What exceeds the staging memory goes through it piece by piece, matrices split anywhere."""
    monkeypatch.setattr(arrange, "STAGED_BYTES", stored_rows * Q4_K.row_bytes(512))
    tier = open_opencl(shared_addresses=False)
    for shape in ((1, 100, 2), (3, 40, 2), (5, 7, 2), (2, 16, 2)):
        check(tier, Q4_K, *shape)


def test_matrices_are_arranged_while_the_host_goes_on(
    open_opencl: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload waits only when too much is under way; until then it keeps what is read."""
    waited = []
    finish = arrange.Arranger.finish

    def counted(arranger: arrange.Arranger) -> None:
        waited.append(len(arranger._in_flight))
        finish(arranger)

    monkeypatch.setattr(arrange.Arranger, "finish", counted)
    tier = open_opencl()
    decl = BufferDecl("w", BufferKind.WEIGHT, Q4_K, (64, 256))
    sources = [random_blocks(Q4_K, 64, 1) for _ in range(3)]
    buffers = [tier.upload(decl, source) for source in sources]
    assert waited == []
    kept = [data for _, data in tier._arranger._in_flight]
    assert all(np.shares_memory(one, other) for one, other in zip(kept, sources, strict=True))
    monkeypatch.setattr(arrange, "AHEAD_BYTES", 3 * sources[0].nbytes)
    buffers.append(tier.upload(decl, sources[0]))
    assert waited == [4]
    tier.upload(decl, sources[0])
    tier.free(buffers[0])
    assert waited == [4, 1]
    tier._runtime.launch.queue.finish()
    tier.upload(decl, sources[0])
    tier._runtime.launch.queue.finish()
    tier._arranger.forget()
    assert not tier._arranger._in_flight
    assert tier._arranger._ahead_bytes == 0


def test_what_does_not_fit(open_opencl: OpenTier) -> None:
    """The buffer is named, and nothing is left of it."""
    tier = open_opencl(memory_bytes=1 << 20)
    used = tier._memory.used
    blocks = random_blocks(Q8_0, 64, 1024)
    with pytest.raises(OutOfMemory, match=r"blk\.0\.w"):
        tier.upload(BufferDecl("blk.0.w", BufferKind.WEIGHT, Q8_0, (64, 1024 * 32)), blocks)
    assert tier._memory.used == used
