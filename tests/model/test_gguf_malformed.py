"""Every way a file is known to be wrong has a name here and a one-line error that says where."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ModelFileError, UnsupportedModel
from reference.model.gguf import limits
from reference.model.gguf.file import open_gguf
from tests.model import gguf_bytes as raw
from tests.model.gguf_bytes import array, entry, gguf, number, scalar, string, tensor, text
from tests.needs import machine_lacks

MAX64 = 2**64 - 1
ALIGNMENT = "general.alignment"
ROOM = bytes(4096)
K, W, A, AT = "key 'k'", "tensor 'w'", f"key '{ALIGNMENT}'", "byte offset"
"""Where errors point."""


def keys(*entries: raw.Pieces) -> raw.Pieces:
    """A file of these keys."""
    return gguf([*entries])


def one(*shape_and_type: Any, data: bytes = ROOM, **fields: Any) -> raw.Pieces:
    """A file of one tensor, w."""
    return gguf([], [tensor("w", *shape_and_type, **fields)], data)


def strings_of(count: int, length: int, data: bytes) -> raw.Pieces:
    """A file of an array of so many strings, of which the first is so long."""
    item = number(raw.U32, raw.STRING), number(raw.U64, count), text("a", length)
    return gguf([entry("k", raw.ARRAY, *item)], [], data)


# name: (file, where the error points, a part of the problem)
CASES: dict[str, tuple[raw.Pieces, str, str]] = {
    "magic": (gguf(magic=b"GGUX"), "byte offset 0", "bad magic: a GGUF file begins with b'GGUF'"),
    "magic-swapped": (gguf(magic=b"FUGG"), "byte offset 0", "bytes swapped"),
    "magic-older-format": (gguf(magic=b"tjgg"), "byte offset 0", "GGML file older than GGUF"),
    "magic-only": ([raw.Piece(b"GGUF")], "byte offset 4", "the version needs 4 bytes"),
    "three-bytes": ([raw.Piece(b"GGU")], "byte offset 0", "bad magic"),
    "no-counts": ([raw.Piece(b"GGUF\3\0\0\0")], "byte offset 8", "the tensor count needs 8"),
    "version-0": (gguf(version=0), "byte offset 4", "version 0 is not one"),
    "version-1": (gguf(version=1), "byte offset 4", "version 1 is not one"),
    "version-future": (gguf(version=4), "byte offset 4", "version 4 is newer"),
    "version-byte-swapped": (gguf(version=3 << 24), "byte offset 4", "byte-swapped"),
    "keys-past-end": (gguf(key_count=100), "byte offset 16", "a count of 100 keys needs 1400"),
    "keys-one-too-many": (gguf([string("a", "b" * 50)], key_count=2), AT, "past the end"),
    "keys-2^64": (gguf(key_count=MAX64), "byte offset 16", f"{MAX64} keys are more than 65536"),
    "keys-million-tiny": (gguf(key_count=10**6, data=ROOM), "byte offset 16", "1000000 keys"),
    "key-empty": (keys(scalar("", raw.U8, 1)), "byte offset 24", "a key is empty"),
    "key-duplicate": (gguf([scalar("k", raw.U8, 1)] * 2), K, "again at byte offset 38"),
    "key-not-utf8": (keys(scalar(b"k\xff", raw.U8, 1)), AT, "not valid UTF-8"),
    "key-too-long": (keys(scalar("k" * 65536, raw.U8, 1)), AT,
                     "a key of 65536 bytes at byte offset 32 is longer than 65535"),
    "key-length-2^64": (gguf([text("k", MAX64)], data=ROOM), AT, f"a key of {MAX64} bytes"),
    "value-type-13": (keys(entry("k", 13, ROOM and number(raw.U8, 0))), K, "type 13"),
    "value-type-2^32": (keys(entry("k", 2**32 - 1, number(raw.U8, 0))), K, "unknown"),
    "value-cut-off": (gguf([entry("k", raw.U64, number(raw.U8, 0))], alignment=1), K, "8"),
    "bool-2": (keys(scalar("k", raw.BOOL, 2)), K, "bool 0 of 1 is 2"),
    "bool-array-255": (keys(array("k", raw.BOOL, [0, 1, 255])), K, "bool 2 of 3 is 255"),
    "string-not-utf8": (keys(string("k", b"\xc3\x28")), K, "not valid UTF-8"),
    "string-surrogate": (keys(string("k", b"\xed\xa0\x80")), K, "not valid UTF-8"),
    "string-past-end": (keys(entry("k", raw.STRING, text("v", 99))), K, "needs 99 bytes"),
    "string-2^63": (keys(entry("k", raw.STRING, text("v", 2**63))), K, "is longer than"),
    "array-nested": (keys(entry("k", raw.ARRAY, number(raw.U32, raw.ARRAY), number(raw.U64, 1))), K,
                     "an array of arrays"),
    "array-type-unknown": (keys(array("k", raw.ARRAY + 9, [])), K, "item type 18"),
    "array-past-end": (keys(array("k", raw.U32, [1], 99)), K, "needs 396 bytes"),
    "array-2^64": (keys(array("k", raw.F64, [1.0], MAX64)), K, "past the end"),
    "array-size-wraps": (keys(array("k", raw.U64, [1], 2**61 + 1)), K, "past the end"),
    "strings-past-end": (gguf([array("k", raw.STRING, ["a", "b"], 4)], data=ROOM[:6], alignment=1),
                         K, "an array of 4 strings needs 32 bytes"),
    "strings-length-past-end": (strings_of(2, 999, ROOM[:99]), K,
                                "a string in it runs past the end"),
    "strings-length-2^64": (strings_of(2, MAX64, ROOM), K, "a string in it runs past the end"),
    "strings-last-past-end": (strings_of(1, MAX64, ROOM), K,
                              "the last of 1 strings runs past the end"),
    "strings-too-many": (keys(array("k", raw.STRING, [], 2**40)), K,
                         f"{2**40} strings make more than {limits.MAX_STRINGS}"),
    "alignment-0": (keys(scalar(ALIGNMENT, raw.U32, 0)), A, "0 is not a power"),
    "alignment-1": (keys(scalar(ALIGNMENT, raw.U32, 1)), A, "1 is not a power"),
    "alignment-24": (keys(scalar(ALIGNMENT, raw.U32, 24)), A, "24 is not"),
    "alignment-2^31": (keys(scalar(ALIGNMENT, raw.U32, 2**31)), A, "not"),
    "alignment-u64": (keys(scalar(ALIGNMENT, raw.U64, 32)), A, "type uint64"),
    "alignment-string": (keys(string(ALIGNMENT, "32")), A, "type string"),
    "tensors-past-end": (gguf(tensor_count=100), "byte offset 8", "a count of 100 tensors needs"),
    "tensors-2^64": (gguf(tensor_count=MAX64), "byte offset 8", f"{MAX64} tensors are more than"),
    "tensors-2^63": (gguf(tensor_count=2**63), "byte offset 8", "tensors are more than 65536"),
    "name-empty": (gguf([], [tensor("")], ROOM), "byte offset 24", "a tensor name is empty"),
    "name-not-utf8": (gguf([], [tensor(b"\x80")], ROOM), AT, "not valid UTF-8"),
    "name-too-long": (gguf([], [tensor("n" * 256)], ROOM), AT, "longer than 255"),
    "name-duplicate": (gguf([], [tensor("w"), tensor("w", offset=32)], ROOM), W,
                       "appears again at byte offset 57"),
    "dimensions-0": (one(()), W, "has 0 dimensions"),
    "dimensions-5": (one((1,) * 5), W, "has 5 dimensions"),
    "dimensions-2^32": (one(n_dims=2**32 - 1), W, "4294967295 dimensions"),
    "dimension-zero": (one((4, 0)), W, "a dimension of 0"),
    "dimension-2^63": (one((2**63,)), W, "2^63 - 1 elements"),
    "dimension-2^64": (one((MAX64,)), W, "2^63 - 1 elements"),
    "dimensions-wrap-to-zero": (one((2**32, 2**32)), W, "2^63 - 1 elements"),
    "dimensions-wrap-to-small": (one((2**42 + 1, 2**22)), W, "2^63 - 1 elements"),
    "size-wraps-to-zero": (one((2**62,)), W, f"of {2**64} bytes ends at"),
    "size-wraps-after-padding": (one((MAX64 // 4 // 2 * 2,), 24), W, "past the end of the file"),
    "sum-of-sizes-wraps": (gguf([], [tensor("a", (2**61,)), tensor("b", (2**61,), offset=2**63)],
                                ROOM),
                           "tensor 'a'", "past the end of the file"),
    "shape-larger-than-file": (one((4096, 4096)), W,
                               "f32 [4096, 4096] of 67108864 bytes ends at byte offset"),
    "data-missing": (one(data=b""), W, "past the end of the file"),
    "data-one-byte-short": (one(data=ROOM[:15]), W, "past the end"),
    "offset-misaligned": (one(offset=16), W, "offset 16 is"),
    "offset-past-end": (one(offset=4096), W, "past the end"),
    "offset-2^64": (one(offset=2**64 - 32), W, "past the end"),
    "tensors-overlap": (gguf([], [tensor("a", (16,)), tensor("b", offset=32)], ROOM), "tensor 'b'",
                        "overlaps tensor 'a'"),
    "tensors-share-data": (gguf([], [tensor("a", offset=32), tensor("b", offset=32)], ROOM),
                           "tensor 'b'", "overlaps tensor 'a'"),
    "type-negative": (one((4,), -1), W, "type -1 is unknown"),
    "type-unknown": (one((4,), 12345), W, "12345 is unknown"),
    "row-not-whole-blocks": (one((48, 2), 8), W,
                             "rows of 48 elements are not a whole number of q8_0 blocks of 32"),
}  # fmt: skip


def refusal(path: Path) -> ModelFileError:
    """The error for ``path``, after the checks every error must pass."""
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    error = caught.value
    assert error.where
    assert error.problem
    assert error.remedy
    assert str(error).startswith(f"{path}: ")
    assert str(error).isprintable(), "one line, safe to print"
    assert len(str(error)) < 500 + len(str(path))
    return error


@pytest.mark.parametrize("name", CASES)
def test_malformed(name, tmp_path):
    pieces, where, problem = CASES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.join(pieces))
    error = refusal(path)
    assert error.where.startswith(where)
    assert problem in error.problem


def test_withdrawn_tensor_type_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.join(gguf([], [tensor("w", (32,), 31)], ROOM)))
    error = refusal(path)
    assert isinstance(error, UnsupportedModel)
    assert "q4_0_4_4" in error.problem


def test_hostile_names_are_printed_safely(tmp_path):
    """A key or a name cannot write escape codes or new lines to the terminal."""
    path = tmp_path / "model.gguf"
    bad = "\x1b[2J\n" + "\u202e" * 200
    for pieces in (gguf([scalar(bad, raw.U8, 1)] * 2), gguf([], [tensor(bad[:60])] * 2, ROOM)):
        path.write_bytes(raw.join(pieces))
        assert "\\x1b[2J\\n\\u202e" in refusal(path).where


@pytest.mark.parametrize("length", range(0, 200, 7))
def test_every_truncation_is_refused(length, tmp_path):
    whole = raw.join(gguf([array("k", raw.STRING, ["a"] * 9)], [tensor("w", (8,))], bytes(32)))
    assert len(whole) > 200
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[:length])
    refusal(path)


def test_text_bound_is_for_the_whole_file(tmp_path):
    """Many strings, each small enough, may not add up to more text than one file may have."""
    half = limits.MAX_TEXT_BYTES // 2 + 1
    head = raw.join(gguf([entry("a", raw.STRING, number(raw.U64, half))], key_count=2, alignment=1))
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + half)
        file.write(raw.join(entry("b", raw.STRING, number(raw.U64, half))))
        file.truncate(len(head) + 2 * half + 100)
    assert "is longer than" in refusal(path).problem


def test_string_bound_is_for_the_whole_file(tmp_path):
    two = [array("a", raw.STRING, ["x"]), array("b", raw.STRING, [], limits.MAX_STRINGS)]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.join(gguf(two)))
    assert refusal(path).where == "key 'b'"


def test_header_bound(tmp_path):
    path = tmp_path / "model.gguf"
    count = limits.MAX_HEADER_BYTES
    path.write_bytes(raw.join(gguf([array("a", raw.U8, [], count)])))
    os.truncate(path, 2 * count)
    assert "past the largest header" in refusal(path).problem


DISGUISES = {
    "a Python pickle": pickle.dumps({"model": [1.0]}), "a zip archive": b"PK\3\4" + bytes(26),
    "a safetensors file": struct.pack("<Q", 2) + b"{}",
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a web page": b"<!DOCTYPE html><title>404</title>",
    "begins with b'GGUF'": bytes(range(100, 200)), "is empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("hint", DISGUISES)
def test_another_format_in_disguise(hint, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(DISGUISES[hint])
    assert hint in refusal(path).problem


def test_what_is_no_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for name, problem in (("", "is a directory"), *((n, "does not exist") for n in ("n", "link"))):
        assert refusal(tmp_path / name).problem == problem


def test_name_no_file_can_have(tmp_path):
    with pytest.raises(ModelFileError, match="cannot be opened"):
        open_gguf(f"{tmp_path}/a\0b")
    assert "cannot be opened" in refusal(tmp_path / ("n" * 5000)).problem


def test_fifo_does_not_block(tmp_path):
    if not hasattr(os, "mkfifo"):
        machine_lacks("FIFOs")
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe").problem == "is a pipe, socket or device"


def test_device():
    if not Path("/dev/zero").exists():
        machine_lacks("/dev/zero")
    assert refusal(Path("/dev/zero")).problem == "is a pipe, socket or device"


def _largest_sparse(path: Path) -> int:
    """Grow a file to the largest power of two its file system lets it have, 2^60 at most."""
    for exponent in range(60, 30, -1):
        try:
            os.truncate(path, 2**exponent)
        except OSError:
            continue
        return exponent
    raise AssertionError("no sparse file could be made")


@pytest.mark.parametrize("start", [b"", raw.join(gguf([array("k", raw.STRING, ["a"], 2**50)]))])
def test_huge_sparse_file_is_not_read(start, tmp_path):
    """A file of up to 2^60 bytes of nothing costs no more to refuse than a small one."""
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    _largest_sparse(path)
    error = refusal(path)
    assert any(part in error.problem for part in ("bad magic", "strings make more", "mapped"))
