"""Strings of an array found by their text, as a dictionary of all of them would."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.model.gguf.string_index import StringIndex
from reference.model.gguf.strings import StringArray

TEXTS = st.lists(st.binary(max_size=7) | st.text("ab<", max_size=5).map(str.encode), max_size=60)


@given(TEXTS, st.booleans(), st.data())
def test_an_index_is_a_dictionary(texts, first, data):
    """Of equal texts the last one counts, or the first; of all strings or of some."""
    some = data.draw(st.none() | st.sets(st.integers(0, max(0, len(texts) - 1))))
    indices = [n for n in range(len(texts)) if some is None or n in some]
    expected: dict[bytes, int] = {}
    for n in reversed(indices) if first else indices:
        if texts[n]:
            expected[texts[n]] = n
    among = None if some is None else np.array(indices, np.intp)
    read: list[int] = []

    def value(n: int) -> int:
        read.append(n)
        return n

    index = StringIndex(StringArray.of(texts), value, among, first=first)
    requested = [*texts, b"", b"a", b"ab", b"zzzzzzzz", *(text + b"x" for text in texts)]
    for _ in range(2):
        assert [index.get(text) for text in requested] == [expected.get(t) for t in requested]
    assert sorted(read) == [n for n in indices if texts[n]]


def test_only_what_begins_alike_becomes_objects():
    """Of 10,000 strings a few do; one requested from the same bucket makes none."""
    texts = [b"%06d%d" % (number // 10, number % 10) for number in range(10_000)]
    read: set[int] = set()
    index = StringIndex(StringArray.of(texts), lambda n: read.add(n) or n)
    assert (index.get(b"0001234"), index.get(b"000123"), index.get(b"")) == (1234, None, None)
    before = len(read)
    assert 10 <= before < 100
    assert index.get(b"0001239") == 1239
    assert len(read) == before


@pytest.mark.parametrize("requested", [[b"ab"], [b"ab", b"b", b"\xff"], [b"nowhere"]])
def test_occurrences(requested):
    """Every index of each text, in order."""
    texts = [b"ab", b"", b"b", b"ac", b"aab", b"ab", b"\xff", b"a", b""]
    found = list(StringArray.of(texts).occurrences(requested))
    assert found == [(index, text) for index, text in enumerate(texts) if text in requested]


def test_an_array_of_strings_is_as_a_file_holds_it():
    """Lengths and contents, of none too."""
    for texts in ([], [b""], [b"a", b"", b"\0" * 300]):
        strings = StringArray.of(texts)
        assert strings.to_list() == list(strings) == texts
        assert strings.lengths.tolist() == [len(text) for text in texts]
        assert list(strings.occurrences([b"x"])) == []


@pytest.mark.parametrize("size", [1 << 31, (1 << 31) + 1, 5 << 30])
def test_a_file_may_be_longer_than_offsets_count(size, tmp_path):
    """Strings stand in the header; what follows them is as long as weights are."""
    texts = [b"ab", b"", b"b"] * 700
    path = tmp_path / "sparse"
    path.write_bytes(StringArray.of(texts).octets.tobytes())
    os.truncate(path, size)
    strings = StringArray(np.memmap(path, np.uint8, "r"), StringArray.of(texts).offsets)
    expected = [(index, text) for index, text in enumerate(texts) if text == b"b"]
    assert list(strings.occurrences([b"b"])) == expected
    assert StringIndex(strings, int).get(b"b") == len(texts) - 1
