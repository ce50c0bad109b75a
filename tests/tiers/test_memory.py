"""Memory of every tier: allocated, uploaded, mapped, read and written, and when it runs out."""

import numpy as np
import pytest

from contract.dtypes import F32, Q8_0
from contract.errors import OutOfMemory
from contract.ir.graph import BufferDecl, BufferKind
from tests.doubling import STATE, run_doubling
from tests.growth import refused_growth
from tests.quant.samples import random_blocks
from tests.tiers.conftest import each
from tests.tiers.ways import DEVICES, used_bytes

LIMIT = 100 << 20
devices = pytest.mark.parametrize("way", each(*DEVICES), indirect=True, scope="module")


def test_memory_is_zeroed_and_state_is_kept(tier):
    """State keeps what the host wrote over a submission that does not touch it; freed memory that
    is taken again is zeros."""
    state = tier.alloc(STATE, 64)
    assert not tier.map(state).any()
    tier.map(state)[:] = 7
    run_doubling(tier)
    assert (tier.map(state) == 7).all()
    assert (tier.read(state, 3, 5) == 7).all()
    tier.free(state)
    again = tier.alloc(STATE, 64)
    assert not tier.map(again).any()
    tier.free(again)


@pytest.mark.parametrize("mapped", [True, False])
def test_parts_of_state_are_read_and_written(tier, mapped):
    """Any range of bytes, before and after the host mapped the buffer, and after a submission."""
    state = tier.alloc(STATE, 64)
    if mapped:
        tier.map(state)[:] = 1
    tier.write(state, 13, np.arange(5, dtype=np.uint8))
    expected = np.full(64, int(mapped), np.uint8)
    expected[13:18] = range(5)
    assert (tier.read(state, 0, 64) == expected).all()
    run_doubling(tier)
    assert tier.read(state, 15, 4).tolist() == [2, 3, 4, int(mapped)]
    tier.read(state, 15, 1)[:] = 9
    assert (tier.map(state) == expected).all()
    assert tier.read(state, 64, 0).size == 0
    tier.write(state, 64, np.empty(0, np.uint8))
    tier.free(state)


def test_bytes_outside_a_buffer_are_refused(tier):
    """Neither read nor written, and the buffer is named."""
    state = tier.alloc(STATE, 64)
    for offset, nbytes in ((60, 5), (-1, 2), (65, 0)):
        with pytest.raises(ValueError, match=f"state: bytes {offset} to {offset + nbytes}"):
            tier.read(state, offset, nbytes)
        with pytest.raises(ValueError, match="state: bytes"):
            tier.write(state, offset, np.zeros(nbytes, np.uint8))
    tier.free(state)


def test_upload_holds_the_bytes(tier):
    """A weight's bytes can be read back: they are the caller's."""
    data = random_blocks(Q8_0, 64, 256, 5)
    decl = BufferDecl("w", BufferKind.WEIGHT, Q8_0, (64, 256), "w")
    buffer = tier.upload(decl, data)
    assert np.array_equal(tier.map(buffer).reshape(data.shape), data)
    assert np.shares_memory(tier.map(buffer), data)
    tier.free(buffer)


@devices
def test_out_of_memory_says_need_and_have(open_way):
    """Nothing is allocated when it does not fit, and what was freed can be had again."""
    tier = open_way(memory_bytes=LIMIT)
    before = used_bytes(tier)
    first = tier.alloc(STATE, 60 << 20)
    with pytest.raises(OutOfMemory, match=r"state: need 62\.9 MB") as caught:
        tier.alloc(STATE, 60 << 20)
    assert 0 < caught.value.free <= LIMIT - (60 << 20)
    decl = BufferDecl("w", BufferKind.CONSTANT, F32, (1, 15 << 20))
    with pytest.raises(OutOfMemory, match="w: need"):
        tier.upload(decl, np.zeros((1, 60 << 20), np.uint8))
    tier.free(first)
    assert used_bytes(tier) == before
    tier.free(tier.alloc(STATE, 60 << 20))
    tier.close()


def test_dropped_batches_give_their_memory_back(tier):
    """A bucket that is forgotten leaves nothing behind."""
    for _ in range(2):
        run_doubling(tier)
    before = used_bytes(tier)
    for _ in range(5):
        run_doubling(tier)
    assert used_bytes(tier) == before


@devices
def test_what_steps_share_stays_when_it_cannot_grow(open_way, way, monkeypatch):
    """Batches lowered before still use it."""
    for what in way.grows:
        tier = open_way()
        refused_growth(tier, tier._memory, what, monkeypatch)
        tier.close()
