"""Lines made of templates are those that are encoded as a whole."""

import json

from hypothesis import given
from hypothesis import strategies as st

from harness.serve.data_lines import LineTemplates, data_line, encode
from tests.serve.streams import data_of, lines_of
from tests.serve.test_sent_at_once import step_when_all_wait


@given(st.lists(st.tuples(st.booleans(), st.text())))
def test_a_line_is_what_it_is_without_a_template(said):
    templates = LineTemplates()
    for kind, text in said:

        def make(text: str, kind: bool = kind) -> object:
            return {"kind": kind, "a": [{"text": text}], "more": None}

        assert templates.line(kind, make, text) == data_line(encode(make(text)))


def test_all_chunks_of_an_answer_say_whose_they_are(http, server, monkeypatch):
    """Of several choices; the first alone names the seed, so that any stream can be replayed."""
    step_when_all_wait(server, monkeypatch)
    for path, asked in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        body = {**asked, "stream": True, "n": 2, "max_tokens": 12, "ignore_eos": True, "seed": 5}
        for more in ({}, {"stream_options": {"include_usage": True}}):
            first, *rest = data_of(lines_of(http.post(path, {**body, **more}).body))
            extra = first.pop("x_zinc")
            assert extra.keys() == {"seed", "tenant", "tier", "sampling_defaults"}
            assert type(extra["seed"]) is int
            if more:
                last = rest.pop()
                assert last["x_zinc"].items() >= extra.items()
            assert len(rest) > 8
            heads = {json.dumps({**chunk, "choices": None}) for chunk in (first, *rest)}
            assert len(heads) == 1
            shapes = {tuple(chunk["choices"][0]) for chunk in (first, *rest)}
            assert len(shapes) == 1
            assert {one["choices"][0]["index"] for one in rest} == {0, 1}
