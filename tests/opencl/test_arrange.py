"""Weights arranged by the device: in parts, while the host goes on, and when they do not fit."""

import numpy as np
import pytest

from accel.opencl import arrange
from accel.packets.layouts import LANES, group_bytes, header_bytes
from contract.dtypes import Q4_K, Q8_0, WEIGHT_DTYPES, StorageClass
from contract.errors import OutOfMemory
from contract.ir.nodes import BufferDecl, BufferKind
from contract.opcodes import Opcode
from harness.parity.cases import Case, generate
from harness.parity.execute import compare
from harness.parity.shape import OpShape
from tests.quant.samples import random_blocks

DECL = BufferDecl("w", BufferKind.WEIGHT, Q4_K, (64, 256))
PRODUCT = OpShape("4x512x100", {"tokens": 4, "inner": 512, "outputs": 100})


@pytest.mark.parametrize("stored_rows", [1, 16, 40])
def test_staged_in_parts(open_opencl, monkeypatch, stored_rows):
    """What exceeds the staging memory goes through it piece by piece, matrices split anywhere:
    products are those of the definition, also with stacks, whose matrices share no row group."""
    monkeypatch.setattr(arrange, "STAGED_BYTES", stored_rows * Q4_K.row_bytes(512))
    tier = open_opencl(shared_addresses=False)
    stacks = [case for case in generate(Opcode.MOE_GATE_UP) if case.dtype == Q4_K]
    for case in (Case(Opcode.MATMUL, Q4_K, PRODUCT, "normal", 0), *stacks[::8]):
        assert compare(tier, case) == {}, str(case)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_arranged_weights_take_no_more_memory(dtype):
    """Beside rows of padding, at most one vector a row group that is not full."""
    if dtype.storage is not StorageClass.FLOAT:
        assert group_bytes(dtype, 768) <= LANES * dtype.row_bytes(768) + 32
        assert header_bytes(dtype, 768) % 64 == 0


def test_matrices_are_arranged_while_the_host_goes_on(open_opencl, monkeypatch):
    """An upload waits only when too much is under way; until then it keeps what is read."""
    waited = []
    finish = arrange.Arranger.finish

    def counted(arranger: arrange.Arranger) -> None:
        waited.append(len(arranger._in_flight))
        finish(arranger)

    monkeypatch.setattr(arrange.Arranger, "finish", counted)
    tier = open_opencl()
    sources = [random_blocks(Q4_K, 64, 256, seed) for seed in range(3)]
    buffers = [tier.upload(DECL, source) for source in sources]
    assert waited == []
    kept = [data for _, data in tier._arranger._in_flight]
    assert all(np.shares_memory(one, other) for one, other in zip(kept, sources, strict=True))
    monkeypatch.setattr(arrange, "AHEAD_BYTES", 3 * sources[0].nbytes)
    buffers.append(tier.upload(DECL, sources[0]))
    assert waited == [4]
    tier.upload(DECL, sources[0])
    tier.free(buffers[0])
    assert waited == [4, 1]
    tier._runtime.launch.queue.finish()
    tier.upload(DECL, sources[0])
    tier._runtime.launch.queue.finish()
    tier._arranger.forget()
    assert not tier._arranger._in_flight
    assert tier._arranger._ahead_bytes == 0


def test_what_does_not_fit(open_opencl):
    """The buffer is named, and nothing is left of it."""
    tier = open_opencl(memory_bytes=1 << 20)
    used = tier._memory.used
    blocks = random_blocks(Q8_0, 64, 1024 * 32, 1)
    with pytest.raises(OutOfMemory, match=r"blk\.0\.w"):
        tier.upload(BufferDecl("blk.0.w", BufferKind.WEIGHT, Q8_0, (64, 1024 * 32)), blocks)
    assert tier._memory.used == used
