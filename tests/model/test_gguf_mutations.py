"""Thousands of damaged files: each opens or is refused, and none costs more memory than it is."""

import random
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from contract.errors import ModelFileError
from reference.model.gguf.file import GgufFile, open_gguf
from reference.model.gguf.strings import StringArray
from tests.model import gguf_bytes as raw

BATCHES = 12
FILES_PER_BATCH = 250
PEAK_BYTES_LIMIT = 1 << 20
"""Of Python and numpy allocations above what was there before; the files have about 2 KB."""

NASTY = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 32, 33, 39, 255, 256, 4096, 65535, 65536, 65537),
    *(2**bits + step for bits in (20, 22, 31, 32, 40, 61, 62, 63) for step in (-1, 0, 1)),
    *(2**64 - step for step in (1, 2, 8, 31, 32, 33)),
)


def build() -> raw.Pieces:
    """A file with a value of every type and tensors of several."""
    kinds = (*(kind for kind in raw.CODES if kind != raw.BOOL), raw.BOOL)
    entries = [
        raw.string("general.architecture", "llama"),
        raw.scalar("general.alignment", raw.U32, 64),
        raw.scalar("split.count", raw.U16, 1),
        *(raw.scalar(f"scalar.{kind}", kind, 1) for kind in kinds),
        *(raw.array(f"array.{kind}", kind, [1, 0, 1, 1]) for kind in kinds),
        raw.array("strings", raw.STRING, [b"", b"a", b"\xff\x00", b"hello"] * 5),
        raw.array("more.strings", raw.STRING, ["x y"] * 7),
        raw.string("text", "é" * 40),
    ]
    tensors = [
        raw.tensor("vector", (16,), 0, 0),
        raw.tensor("matrix", (32, 3), 8, 64),
        raw.tensor("experts", (64, 2, 2), 2, 192),
        raw.tensor("super", (256, 1), 14, 384),
        raw.tensor("unsupported", (256, 2), 10, 640),
    ]
    return raw.gguf(entries, tensors, bytes(range(256)) * 4, alignment=64)


PIECES = build()
WHOLE = raw.join(PIECES)
ENDS = list(accumulate(len(piece.data) for piece in PIECES))
FIELDS = [
    (end - len(piece.data), len(piece.data))
    for piece, end in zip(PIECES, ENDS, strict=True)
    if piece.role
]


def flip_bits(data: bytearray, rng: random.Random) -> None:
    """Flip bits, nearly always in the header, where they mean something."""
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data) - 900 * (rng.random() < 0.9))] ^= 1 << rng.randrange(8)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def set_fields(data: bytearray, rng: random.Random) -> None:
    """Give counts, lengths, types, dimensions and offsets values that hurt."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        start, width = rng.choice(FIELDS)
        value = rng.choice((*NASTY, len(data) - start, len(data) - start - width))
        data[start : start + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")


def nudge_fields(data: bytearray, rng: random.Random) -> None:
    start, width = rng.choice(FIELDS)
    value = int.from_bytes(data[start : start + width], "little") + rng.choice((-8, -1, 1, 8, 32))
    data[start : start + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")


def move_bytes(data: bytearray, rng: random.Random) -> None:
    """Delete, repeat or insert a run of bytes, so that all that follows is out of step."""
    start = rng.randrange(4, len(data))
    end = min(len(data), start + rng.choice((1, 4, 8, 12, 60)))
    data[start:end] = rng.choice((b"", bytes(data[start:end]) * 2, rng.randbytes(8)))


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(flip_bits, truncate, set_fields, set_fields, nudge_fields, move_bytes),
)


def read_everything(file: GgufFile) -> int:
    """Touch every byte the file hands out; returns how many values and tensors there were."""
    seen = 0
    for value in file.metadata.values():
        if isinstance(value, StringArray):
            assert value.to_list() == [value[i] for i in range(len(value))]
        elif isinstance(value, np.ndarray):
            value.tobytes()
        seen += 1
    for name, info in file.tensors.items():
        if info.dtype is not None:
            assert len(file.tensor_bytes(name).tobytes()) == info.nbytes
        seen += 1
    return seen


def read_or_refuse(path: Path) -> str:
    """The message of the typed error, empty when there is none."""
    try:
        with open_gguf(path) as file:
            read_everything(file)
    except ModelFileError as error:
        return str(error)
    return ""


def mutants(batch: int) -> Iterator[tuple[int, bytes]]:
    for seed in range(batch * FILES_PER_BATCH, (batch + 1) * FILES_PER_BATCH):
        rng = random.Random(seed)
        data = bytearray(WHOLE)
        rng.choice(MUTATIONS)(data, rng)
        yield seed, bytes(data)


def test_the_whole_file_is_good(tmp_path):
    """The control: without a mutation everything can be read."""
    path = tmp_path / "model.gguf"
    path.write_bytes(WHOLE)
    with open_gguf(path) as file:
        assert read_everything(file) == len(file.metadata) + len(file.tensors) == 33


@pytest.mark.parametrize("batch", range(BATCHES))
def test_damaged_files(batch, tmp_path):
    """Only a typed error or success, within a bound of memory; both must really happen."""
    outcomes = {"read": 0, "refused": 0}
    path = tmp_path / "model.gguf"
    tracemalloc.start()
    try:
        for seed, data in mutants(batch):
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                refusal = read_or_refuse(path)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
            assert refusal.isprintable(), f"seed {seed}: {refusal!r}"
            outcomes["refused" if refusal else "read"] += 1
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < PEAK_BYTES_LIMIT, f"seed {seed}: {peak} bytes for a file of {len(data)}"
    finally:
        tracemalloc.stop()
    assert min(outcomes.values()) > FILES_PER_BATCH // 20, outcomes
