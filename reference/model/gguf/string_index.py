"""An index of a string array by text, without a Python object for each string."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Ints
from reference.model.gguf.strings import LENGTH_BYTES, StringArray

Value = TypeVar("Value")

HEAD_BYTES = 6
"""Leading bytes of a text that choose its bucket; a shorter text counts as padded with zeros."""
HEAD = np.dtype("<u8")
BUCKET_BITS = 14
"""An index has 2^14 buckets."""
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: the upper bits of a product with it depend on all bits of the factor
(Fibonacci hashing, Knuth, The Art of Computer Programming 3, 6.4)."""


class StringIndex(Generic[Value]):
    """A map from the non-empty strings of an array to ``value(index of the string)``.

    The constructor sorts string indices into buckets by the strings' first bytes. The strings of a
    bucket become keys of a dictionary when ``get`` first needs that bucket; a prompt needs few. Of
    equal strings the last one counts, or the first if ``first``. ``among`` int[n], ascending string
    indices, restricts the map to those strings. Safe to share between threads."""

    def __init__(
        self,
        strings: StringArray,
        value: Callable[[int], Value],
        among: Ints | None = None,
        *,
        first: bool = False,
    ) -> None:
        lengths = strings.lengths
        indices = np.arange(len(strings)) if among is None else among
        indices = indices[lengths[indices] > 0]
        buckets = _buckets(strings, indices)
        self._strings = strings
        self._value = value
        self._indices = indices[np.argsort(buckets, kind="stable")].astype(np.int32)
        counts = np.bincount(buckets, minlength=1 << BUCKET_BITS)
        self._ends = np.cumsum(counts, dtype=np.int32)
        self._first = first
        strings.forget_pages()
        self._filled = bytearray(1 << BUCKET_BITS)
        self._values: dict[bytes, Value] = {}

    def get(self, text: bytes, /) -> Value | None:
        """The value for ``text``, None when the array has no such string."""
        value = self._values.get(text)
        if value is None:
            bucket = _bucket(text)
            if not self._filled[bucket]:
                self._fill(bucket)
                return self._values.get(text)
        return value

    def _fill(self, bucket: int) -> None:
        """Add the strings of ``bucket`` to the dictionary. Two threads that do it at once add the
        same."""
        start = self._ends[bucket - 1] if bucket else 0
        indices = self._indices[start : self._ends[bucket]].tolist()
        if self._first:
            indices.reverse()
        self._values.update((self._strings[index], self._value(index)) for index in indices)
        self._filled[bucket] = 1


def _bucket(text: bytes) -> int:
    """The bucket of ``text``: the upper bits of its first bytes times GOLDEN."""
    head = int.from_bytes(text[:HEAD_BYTES], "little")
    return (head * GOLDEN & 0xFFFF_FFFF_FFFF_FFFF) >> (64 - BUCKET_BITS)


def _buckets(strings: StringArray, indices: NDArray[np.signedinteger]) -> NDArray[np.uint16]:
    """The ``_bucket`` of each string with an index in ``indices``."""
    octets, starts = strings.octets, strings.offsets[indices] + LENGTH_BYTES
    if len(starts) and starts.max() + HEAD.itemsize > len(octets):
        octets = np.concatenate((octets, np.zeros(HEAD.itemsize, np.uint8)))
    words = np.ndarray((max(0, len(octets) - HEAD.itemsize + 1),), HEAD, octets, strides=(1,))
    used = np.minimum(strings.lengths[indices], HEAD_BYTES).astype(np.uint64) * np.uint64(8)
    heads = words[starts] & ((np.uint64(1) << used) - np.uint64(1))
    buckets: NDArray[np.uint64] = heads * np.uint64(GOLDEN) >> np.uint64(64 - BUCKET_BITS)
    return buckets.astype(np.uint16)
