"""A second opinion: the ``gguf`` package reads what is written here, and the other way round."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from contract.dtypes import BF16, BY_GGML_ID, F16, F32, I32, Q4_1, Q6_K, Q8_0
from reference.model.gguf.file import open_gguf
from reference.model.gguf.strings import StringArray
from reference.model.gguf.types import GGML_TYPES, GgufType
from reference.model.gguf.writer import Typed, write_gguf
from tests.needs import need_file
from tests.paths import VOCAB

SCALARS = {
    GgufType.UINT8: 255, GgufType.INT8: -128, GgufType.UINT16: 65535, GgufType.INT16: -32768,
    GgufType.UINT32: 4294967295, GgufType.INT32: -2147483648, GgufType.FLOAT32: 0.15625,
    GgufType.BOOL: True, GgufType.STRING: "héllo", GgufType.UINT64: 18446744073709551615,
    GgufType.INT64: -9223372036854775808, GgufType.FLOAT64: -1e300,
}  # fmt: skip


def test_every_tensor_type_of_the_package_is_known():
    theirs = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    ours = {number: (kind.block_elements, kind.block_bytes) for number, kind in GGML_TYPES.items()}
    assert ours == theirs
    names = {int(kind): kind.name.lower() for kind in GGML_QUANT_SIZES}
    assert {number: kind.name for number, kind in GGML_TYPES.items()} == names


def test_every_value_type_of_the_package_is_known():
    theirs = {kind.name: int(kind) for kind in gguf.GGUFValueType}
    assert {kind.name: int(kind) for kind in GgufType} == theirs


def compare(path: Path) -> None:
    """Everything both readers say about ``path`` is equal."""
    theirs = gguf.GGUFReader(path)
    with open_gguf(path) as ours:
        fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert list(ours.metadata) == list(fields)
        for key, field in fields.items():
            assert ours.value_types[key] == field.types[0]
            value = ours.metadata[key]
            if isinstance(value, StringArray):
                assert value.to_list() == [field.parts[index].tobytes() for index in field.data]
            elif isinstance(value, np.ndarray):
                assert value.tolist() == field.contents()
            else:
                assert value == field.contents()
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert info.shape == tuple(reversed(tensor.shape.tolist()))
            assert info.ggml_type.ggml_id == tensor.tensor_type
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert ours.tensor_bytes(tensor.name).tobytes() == tensor.data.tobytes()


def test_they_read_what_we_write(tmp_path):
    rng = np.random.default_rng(1)
    metadata = {f"scalar.{kind.name}": Typed(kind, value) for kind, value in SCALARS.items()}
    metadata["general.architecture"] = "llama"
    metadata["numbers"] = np.arange(5, dtype="i2")
    metadata["flags"] = [True, False]
    metadata["floats"] = [0.5, -1.0]
    metadata["tokens"] = ["a", "", "é", b"\xff"]
    tensors = {
        dtype.name: (dtype, (2, 3, 256), rng.bytes(6 * dtype.row_bytes(256)))
        for dtype in BY_GGML_ID.values()
    }
    for alignment in (32, 256):
        path = tmp_path / f"{alignment}.gguf"
        write_gguf(path, {**metadata, "general.alignment": alignment}, tensors)
        compare(path)


def test_we_read_what_they_write(tmp_path):
    path = tmp_path / "theirs.gguf"
    rng = np.random.default_rng(2)
    writer = gguf.GGUFWriter(path, "qwen3")
    for kind, value in SCALARS.items():
        writer.add_key_value(f"scalar.{kind.name}", value, gguf.GGUFValueType(kind))
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 2.0])
    writer.add_array("flags", [True, False, True])
    writer.add_token_list([b"a", b"\xff", "é".encode()])
    for dtype, numpy_type in ((F32, "f4"), (F16, "f2"), (I32, "i4")):
        writer.add_tensor(dtype.name, rng.integers(0, 9, (3, 5)).astype(numpy_type))
    for dtype in (Q8_0, Q4_1, Q6_K, BF16):
        blocks = rng.integers(0, 256, (4, dtype.row_bytes(512)), np.uint8)
        kind = gguf.GGMLQuantizationType(dtype.ggml_id)
        writer.add_tensor(dtype.name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    compare(path)
    with open_gguf(path) as file:
        assert file.tensors["q8_0"].shape == (4, 512)
        assert file.tensors["f32"].shape == file.tensor_array("f32").shape == (3, 5)


def test_published_vocabulary():
    """A file made by neither: 32,000 tokens with scores and types."""
    compare(need_file(VOCAB / "ggml-vocab-llama-spm.gguf"))


@pytest.mark.parametrize(
    ("name", "tokens", "merges"),
    [("llama-bpe", 128256, 280147), ("qwen35", 151936, 151387), ("gemma-4", 262144, 514906)],
)
def test_large_published_vocabulary(name, tokens, merges):
    """Too slow for the package to read: sizes, and every string is where the file has it."""
    path = need_file(VOCAB / f"ggml-vocab-{name}.gguf")
    content = path.read_bytes()
    with open_gguf(path) as file:
        for key, count in (("tokens", tokens), ("merges", merges)):
            strings = file.require(f"tokenizer.ggml.{key}", StringArray)
            assert len(strings) == count
            packed = b"".join(len(s).to_bytes(8, "little") + s for s in strings.to_list())
            assert packed == content[strings.offsets[0] : strings.offsets[-1]]
        assert len(file.require("tokenizer.ggml.token_type", np.ndarray)) == tokens
