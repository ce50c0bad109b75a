"""Where tokens begin in a text, in characters: by a definition that looks at the whole text."""

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.serve.completion_answers import TextOffsets, prompt_offsets

PIECES = st.sampled_from([*"aä€😀\ufffd", "\n"]).map(str.encode) | st.binary(max_size=2)


def characters(data: bytes) -> list[int]:
    """For each byte of a text the character that it is part of, and for its end how many it has."""
    found: list[int] = []
    while len(found) < len(data):
        rest = data[len(found) :]
        first = codecs.decode(rest, errors="replace")[0]
        count = len(first.encode())
        if rest[:count] != first.encode():
            with pytest.raises(UnicodeDecodeError) as wrong:
                rest.decode()
            count = wrong.value.end
        found += [1 + max(found, default=-1)] * count
    return [*found, 1 + max(found, default=-1)]


@given(st.lists(PIECES), st.lists(st.integers(0, 40)))
def test_a_token_is_where_its_first_byte_is(pieces, cuts):
    data = b"".join(pieces)
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    tokens = [data[start:end] for start, end in pairwise(places)]
    offsets = TextOffsets(7)
    told = [offsets.of(token) for token in tokens]
    requested = [7 + characters(data)[start] for start in places[:-1]]
    for token, at, want in zip(tokens, told, requested, strict=True):
        # One without a byte is at none, which may yet be within a character.
        assert at == want or not token


def test_what_is_put_before_a_prompt_is_at_its_start():
    assert prompt_offsets("the fox", [b"<s>", b" the", b" f", b"ox"]) == [0, 0, 3, 5]
    assert prompt_offsets("the fox", [b"the", b" fox"]) == [0, 3]
    assert prompt_offsets("\u20ac!", [b"\xe2", b"\x82\xac", b"!"]) == [0, 0, 1]
    # A vocabulary that writes a text in another way: never beyond it.
    assert prompt_offsets("ab", [b"ABC", b"D", b"E"]) == [0, 2, 2]


@pytest.mark.parametrize("prompt", ["hello \u00e4 and more", [104, 105, 226, 130, 172]])
def test_offsets_lead_to_the_tokens_of_an_answer(server, client, prompt):
    """With the prompt before it and without: the text at an offset goes on with the token."""
    asked = {"model": "tiny", "max_tokens": 40, "seed": 5, "extra_body": {"ignore_eos": True}}
    plain = client.completions.create(prompt=prompt, logprobs=1, **asked).choices[0]
    echoed = client.completions.create(prompt=prompt, logprobs=1, echo=True, **asked).choices[0]
    assert plain.logprobs is not None
    assert echoed.logprobs is not None
    count, before = len(plain.logprobs.text_offset or []), len(echoed.text) - len(plain.text)
    assert count == 40
    assert before > 2
    offsets = echoed.logprobs.text_offset or []
    assert offsets[-count:] == [at + before for at in plain.logprobs.text_offset or []]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for text, logprobs in ((plain.text, plain.logprobs), (echoed.text, echoed.logprobs)):
        pairs = zip(logprobs.tokens or [], logprobs.text_offset or [], strict=True)
        whole = [(token, at) for token, at in pairs if token.isascii() and token.isprintable()]
        assert len(whole) > 5
        assert all(text.startswith(token, at) for token, at in whole)


def test_offsets_of_a_stopped_answer_are_those_of_the_text_it_would_be(client):
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 24, "seed": 3, "logprobs": 1}
    whole = client.completions.create(**asked).choices[0]
    cut = client.completions.create(**asked, stop=[whole.text[3:5]]).choices[0]
    assert cut.finish_reason == "stop"
    assert whole.logprobs is not None
    assert cut.logprobs is not None
    offsets = cut.logprobs.text_offset or []
    assert offsets == (whole.logprobs.text_offset or [])[: len(offsets)]
    assert len(offsets) > 3
