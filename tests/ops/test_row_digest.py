"""ROW_DIGEST against the published BLAKE3, and what may not change it."""

import blake3
import numpy as np
import pytest
from numpy.typing import NDArray

from reference.exact.blake3 import digests
from reference.ops.row_digest import row_digest

Float32 = NDArray[np.float32]


def by_the_rule(row: Float32) -> bytes:
    """Rule R12, word by word, with the package of BLAKE3's authors."""
    words = [int(word) for word in row.view(np.uint32)]
    words = [0 if word & 0x7FFFFFFF < 0x00800000 else word for word in words]
    words = [0x7FC00000 if word & 0x7FFFFFFF > 0x7F800000 else word for word in words]
    words += [0] * (-len(words) % 1024)
    found = b""
    for start in range(0, len(words), 1024):
        span = words[start : start + 1024]
        texts = [b"".join(w.to_bytes(4, "little") for w in span[i::16]) for i in range(16)]
        leaves = [blake3.blake3(text).digest() for text in texts]
        nodes = [blake3.blake3(b"".join(leaves[i::4])).digest() for i in range(4)]
        found += blake3.blake3(b"".join(nodes)).digest()
    return found


def of_row(row: Float32) -> bytes:
    return row_digest(logits=row[None], digested=np.ones(1, np.int32))[0].tobytes()


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1023, 1024, 1025, 5000])
def test_the_rule_with_the_published_package(vocab):
    row = np.random.default_rng(vocab).standard_normal(vocab, dtype=np.float32)
    assert of_row(row) == by_the_rule(row)


@pytest.mark.parametrize("words", [16, 32, 48, 256])
def test_the_primitive_is_blake3(words):
    messages = np.random.default_rng(words).integers(0, 2**32, (words, 5), dtype=np.uint32)
    texts = [np.ascontiguousarray(column).tobytes() for column in messages.T]
    found = np.ascontiguousarray(digests(messages).T)
    assert [row.tobytes() for row in found] == [blake3.blake3(text).digest() for text in texts]


@pytest.mark.parametrize("words", [0, 8, 17, 272])
def test_other_lengths_are_refused(words):
    with pytest.raises(ValueError, match="blocks of 16 words"):
        digests(np.zeros((words, 1), np.uint32))


def test_every_bit_of_every_logit_counts():
    """A flipped bit changes the digest of its span, whose bits are half others, and no other."""
    row = np.random.default_rng(1).standard_normal(1500, dtype=np.float32)
    before = np.frombuffer(of_row(row), np.uint8).reshape(2, 32)
    for token in (0, 7, 1023, 1024, 1499):
        for bit in (0, 13, 31):
            changed = row.copy()
            changed.view(np.uint32)[token] ^= 1 << bit
            after = np.frombuffer(of_row(changed), np.uint8).reshape(2, 32)
            span = token // 1024
            assert (after[1 - span] == before[1 - span]).all()
            flipped = np.unpackbits(after[span] ^ before[span]).sum()
            assert 64 < flipped < 192


def test_two_logits_that_change_places_change_it():
    row = np.random.default_rng(2).standard_normal(1024, dtype=np.float32)
    for other in (1, 16, 64, 1023):
        changed = row.copy()
        changed[[0, other]] = row[[other, 0]]
        assert of_row(changed) != of_row(row)


def test_what_no_rule_of_arithmetic_tells_apart_is_one_digest():
    """The sign of zero is free, subnormals may be flushed, and a NaN is a NaN."""
    rows = np.zeros((2, 40), np.float32)
    rows.view(np.uint32)[1, :4] = 0x80000000, 0x00000001, 0x807FFFFF, 0x00400000
    rows.view(np.uint32)[:, 4] = 0x7FC00000, 0xFFC12345
    assert of_row(rows[0]) == of_row(rows[1])
    smallest = rows.copy()
    smallest.view(np.uint32)[1, 0] = 0x00800000
    assert of_row(smallest[0]) != of_row(smallest[1])


def test_only_flagged_rows_are_digested():
    logits = np.random.default_rng(3).standard_normal((4, 1100), dtype=np.float32)
    found = row_digest(logits=logits, digested=np.array([1, 0, -5, 0], np.int32))
    assert (found.shape, found.dtype) == ((4, 16), np.int32)
    assert not found[[1, 3]].any()
    assert found[0].tobytes() == of_row(logits[0])
    assert found[2].tobytes() == of_row(logits[2])


def test_no_rows():
    found = row_digest(logits=np.empty((0, 1100), np.float32), digested=np.empty(0, np.int32))
    assert found.shape == (0, 16)
