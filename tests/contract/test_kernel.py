"""The ``.zrt`` kernel file: exact round trips, every field checked, no damage accepted."""

import dataclasses
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import kernel as k
from contract.errors import CodecError
from contract.kernel import GpuTarget, KernelHeader, decode_kernel, encode_kernel

GFX1201 = KernelHeader(
    name="rms_norm", target=GpuTarget.GFX1201, code=bytes(range(256)) * 2, entry_offset=256,
    buffer_count=3, push_constant_bytes=16, subgroup_size=32, workgroup_size=(256, 1, 1),
    lds_bytes=1024, vgpr_count=24, sgpr_count=16, occupancy_hint=8, rsrc1=0x600F0002, rsrc2=0x84,
    rsrc3=0x10, user_sgpr_count=2,
)  # fmt: skip
"""Register words as observed for a one-dimensional gfx1201 kernel."""
NUMPY = KernelHeader(name="add", target=GpuTarget.CPU_NUMPY, code=b"add", buffer_count=3)
BLOB = encode_kernel(GFX1201)


def signed(blob: bytearray) -> bytes:
    blob[96:128] = hashlib.sha256(blob[:96] + blob[128:]).digest()
    return bytes(blob)


@st.composite
def kernels(draw: st.DrawFn) -> KernelHeader:
    """Any kernel the format holds."""
    target = draw(st.sampled_from(GpuTarget))
    code = draw(st.binary(min_size=1, max_size=600))
    registers = {}
    entry = draw(st.integers(0, len(code) - 1))
    if target.is_amd:
        entry -= entry % k.AMD_CODE_ALIGNMENT
        user_sgprs = draw(st.integers(0, k.MAX_USER_SGPRS))
        scratch = draw(st.sampled_from((0, 4, 512, k.MAX_SCRATCH_BYTES)))
        word = draw(st.integers(0, 2**32 - 1)) & ~0x3F
        registers = {
            "rsrc1": draw(st.integers(0, 2**32 - 1)),
            "rsrc2": word | user_sgprs << 1 | (scratch > 0),
            "rsrc3": draw(st.integers(0, 2**32 - 1)),
            "user_sgpr_count": user_sgprs,
            "scratch_bytes": scratch,
        }
    return KernelHeader(
        name=draw(st.from_regex(r"[a-zæ-ø_][a-z0-9_ ]{0,40}", fullmatch=True)), target=target,
        code=code, entry_offset=entry, buffer_count=draw(st.integers(0, 8)),
        push_constant_bytes=4 * draw(st.integers(0, k.MAX_PUSH_CONSTANT_BYTES // 4)),
        subgroup_size=draw(st.sampled_from(k.SUBGROUP_SIZES)),
        workgroup_size=draw(st.sampled_from(((1, 1, 1), (256, 1, 1), (8, 8, 8), (1, 1, 1024)))),
        lds_bytes=draw(st.integers(0, k.MAX_LDS_BYTES)),
        vgpr_count=draw(st.integers(0, k.MAX_VGPRS)), sgpr_count=draw(st.integers(0, k.MAX_SGPRS)),
        occupancy_hint=draw(st.integers(0, k.MAX_OCCUPANCY)), **registers,
    )  # fmt: skip


@given(kernel=kernels())
def test_a_kernel_survives(kernel):
    blob = encode_kernel(kernel)
    assert decode_kernel(blob) == kernel
    assert encode_kernel(decode_kernel(blob)) == blob


def test_the_fixed_offsets_of_the_format():
    """A reader that knows only the documented offsets finds every field."""

    def word(offset: int, size: int = 4) -> int:
        return int.from_bytes(BLOB[offset : offset + size], "little")

    assert BLOB[:4] == b"ZRT\0"
    assert word(0) == 0x0054525A
    assert (word(4, 2), word(6, 2)) == (2, 1)
    assert [word(offset) for offset in range(8, 64, 4)] == [
        512, 256, 3, 16, 32, 256, 1, 1, 1024, 24, 16, 8, 640, 8,
    ]  # fmt: skip
    assert [word(offset) for offset in range(64, 96, 4)] == [0x600F0002, 0x84, 0x10, 2, 0, 0, 0, 0]
    assert BLOB[128:640] == GFX1201.code
    assert BLOB[640:] == b"rms_norm"


@pytest.mark.parametrize("blob", [BLOB, encode_kernel(NUMPY)], ids=["gfx1201", "cpu"])
def test_any_changed_byte_is_noticed(blob):
    for offset in range(len(blob)):
        damaged = bytearray(blob)
        damaged[offset] ^= 1 << offset % 8
        with pytest.raises(CodecError):
            decode_kernel(bytes(damaged))


def test_any_truncation_or_addition_is_noticed():
    for length in range(len(BLOB)):
        with pytest.raises(CodecError):
            decode_kernel(BLOB[:length])
    with pytest.raises(CodecError):
        decode_kernel(BLOB + b"\0")


@settings(max_examples=120)
@given(offset=st.integers(0, len(BLOB) - 1), change=st.integers(1, 255))
def test_a_forged_digest_gets_no_further_than_a_typed_error(offset, change):
    """A changed and re-signed file is a kernel the encoder would have written, or a CodecError."""
    forged = bytearray(BLOB)
    forged[offset] ^= change
    blob = signed(forged)
    try:
        kernel = decode_kernel(blob)
    except CodecError:
        return
    assert encode_kernel(kernel) == blob


@pytest.mark.parametrize(("version", "word"), [(1, "older"), (3, "newer")])
def test_another_abi_version_says_so(version, word):
    other = bytearray(BLOB)
    other[4] = version
    with pytest.raises(CodecError, match=f"is {version}, {word} than the 2") as caught:
        decode_kernel(signed(other))
    assert caught.value.offset == 4


@pytest.mark.parametrize(
    ("change", "offset"),
    [
        ({"name": ""}, 60), ({"name": "x" * 256}, 60), ({"name": "a\nb"}, 60),
        ({"code": b"", "entry_offset": 0}, 8), ({"entry_offset": 512}, 12),
        ({"entry_offset": -1}, 12), ({"entry_offset": 4}, 12), ({"buffer_count": 9}, 16),
        ({"buffer_count": -1}, 16), ({"push_constant_bytes": 260}, 20),
        ({"push_constant_bytes": 6}, 20), ({"subgroup_size": 33}, 24),
        ({"workgroup_size": (0, 1, 1)}, 28), ({"workgroup_size": (1024, 2, 1)}, 28),
        ({"lds_bytes": 2**20}, 40), ({"vgpr_count": 513}, 44), ({"sgpr_count": 129}, 48),
        ({"occupancy_hint": 65}, 52), ({"rsrc1": 2**32}, 64), ({"rsrc2": -1}, 68),
        ({"rsrc3": 2**32}, 72), ({"user_sgpr_count": 3}, 76), ({"scratch_bytes": 16}, 80),
        ({"rsrc2": 0x85}, 80),
    ],
    ids=str,
)  # fmt: skip
def test_a_field_out_of_range_names_its_offset(change, offset):
    with pytest.raises(CodecError) as caught:
        encode_kernel(dataclasses.replace(GFX1201, **change))
    assert caught.value.offset == offset


@pytest.mark.parametrize("field", k._AMD_ONLY)
def test_register_words_belong_to_amd_targets(field):
    with pytest.raises(CodecError, match="must be 0 for CPU_NUMPY"):
        encode_kernel(dataclasses.replace(NUMPY, **{field: 1}))


def test_an_unknown_target():
    other = bytearray(BLOB)
    other[6] = 0x7E
    with pytest.raises(CodecError, match="0x7e is unknown"):
        decode_kernel(signed(other))
