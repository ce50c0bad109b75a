"""What a well-formed file gives: values, views of the mapping, and typed access to them."""

import gc
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.model.gguf.file import open_gguf
from reference.model.gguf.strings import StringArray
from reference.model.gguf.types import GGML_TYPES, GgufType
from tests.model import gguf_bytes as raw
from tests.needs import machine_lacks
from tests.patience import PATIENCE_SECONDS

SCALARS = {
    raw.U8: 255, raw.I8: -128, raw.U16: 65535, raw.I16: -32768, raw.U32: 4294967295,
    raw.I32: -2147483648, raw.F32: 0.15625, raw.BOOL: 1, raw.U64: 18446744073709551615,
    raw.I64: -9223372036854775808, raw.F64: -1e300,
}  # fmt: skip


@pytest.fixture
def save(tmp_path):
    """Writes pieces to a file and gives its path."""

    def write(pieces: raw.Pieces, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(raw.join(pieces))
        return path

    return write


@pytest.mark.parametrize("version", [2, 3])
def test_every_scalar_type(save, version):
    entries = [raw.scalar(f"k{kind}", kind, value) for kind, value in SCALARS.items()]
    entries.append(raw.string("text", "héllo"))
    with open_gguf(save(raw.gguf(entries, version=version))) as file:
        assert file.version == version
        for kind, value in SCALARS.items():
            assert file.metadata[f"k{kind}"] == value
            assert file.value_types[f"k{kind}"] == kind
        assert file.metadata[f"k{raw.BOOL}"] is True
        assert file.metadata["text"] == "héllo"
        assert file.value_types["text"] is GgufType.STRING
        assert list(file.metadata) == [*(f"k{kind}" for kind in SCALARS), "text"]


@pytest.mark.parametrize("kind", SCALARS)
def test_number_arrays_are_views(save, kind):
    """Arrays have the stored dtype and values, at any alignment, and cannot be written to."""
    items = [SCALARS[kind], 0, 1]
    entries = [raw.array("k" * shift, kind, items) for shift in range(1, 9)]
    with open_gguf(save(raw.gguf(entries))) as file:
        for value in file.metadata.values():
            assert value.tolist() == items
            assert not value.flags.owndata
            assert not value.flags.writeable


def test_empty_arrays(save):
    entries = [raw.array("n", raw.F32, []), raw.array("s", raw.STRING, [])]
    with open_gguf(save(raw.gguf(entries))) as file:
        assert file.metadata["n"].shape == (0,)
        assert file.metadata["n"].dtype == np.float32
        assert file.metadata["s"].to_list() == list(file.metadata["s"]) == []


def test_string_array_is_a_sequence_of_bytes(save):
    """Vocabulary strings may be empty, hold NUL, or not be UTF-8 at all."""
    items = [b"", b"a", b"\xff\xfe", b"x\0y", "é".encode() * 200, b"a"]
    with open_gguf(save(raw.gguf([raw.array("t", raw.STRING, items)]))) as file:
        strings = file.require("t", StringArray)
        assert len(strings) == 6
        assert list(strings) == strings.to_list() == items
        assert strings[2] == b"\xff\xfe"
        assert strings[-2] == items[-2]
        assert strings[1:4] == items[1:4]
        assert strings.index(b"x\0y") == 3
        assert b"a" in strings
        with pytest.raises(IndexError):
            strings[6]
        content = file.path.read_bytes()
        for item, start in zip(items, strings.offsets, strict=False):
            assert content[start : start + 8 + len(item)] == len(item).to_bytes(8, "little") + item


@pytest.mark.parametrize("seed", range(6))
def test_large_string_array_of_any_content(save, seed):
    """Strings that look like length fields, long ones and empty ones are told apart exactly."""
    rng = random.Random(seed)
    contents = (b"a", b"\0", b"\1\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\1")
    odd = (0.0, 0.0001, 0.01, 0.3, 1.0, 1.0)[seed]
    items = [
        rng.choice(contents) * rng.choice((0, 1, 3, 31, 40, 300))
        if rng.random() < odd
        else b"token%d" % index
        for index in range(40_000)
    ]
    entries = [raw.array("t", raw.STRING, items), raw.scalar("after", raw.U32, 5)]
    with open_gguf(save(raw.gguf(entries))) as file:
        assert file.metadata["t"].to_list() == items
        assert file.metadata["after"] == 5


@pytest.mark.parametrize("item", [b"", b"token", bytes(300)])
def test_large_string_array_cut_short(save, item):
    content = raw.gguf([raw.array("t", raw.STRING, [item] * 20_000)], alignment=1)
    whole = raw.join(content)
    for size in (len(whole) - 1, len(whole) - 8, len(whole) * 3 // 4):
        with pytest.raises(ModelFileError, match="key 't'"):
            open_gguf(save([raw.Piece(whole[:size])]))


@pytest.mark.parametrize("length", [2**16, 2**31, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("index", [0, 4096, 8191, 8192, 15000, 19999])
def test_large_string_array_with_a_wild_length(save, length, index):
    """A length that leaves the file is caught wherever in the walk it stands."""
    items = [raw.text("ab", length if i == index else None) for i in range(20_000)]
    head = [raw.number(raw.U32, raw.STRING), raw.number(raw.U64, len(items))]
    path = save(raw.gguf([raw.entry("t", raw.ARRAY, *head, *items[: index + 6000])]))
    if length < path.stat().st_size:
        os.truncate(path, length)
    with pytest.raises(ModelFileError, match="key 't'"):
        open_gguf(path)


def _resident(path: Path) -> int:
    """Bytes of a mapped file that this process can read without a fault."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.endswith(str(path)))
    (rss,) = (line for line in lines[start : start + 5] if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024


def test_reading_ahead_brings_a_file_into_memory(save):
    """All of it, and without harm where the file is closed at once."""
    if sys.platform != "linux" or _kernel() < (5, 14):
        machine_lacks("Linux 5.14, which can be asked for that")
    data = bytes(40 << 20)
    blocks = len(data) // 34 // 32 * 32
    path = save(raw.gguf([], [raw.tensor("a", [32, blocks], 8, 0)], data=data))
    with open_gguf(path) as file:
        held = file.tensor_bytes("a")
        assert _resident(path) < 10 << 20
        thread = file.read_ahead()
    thread.join(PATIENCE_SECONDS)
    assert _resident(path) >= 40 << 20
    assert held.nbytes == blocks * 34


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


def test_tensors_in_any_order_with_gaps(save):
    data = np.arange(64, dtype="<f4").tobytes()
    tensors = [raw.tensor("late", (4, 2), 0, 128), raw.tensor("early", (8,), 0, 32)]
    with open_gguf(save(raw.gguf([], tensors, data))) as file:
        late = file.tensors["late"]
        assert list(file.tensors) == ["late", "early"]
        assert (late.shape, late.nbytes, late.rows, late.row_bytes) == ((2, 4), 32, 2, 16)
        assert late.dtype.name == late.ggml_type.name == "f32"
        assert file.tensor_array("late").tolist() == [[32, 33, 34, 35], [36, 37, 38, 39]]
        assert file.tensor_bytes("early").shape == (1, 32)
        assert file.tensor_array("early").tolist() == list(range(8, 16))


def test_tensor_views(save):
    """Blocks come as rows of bytes; plain numbers in their shape; nothing is copied."""
    block = bytes(range(34)) * 12
    halves = np.array([[1.5, -2.0]], "<f2").tobytes()
    tensors = [
        raw.tensor("experts", (64, 3, 2), 8, 0),
        raw.tensor("half", (2, 1), 1, 416),
        raw.tensor("brain", (2,), 30, 448),
    ]
    data = block.ljust(416, b"\0") + halves.ljust(32, b"\0") + b"\x80\x3f\0\0"
    with open_gguf(save(raw.gguf([], tensors, data))) as file:
        rows = file.tensor_bytes("experts")
        assert (rows.shape, rows.dtype) == ((6, 68), np.uint8)
        assert rows.tobytes() == block
        assert not rows.flags.owndata
        assert not rows.flags.writeable
        assert file.tensor_array("half").tolist() == [[1.5, -2.0]]
        assert file.tensor_array("brain").tolist() == [0x3F80, 0]
        assert file.tensor_array("brain").dtype == np.uint16
        with pytest.raises(UnsupportedModel, match="'experts': is of type q8_0, where f32"):
            file.tensor_array("experts")


@pytest.mark.parametrize("ggml_type", sorted(GGML_TYPES.values(), key=lambda kind: kind.ggml_id))
def test_every_known_tensor_type_is_listed(save, ggml_type):
    """A type without arithmetic has a size and a name, and an error only when it is read."""
    dimensions = (ggml_type.block_elements * 2, 3)
    data = bytes(6 * ggml_type.block_bytes)
    path = save(raw.gguf([], [raw.tensor("w", dimensions, ggml_type.ggml_id)], data))
    with open_gguf(path) as file:
        info = file.tensors["w"]
        assert (info.ggml_type, info.nbytes) == (ggml_type, len(data))
        if info.dtype is not None:
            assert file.tensor_bytes("w").shape == (3, 2 * ggml_type.block_bytes)
        else:
            with pytest.raises(UnsupportedModel, match=f"'w': is of type {ggml_type}, a type"):
                file.tensor_bytes("w")


def test_alignment_moves_the_data(save):
    entries = [raw.scalar("general.alignment", raw.U32, 256)]
    tensors = [raw.tensor("a", (1,), 0, 0), raw.tensor("b", (1,), 0, 256)]
    data = b"\0\0\x80\x3f".ljust(256, b"\0") + b"\0\0\0\x40"
    with open_gguf(save(raw.gguf(entries, tensors, data, alignment=256))) as file:
        assert file.tensors["a"].offset == 256
        assert file.tensor_array("a").tolist() + file.tensor_array("b").tolist() == [1.0, 2.0]


def test_typed_getters(save):
    entries = [
        raw.scalar("wide", raw.U64, 7),
        raw.scalar("float", raw.F32, 0.5),
        raw.scalar("flag", raw.BOOL, 0),
        raw.array("list", raw.I32, [1, 2]),
    ]
    with open_gguf(save(raw.gguf(entries))) as file:
        assert file.require("wide", int) == 7
        assert repr(file.require("wide", float)) == "7.0"
        assert file.require("flag", bool) is False
        assert file.require("list", np.ndarray).tolist() == [1, 2]
        assert file.get("wide", int, 1) == 7
        assert file.get("absent", int, 1) == 1
        for key, kind, problem in (
            ("absent", int, "key 'absent': is missing (an integer is needed)"),
            ("flag", int, "key 'flag': is true or false where an integer is needed"),
            ("flag", float, "key 'flag': is true or false where a float is needed"),
            ("float", int, "key 'float': is a float where an integer is needed"),
            ("wide", str, "key 'wide': is an integer where a string is needed"),
            ("wide", bool, "key 'wide': is an integer where true or false is needed"),
            ("list", int, "key 'list': is an array of numbers where an integer is needed"),
            ("list", StringArray, "is an array of numbers where an array of strings is needed"),
        ):
            with pytest.raises(ModelFileError) as caught:
                file.require(key, kind)
            assert problem in str(caught.value)
        with pytest.raises(ModelFileError):
            file.get("float", int, 1)


def test_missing_tensor(save):
    with open_gguf(save(raw.gguf())) as file:
        for read in (file.tensor_bytes, file.tensor_array):
            with pytest.raises(ModelFileError, match=r"tensor 'output\.weight': is missing"):
                read("output.weight")


def test_views_outlive_the_file(save):
    path = save(raw.gguf([raw.array("a", raw.U8, [1, 2])], [raw.tensor("w")], bytes(16)))
    with open_gguf(path) as file:
        values, weights = file.metadata["a"], file.tensor_array("w")
    file.close()
    assert values.tolist() == [1, 2]
    assert weights.tolist() == [0, 0, 0, 0]
    for use in (lambda: file.metadata, lambda: file.tensors, lambda: file.tensor_bytes("w")):
        with pytest.raises(ValueError, match="is closed"):
            use()


def test_no_descriptor_is_left_open(save):
    if not Path("/proc/self/fd").exists():
        machine_lacks("/proc/self/fd")
    good = save(raw.gguf([], [raw.tensor("w")], bytes(16)))
    bad = save(raw.gguf([], [raw.tensor("w")]), "bad.gguf")

    def open_files() -> list[str]:
        gc.collect()
        return sorted(
            os.readlink(link)
            for link in Path("/proc/self/fd").iterdir()
            if os.path.lexists(link) and Path(os.readlink(link)).parent == good.parent
        )

    for _ in range(3):
        open_gguf(good).close()
        with pytest.raises(ModelFileError):
            open_gguf(bad)
    assert open_files() == []


def test_symlink_is_followed(save, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(save(raw.gguf([raw.string("k", "v")])))
    with open_gguf(link) as file:
        assert file.metadata["k"] == "v"


@pytest.mark.parametrize("change", ["truncate", "append", "rewrite"])
def test_changed_file_is_noticed(save, change):
    """No view is handed out of a file that is not the one opened; touching it could be fatal."""
    path = save(raw.gguf([], [raw.tensor("w", (4096,))], bytes(4 * 4096)))
    with open_gguf(path) as file:
        file.check_unchanged()
        status = path.stat()
        if change == "truncate":
            os.truncate(path, 64)
        elif change == "append":
            with path.open("ab") as end:
                end.write(b"\0")
        else:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        for use in (
            file.check_unchanged,
            lambda: file.tensor_bytes("w"),
            lambda: file.tensor_array("w"),
        ):
            with pytest.raises(ModelFileError, match=r"model\.gguf: the whole file: was "):
                use()


def test_replacing_the_file_by_rename_is_safe(save, tmp_path):
    path = save(raw.gguf([], [raw.tensor("w", (1,))], b"\0\0\x80\x3f"))
    with open_gguf(path) as file:
        os.replace(save(raw.gguf(), "other.gguf"), path)
        file.check_unchanged()
        assert file.tensor_array("w").tolist() == [1.0]
