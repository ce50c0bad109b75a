"""What code is refused for, and that nothing shipped is; waits taken away one at a time."""

import re
import struct
from dataclasses import replace

import pytest

from accel.amd.generation import GENERATIONS, GFX11, GFX12
from accel.amd.isa.checks import check_code
from accel.amd.isa.decode import instructions, isa_of
from accel.amd.isa.semantics import VECTOR_OFFSET, access
from accel.amd.isa.waits import missing_waits
from contract.errors import CodecError
from contract.kernel import GpuTarget
from tests.amd.code import SAMPLE, shipped, some_shipped, words

S_NOP, S_ENDPGM = 0xBF800000, 0xBFB00000
LOAD_S4 = (0xF4000100, 0xF8000000)
WAIT_KM, WAIT_KM_1 = 0xBFC70000, 0xBFC70001
USE_S4 = 0x80058004
SIGNAL, BARRIER, WAIT_DS = 0xBE804EC1, 0xBF94FFFF, 0xBFC60000
WAITS = re.compile(r"s_wait_|s_waitcnt(_vscnt)?$")
STORE_LDS = (0xD8340000, 0x00000100)


@pytest.mark.parametrize("gpu", GENERATIONS, ids=lambda gpu: gpu.cpu)
@pytest.mark.parametrize("step", [2 * SAMPLE, pytest.param(1, marks=pytest.mark.soak)])
def test_what_is_shipped_passes(gpu, step):
    """As it did when it was built: known instructions, branches to code, no missing wait."""
    for kernel in some_shipped(step, gpu):
        check_code(kernel)


@pytest.mark.parametrize(
    ("code", "counter"),
    [
        ((*LOAD_S4, USE_S4), "kmcnt"),
        ((*LOAD_S4, WAIT_KM_1, USE_S4), "kmcnt"),
        ((*LOAD_S4, *LOAD_S4, WAIT_KM), "kmcnt"),
        ((*STORE_LDS, SIGNAL, BARRIER), "dscnt"),
    ],
    ids=["none", "too weak", "two writes", "barrier"],
)
def test_a_missing_wait_is_found(code, counter):
    found = missing_waits(words(*code, S_ENDPGM))
    assert [missing.counter for missing in found] == [counter]


@pytest.mark.parametrize(
    "code",
    [(*LOAD_S4, WAIT_KM, USE_S4), (*STORE_LDS, WAIT_DS, SIGNAL, BARRIER)],
    ids=["load", "barrier"],
)
def test_a_wait_that_is_there_is_enough(code):
    assert missing_waits(words(*code, S_ENDPGM)) == []


def waitcnt(vector: int = 63, other: int = 63) -> int:
    """S_WAITCNT of gfx11: so many loads, so many scalar loads or accesses of group memory."""
    return 0xBF890000 | vector << 10 | other << 4 | 7


S_BARRIER = 0xBFBD0000
LOAD_V1, USE_V1 = (0xDC520000, 0x01040000), 0x7E040301


@pytest.mark.parametrize(
    ("code", "counter"),
    [
        ((*LOAD_S4, waitcnt(other=1), USE_S4), "kmcnt"),
        ((*LOAD_S4, waitcnt(vector=0), USE_S4), "kmcnt"),
        ((*LOAD_S4, waitcnt(other=0), USE_S4), ""),
        ((*LOAD_V1, waitcnt(vector=1), USE_V1), "loadcnt"),
        ((*LOAD_V1, waitcnt(other=0), USE_V1), "loadcnt"),
        ((*LOAD_V1, *LOAD_V1, waitcnt(vector=0), USE_V1), ""),
        ((*LOAD_V1, 0xDC520000, 0x02040001), "loadcnt"),
        ((*STORE_LDS, S_BARRIER), "dscnt"),
        ((*STORE_LDS, waitcnt(other=0), S_BARRIER), ""),
    ],
)
def test_waits_of_gfx11(code, counter):
    """One counter of scalar loads and group memory, one of loads of vectors, which end in order: a
    register may be loaded anew, but not be where the next one is loaded from."""
    found = missing_waits(words(*code, S_ENDPGM), isa_of(GFX11.target))
    assert [missing.counter for missing in found] == ([counter] if counter else [])


@pytest.mark.parametrize(
    ("name", "gpu"), [("add", GFX12), ("rope", GFX12), ("stream_out", GFX12), ("rope", GFX11)]
)
def test_taking_away_any_wait_is_noticed(name, gpu):
    """Negative control on compiled code: all but waits for stores, which guard no register."""
    code, isa = shipped(name, gpu).code, isa_of(gpu.target)
    waits = [i for i in instructions(code, isa) if WAITS.match(i.name)]
    assert waits
    unnoticed = []
    for wait in waits:
        spoiled = bytearray(code)
        struct.pack_into("<I", spoiled, wait.address, S_NOP)
        if not missing_waits(bytes(spoiled), isa):
            unnoticed.append(wait.name)
    assert set(unnoticed) <= {"s_wait_storecnt", "s_waitcnt_vscnt"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"target": GpuTarget.GFX1151}, "target GFX1151, not GFX1201 or GFX1100"),
        ({"code": words(0xBFA00010, S_ENDPGM)}, "leads to 0x44, no code"),
        ({"code": words(0xBE804700, S_ENDPGM)}, "has no semantics"),
        ({"code": words(*LOAD_S4, USE_S4, S_ENDPGM)}, "1 waits are missing: s_add_co_u32 at 0x8"),
        ({"scratch_bytes": 64}, "64 bytes of scratch memory"),
        ({"vgpr_count": 256}, "256 vector registers, RSRC1 says"),
        ({"lds_bytes": 4096}, "4096 bytes of group memory, RSRC2 says 0"),
        ({"code": words(0x7E000300 | 200 << 17, S_ENDPGM)}, "v_mov_b32 uses v200, beyond"),
    ],
    ids=["gpu", "branch", "unknown", "wait", "scratch", "registers", "group memory", "beyond"],
)
def test_refused(change, problem):
    with pytest.raises(CodecError, match=problem):
        check_code(replace(shipped("add"), **change))  # type: ignore[arg-type]


def test_vector_register_124_is_no_null():
    """Only among scalar registers does the number mean none."""
    moved = next(instructions(words(0x7E000300 | 124 << 17)))
    assert moved.name == "v_mov_b32"
    assert access(moved).writes == {VECTOR_OFFSET + 124}
