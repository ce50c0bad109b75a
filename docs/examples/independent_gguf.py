"""A reader of GGUF files and of GGML's formats, from their public descriptions alone."""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
BLOCKS = {  # GGML's number of a format: name, elements and bytes of a block
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 30: ("bf16", 1, 2),
    2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34), 20: ("iq4_nl", 32, 18), 39: ("mxfp4", 32, 17),
    10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 23: ("iq4_xs", 256, 136),
}  # fmt: skip
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


@dataclass
class Matrix:
    """Rows of stored blocks, uint8[rows, row bytes]."""

    form: str
    rows: np.ndarray

    def take(self, ids):
        return Matrix(self.form, self.rows[ids])


@dataclass
class Blocks:
    """Blocks of 32: q[rows, n, 32], scales d[rows, n] and minima m[rows, n] or None."""

    q: np.ndarray
    d: np.ndarray
    m: np.ndarray | None = None


@dataclass
class Supers:
    """Blocks of 256: q[rows, n, subs, elements], integer scales and minima of the subs, d, dmin."""

    q: np.ndarray
    scales: np.ndarray
    d: np.ndarray
    minima: np.ndarray | None = None
    dmin: np.ndarray | None = None


class Gguf:
    """``metadata`` by key and ``tensors`` by name."""

    def __init__(self, path):
        self.data, self.at = Path(path).read_bytes(), 8
        assert self.data[:4] == b"GGUF"
        tensors, keys = self._scalar("Q"), self._scalar("Q")
        self.metadata = {}
        for _ in range(keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        found = {}
        for _ in range(tensors):
            name, axes = self._string(), self._scalar("I")
            shape = [self._scalar("Q") for _ in range(axes)]
            found[name] = (shape, self._scalar("I"), self._scalar("Q"))
        aligned = self.metadata.get("general.alignment", 32)
        start = -(-self.at // aligned) * aligned
        self.tensors = {name: self._matrix(start, *facts) for name, facts in found.items()}

    def floats(self, name):
        """A tensor of binary32 numbers."""
        matrix = self.tensors[name]
        assert matrix.form == "f32"
        return np.ascontiguousarray(matrix.rows).view("<f4").reshape(-1)

    def _matrix(self, start, shape, kind, offset):
        form, elements, nbytes = BLOCKS[kind]
        row, rows = shape[0] // elements * nbytes, int(np.prod(shape[1:], dtype=np.int64))
        begin = start + offset
        data = np.frombuffer(self.data[begin : begin + row * rows], np.uint8)
        return Matrix(form, data.reshape(rows, row))

    def _scalar(self, code):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def _string(self):
        size = self._scalar("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode(errors="replace")

    def _value(self, kind):
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            inner, size = self._scalar("I"), self._scalar("Q")
            return [self._value(inner) for _ in range(size)]
        return self._scalar(SCALARS[kind])


def planes(matrix):
    """The integers and scales of a matrix; of a format of floats, its values."""
    b = np.ascontiguousarray(matrix.rows)
    if matrix.form == "f32":
        return b.view("<f4")
    if matrix.form == "f16":
        return b.view("<f2").astype(np.float32)
    if matrix.form == "bf16":
        return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)
    _, elements, nbytes = next(each for each in BLOCKS.values() if each[0] == matrix.form)
    b = b.reshape(len(b), -1, nbytes)
    return _blocks(matrix.form, b) if elements == 32 else _supers(matrix.form, b)


def half(b, at):
    """The binary16 numbers at a byte of every block."""
    return np.ascontiguousarray(b[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)


def groups(b, shifts, mask):
    """Bits of bytes: first those at the first shift of all bytes, then those at the next."""
    return np.concatenate([b >> shift & mask for shift in shifts], axis=-1).astype(np.int32)


def _blocks(form, b):
    if form == "q8_0":
        return Blocks(b[..., 2:].view(np.int8).astype(np.int32), half(b, 0))
    q = groups(b[..., -16:], (0, 4), 15)
    if form == "mxfp4":
        field = np.maximum(b[..., 0], 1).astype(np.uint32) - np.uint32(1)
        return Blocks(E2M1[q], (field << 23).view(np.float32))
    if form == "iq4_nl":
        return Blocks(IQ4[q], half(b, 0))
    if form in ("q5_0", "q5_1"):
        fifth = np.unpackbits(b[..., -20:-16], axis=-1, bitorder="little").astype(np.int32)
        q = q | fifth << 4
    if form in ("q4_1", "q5_1"):
        return Blocks(q, half(b, 0), half(b, 2))
    return Blocks(q - (8 if form == "q4_0" else 16), half(b, 0))


def _supers(form, b):
    def halves(part, shifts, mask):
        """Two or more runs of bytes, each read group after group."""
        return groups(part, shifts, mask).reshape(*b.shape[:2], -1)

    def runs(at, size, run):
        return b[..., at : at + size].reshape(*b.shape[:2], -1, run)

    def subs(q, count):
        return q.reshape(*b.shape[:2], count, 256 // count)

    if form == "q2_k":
        q, s = halves(runs(16, 64, 32), (0, 2, 4, 6), 3), b[..., :16]
        low, high = (s & 15).astype(np.int32), (s >> 4).astype(np.int32)
        return Supers(subs(q, 16), low, half(b, 80), high, half(b, 82))
    if form == "q3_k":
        q = halves(runs(32, 64, 32), (0, 2, 4, 6), 3) | groups(b[..., :32], range(8), 1) << 2
        s = groups(b[..., 96:104], (0, 4), 15) | groups(b[..., 104:108], (0, 2, 4, 6), 3) << 4
        return Supers(subs(q - 4, 16), s - 32, half(b, 108))
    if form in ("q4_k", "q5_k"):
        s = b[..., 4:16].astype(np.int32)
        first, second, third = s[..., :4], s[..., 4:8], s[..., 8:]
        scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
        minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
        q = halves(runs(b.shape[-1] - 128, 128, 32), (0, 4), 15)
        if form == "q5_k":
            q = q | groups(b[..., 16:48], range(8), 1) << 4
        return Supers(subs(q, 8), scales, half(b, 0), minima, half(b, 2))
    if form == "q6_k":
        high = halves(runs(128, 64, 32), (0, 2, 4, 6), 3)
        q = halves(runs(0, 128, 64), (0, 4), 15) | high << 4
        scales = b[..., 192:208].view(np.int8).astype(np.int32)
        return Supers(subs(q - 32, 16), scales, half(b, 208))
    q = IQ4[halves(runs(8, 128, 16), (0, 4), 15)]
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).reshape(*b.shape[:2], 8)
    high = np.stack([b[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scales = low.astype(np.int32) | high.reshape(*b.shape[:2], 8).astype(np.int32) << 4
    return Supers(subs(q, 8), scales - 32, half(b, 0))
