"""What is written is what is read back, the same every time, and never half a file."""

import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.dtypes import BF16, F16, F32, I32, Q4_K, Q8_0, WEIGHT_DTYPES
from contract.errors import ModelFileError
from reference.model.gguf.file import open_gguf
from reference.model.gguf.strings import StringArray
from reference.model.gguf.types import GGML_TYPES, GgufType
from reference.model.gguf.writer import HOLE, Typed, write_gguf

WIDTHS = {
    GgufType[f"{sign}INT{bits}"]: (-(1 << bits - 1), (1 << bits - 1) - 1) if not sign
    else (0, (1 << bits) - 1)
    for bits in (8, 16, 32, 64) for sign in ("U", "")
}  # fmt: skip
NUMBERS = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", "u8", "i8", "f8")

keys = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40).filter(
    lambda key: key != "general.alignment"
)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
single_floats = st.floats(width=32, allow_nan=False)


@st.composite
def scalars(draw: st.DrawFn) -> Typed:
    """Any scalar of any stored type."""
    kind = draw(st.sampled_from([kind for kind in GgufType if kind is not GgufType.ARRAY]))
    if kind in WIDTHS:
        return Typed(kind, draw(st.integers(*WIDTHS[kind])))
    strategy = {
        GgufType.FLOAT32: single_floats,
        GgufType.FLOAT64: st.floats(allow_nan=False),
        GgufType.BOOL: st.booleans(),
        GgufType.STRING: texts,
    }[kind]
    return Typed(kind, draw(strategy))


@st.composite
def number_arrays(draw: st.DrawFn) -> np.ndarray:
    """Any bits of any dtype, NaN payloads included."""
    dtype = np.dtype(draw(st.sampled_from(NUMBERS)))
    if dtype.kind == "b":
        return np.array(draw(st.lists(st.booleans(), max_size=9)), "?")
    count = draw(st.integers(0, 9)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype)


values = st.one_of(
    scalars(), number_arrays(), st.lists(st.binary(max_size=20), min_size=1, max_size=20)
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple:
    """A tensor of any known type, its data whole or in chunks."""
    kind = draw(st.sampled_from([*WEIGHT_DTYPES, I32, *GGML_TYPES.values()]))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    shape[-1] *= kind.block_elements
    size = int(np.prod(shape)) // kind.block_elements * kind.block_bytes
    return kind, tuple(shape), np.random.default_rng(draw(st.integers(0, 99))).bytes(size)


def same(read: object, written: object) -> bool:
    """Equality of a value read with one written, bits and types included."""
    if isinstance(written, Typed):
        return type(read) is type(written.value) and read == written.value
    if isinstance(written, np.ndarray):
        return read.dtype == written.dtype and read.tobytes() == written.tobytes()
    return read.to_list() == written


@settings(max_examples=150, deadline=None)
@given(
    metadata=st.dictionaries(keys, values, max_size=8),
    sources=st.dictionaries(keys.filter(lambda name: len(name.encode()) < 256), tensors()),
    alignment=st.sampled_from([8, 16, 32, 64, 4096]),
)
def test_round_trip(tmp_path_factory, metadata, sources, alignment):
    """Any metadata and tensors come back in order, with types and bits; a rewrite is identical."""
    metadata = {key: value for key, value in metadata.items() if not key.startswith("split.")}
    path = tmp_path_factory.getbasetemp() / "round.gguf"
    again = tmp_path_factory.getbasetemp() / "again.gguf"
    metadata["general.alignment"] = Typed(GgufType.UINT32, alignment)
    write_gguf(path, metadata, sources)
    with open_gguf(path) as file:
        assert list(file.metadata) == list(metadata)
        for key, value in metadata.items():
            assert same(file.metadata[key], value)
            if isinstance(value, Typed):
                assert file.value_types[key] is value.kind
        assert list(file.tensors) == list(sources)
        for name, (kind, shape, data) in sources.items():
            info = file.tensors[name]
            assert (info.ggml_type.ggml_id, info.shape) == (kind.ggml_id, shape)
            assert info.offset % alignment == 0
            assert path.read_bytes()[info.offset :][: info.nbytes] == data
        copied = {
            key: Typed(file.value_types[key], value)
            if file.value_types[key] is not GgufType.ARRAY
            else value
            for key, value in file.metadata.items()
        }
        write_gguf(again, copied, sources)
    assert path.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (0, GgufType.UINT32), (2**32 - 1, GgufType.UINT32), (2**32, GgufType.UINT64),
        (2**64 - 1, GgufType.UINT64), (-1, GgufType.INT64), (1.5, GgufType.FLOAT32),
        (True, GgufType.BOOL), ("s", GgufType.STRING), ([1, 2], np.uint32), ([1, 2**40], np.uint64),
        ([-1, 2], np.int64), ([1, 2.5], np.float32), ((True, False), np.bool_),
        (["a", b"\xff"], GgufType.STRING), (np.array([1, 2], ">i2"), np.int16),
        (np.arange(6)[::2], np.int64),
    ],
)  # fmt: skip
def test_default_types(value, kind, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, {"k": value}, {})
    with open_gguf(path) as file:
        read = file.metadata["k"]
        if isinstance(read, np.ndarray):
            assert read.dtype == kind
            assert read.tolist() == list(value)
        elif isinstance(read, StringArray):
            assert read.to_list() == [b"a", b"\xff"]
        else:
            assert (file.value_types["k"], read) == (kind, value)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (2**64, "cannot be stored: "), (-(2**63) - 1, "cannot be stored: "),
        ([-1, 2**63], "cannot be stored: "), (1e39, "cannot be stored: "),
        ([1e39], "cannot be stored: "), (Typed(GgufType.UINT8, 256), "cannot be stored: "),
        (Typed(GgufType.UINT32, 1.5), "cannot be stored: "),
        (Typed(GgufType.UINT32, "1"), "cannot have the type uint32"),
        (Typed(GgufType.STRING, 1), "cannot have the type string"),
        (Typed(GgufType.ARRAY, 1), "cannot have the type array"), ([], "empty array"),
        ([1, "a"], "mixes"), ([[1]], "mixes"), ([True, 1], "mixes"), ({"a": 1}, "has no GGUF"),
        (None, "has no GGUF"), (np.zeros((2, 2), "f4"), "2-dimensional array of float32"),
        (np.zeros(2, "f2"), "1-dimensional array of float16"), ("\ud800", "surrogates not allowed"),
    ],
)  # fmt: skip
def test_value_that_cannot_be_stored(value, part, tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelFileError) as caught:
        write_gguf(path, {"k": value}, {})
    assert caught.value.where == "key 'k'"
    assert part in caught.value.problem
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("metadata", "tensors", "where"),
    [
        ({"": 1}, {}, "byte offset 24"),
        ({"k" * 65536: 1}, {}, "byte offset 32"),
        ({}, {"": (F32, (1,), bytes(4))}, "byte offset 24"),
        ({}, {"w": (F32, (), bytes(4))}, "tensor 'w'"),
        ({}, {"w": (F32, (1, 1, 1, 1, 1), bytes(4))}, "tensor 'w'"),
        ({}, {"w": (F32, (0, 4), b"")}, "tensor 'w'"),
        ({}, {"w": (F32, (-1,), b"")}, "tensor 'w'"),
        ({}, {"w": (F32, (2**32, 2**32), b"")}, "tensor 'w'"),
        ({}, {"w": (Q8_0, (31,), b"")}, "tensor 'w'"),
        ({}, {"\ud800": (F32, (1,), bytes(4))}, "tensor '\\ud800'"),
        *(
            ({"general.alignment": value}, {}, "key 'general.alignment'")
            for value in (0, 4, 48, -32, 2**40, 32.0, True, "32", [32], Typed(GgufType.UINT64, 32))
        ),
    ],
)
def test_refuses_what_the_reader_would(metadata, tensors, where, tmp_path):
    with pytest.raises(ModelFileError) as caught:
        write_gguf(tmp_path / "model.gguf", metadata, tensors)
    assert caught.value.where == where
    assert caught.value.path == str(tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 15, 17, 1000])
def test_data_of_another_length(size, tmp_path):
    for data in (bytes(size), iter([bytes(1)] * size)):
        with pytest.raises(ModelFileError, match="'w': f32 \\[4\\] takes 16 bytes, its data has"):
            write_gguf(tmp_path / "model.gguf", {}, {"w": (F32, (4,), data)})
    assert list(tmp_path.iterdir()) == []


def test_endless_data_is_cut_off(tmp_path):
    """A generator that never ends is stopped as soon as it has given too much."""

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(8)

    with pytest.raises(ModelFileError, match="at least 24"):
        write_gguf(tmp_path / "model.gguf", {}, {"w": (F32, (4,), endless())})


def test_data_in_any_form(tmp_path):
    numbers = np.arange(6, dtype="<f4").reshape(2, 3)
    buckets = {
        "array": numbers, "transposed": numbers.T.copy().T, "bytes": numbers.tobytes(),
        "view": memoryview(bytearray(numbers.tobytes())), "rows": list(numbers),
        "generator": (numbers.tobytes()[i : i + 5] for i in range(0, 24, 5)),
    }  # fmt: skip
    path = tmp_path / "model.gguf"
    write_gguf(path, {}, {name: (F32, (2, 3), data) for name, data in buckets.items()})
    with open_gguf(path) as file:
        for name in buckets:
            assert file.tensor_array(name).tolist() == numbers.tolist()


def test_failure_keeps_the_old_file(tmp_path):
    """Whatever happens while writing, the file that was there is untouched and nothing is left."""
    path = tmp_path / "model.gguf"
    write_gguf(path, {"k": 1}, {})
    before = path.read_bytes()

    def breaks() -> Iterator[bytes]:
        yield bytes(8)
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        write_gguf(path, {"k": 2}, {"w": (F32, (4,), breaks())})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_overwriting_an_open_model_is_safe(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, {}, {"w": (F32, (1,), np.ones(1, "<f4"))})
    with open_gguf(path) as file:
        view = file.tensor_array("w")
        write_gguf(path, {}, {})
        file.check_unchanged()
        assert view.tolist() == [1.0]


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    file, link = tmp_path / "file.gguf", tmp_path / "link.gguf"
    file.write_bytes(b"old")
    link.symlink_to(file)
    write_gguf(link, {"general.architecture": "x"}, {})
    assert link.is_symlink()
    assert file.read_bytes()[:4] == b"GGUF"


def test_what_is_no_file_is_not_replaced(tmp_path):
    """Who may write to a folder of devices would replace them by files."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ModelFileError, match="is no file"):
        write_gguf(pipe, {"general.architecture": "x"}, {})
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_unwritable_places(tmp_path):
    with pytest.raises(ModelFileError, match="cannot be written: No such file or directory"):
        write_gguf(tmp_path / "none" / "model.gguf", {}, {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelFileError, match="cannot be written: Is a directory"):
        write_gguf(tmp_path / "folder", {}, {})
    assert os.listdir(tmp_path) == ["folder"]


def test_bytes_of_a_small_file(tmp_path):
    """The layout, spelled out once against the format's description."""
    path = tmp_path / "model.gguf"
    write_gguf(path, {"a": 7}, {"w": (F16, (2, 1), b"\1\2\3\4"), "v": (BF16, (1,), b"\5\6")})
    expected = b"GGUF" + struct.pack("<IQQ", 3, 2, 1)
    expected += struct.pack("<Q", 1) + b"a" + struct.pack("<II", 4, 7)
    expected += struct.pack("<Q", 1) + b"w" + struct.pack("<IQQIQ", 2, 1, 2, 1, 0)
    expected += struct.pack("<Q", 1) + b"v" + struct.pack("<IQIQ", 1, 1, 30, 32)
    expected += bytes(-len(expected) % 32)
    expected += b"\1\2\3\4" + bytes(28) + b"\5\6" + bytes(30)
    assert path.read_bytes() == expected


def test_hole_reads_as_zeros_and_takes_no_disk(tmp_path):
    """The last tensor too: the file is as long as its header says."""
    path = tmp_path / "model.gguf"
    data = np.ones(3, "<f4")
    write_gguf(
        path, {}, {"a": (F32, (1 << 24,), HOLE), "b": (F32, (3,), data), "c": (F16, (5, 7), HOLE)}
    )
    with open_gguf(path) as file:
        assert not file.tensor_array("a").any()
        assert file.tensor_array("b").tolist() == data.tolist()
        assert not file.tensor_array("c").any()
    if hasattr(os.stat_result, "st_blocks"):
        assert path.stat().st_blocks * 512 < 1 << 20 < path.stat().st_size


def test_large_tensor_is_streamed(tmp_path):
    """A tensor can be made of chunks that are never all in memory."""
    path = tmp_path / "model.gguf"
    rows, row = 512, 144 * 16
    chunks = (bytes([index % 256]) * row for index in range(rows))
    write_gguf(path, {}, {"w": (Q4_K, (rows, 4096), chunks)})
    with open_gguf(path) as file:
        assert file.tensor_bytes("w")[:, -1].tolist() == [index % 256 for index in range(rows)]
