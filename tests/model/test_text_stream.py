"""The stream shows exactly the decoded text up to the earliest stop string."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import RequestError
from reference.model.text_stream import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, TextStream

SAMPLES = ["a", "b", "é", "ß", "漢", "🦙", "�", "\u0301", "\n"]
texts = st.lists(st.sampled_from(SAMPLES), max_size=12).map("".join)
stop_lists = st.lists(texts.filter(bool), max_size=4)


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def _cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    for start in range(len(text)):
        here = [stop for stop in stops if text.startswith(stop, start)]
        if here:
            return text[:start], min(here, key=len)
    return text, None


def _run(stream: TextStream, pieces: list[bytes]) -> str:
    shown = [stream.feed(piece) for piece in pieces]
    return "".join(shown) + stream.finish()


@settings(deadline=None)
@given(
    st.one_of(texts.map(str.encode), st.binary(max_size=24), st.text(max_size=12).map(str.encode)),
    st.lists(st.integers(0, 100), max_size=12),
    stop_lists,
)
def test_output_is_the_decoded_total_cut_at_the_first_stop(data, cuts, stops):
    """For any bytes, any split into tokens and any stop strings."""
    stream = TextStream(stops)
    shown = _run(stream, _pieces(data, cuts))
    expected, stop = _cut_at_first_stop(data.decode("utf-8", "replace"), stops)
    assert (shown, stream.stop_string) == (expected, stop)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0x41, 0x80, 0x90, 0xBF, 0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0xFF])),
    st.lists(st.integers(0, 100), max_size=12),
)
def test_broken_utf8_is_replaced_as_python_replaces_it(octets, cuts):
    data = bytes(octets)
    assert _run(TextStream(), _pieces(data, cuts)) == data.decode("utf-8", "replace")


@settings(deadline=None)
@given(texts, stop_lists)
def test_text_is_shown_as_soon_as_no_stop_string_can_include_it(text, stops):
    """What is held back after every character begins some stop string."""
    stream = TextStream(stops)
    shown = ""
    for end, letter in enumerate(text, start=1):
        shown += stream.feed(letter.encode())
        if stream.stopped:
            break
        held = text[len(shown) : end]
        assert not held or any(stop != held and stop.startswith(held) for stop in stops)


def test_an_incomplete_character_is_held_and_then_shown():
    stream = TextStream()
    llama = "🦙".encode()
    assert [stream.feed(llama[i : i + 1]) for i in range(4)] == ["", "", "", "🦙"]


def test_an_incomplete_character_at_the_end_is_one_replacement():
    stream = TextStream()
    assert stream.feed("🦙".encode()[:3]) == ""
    assert stream.finish() == "\ufffd"


def test_nothing_follows_a_stop_string():
    stream = TextStream(["<end>"])
    assert stream.feed(b"hello <en") == "hello "
    assert stream.feed(b"d> more") == ""
    assert stream.stopped
    assert stream.stop_string == "<end>"
    assert stream.feed(b"more") == ""
    assert stream.finish() == ""


def test_a_complete_stop_waits_for_one_that_started_earlier():
    """After "abc", "bc" is complete, but "abcd" would start before it."""
    stream = TextStream(["bc", "abcd"])
    assert stream.feed(b"xabc") == "x"
    assert not stream.stopped
    assert stream.feed(b"d") == ""
    assert stream.stop_string == "abcd"
    other = TextStream(["bc", "abcd"])
    assert other.feed(b"xabc") + other.feed(b"e") == "xa"
    assert other.stop_string == "bc"


def test_of_stops_starting_together_the_shortest_counts():
    stream = TextStream(["abc", "ab"])
    assert stream.feed(b"xabc") == "x"
    assert stream.stop_string == "ab"


@pytest.mark.parametrize(
    "stops", [[""], ["x" * (MAX_STOP_CHARACTERS + 1)], ["x"] * (MAX_STOP_STRINGS + 1)]
)
def test_unusable_stop_strings_are_refused(stops):
    with pytest.raises(RequestError, match=r"^stop: "):
        TextStream(stops)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.text("ab<", max_size=3), st.booleans()), max_size=8),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
)
def test_hidden_texts_stop_a_text_and_are_never_shown(parts, stops):
    """The definition: the text with the hidden ones, cut at the first stop that it or the shown
    text has, without them."""
    stream = TextStream(stops)
    streamed = "".join(
        stream.feed(b"", hidden=text) if hidden else stream.feed(text.encode())
        for text, hidden in parts
    )
    streamed += stream.finish()
    whole = "".join(text for text, _ in parts)
    hidden = [hide for text, hide in parts for _ in text]
    shown = [at for at, hide in enumerate(hidden) if not hide]
    letters = "".join(whole[at] for at in shown)
    found = [(at, len(stop)) for stop in stops if (at := whole.find(stop)) >= 0]
    found += [(shown[at], len(stop)) for stop in stops if (at := letters.find(stop)) >= 0]
    end = min(found)[0] if found else len(whole)
    expected = "".join(c for c, hide in zip(whole[:end], hidden, strict=False) if not hide)
    assert streamed == expected
    assert stream.stopped == bool(found)


@pytest.mark.parametrize(
    ("stop", "shown"),
    [("ab", "x"), (">", "xa"), ("<y>", "xa"), ("a<y>b", "x"), ("y>b", "xa"), ("b<y", "xab")],
)
def test_a_stop_string_around_a_control_token(stop, shown):
    """What is shown never contains a stop string."""
    stream = TextStream([stop])
    parts = [stream.feed(b"xa"), stream.feed(b"", "<y>"), stream.feed(b"b"), stream.finish()]
    assert "".join(parts) == shown


def test_bytes_of_a_character_around_a_control_token_are_one_character():
    stream = TextStream(["<x>"])
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert stream.feed(first) + stream.feed(b"", "<y>") + stream.feed(second) == "é"
