"""``zinc-rt tokenize``: the tokens of a text, from which the text can be made again."""

import io
import json
from contextlib import closing

from reference.model.open import open_model

TEXT = "two words é <|im_end|>"


def test_tokens_are_the_models(zinc, tiny_model, tmp_path, monkeypatch):
    """From a text, a file and standard input; a control token only with --special."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    with closing(open_model(tiny_model)) as model:
        for words in (("--prompt", TEXT), (file,), ("-",), ("-p", TEXT, "--special")):
            result = zinc("tokenize", *words, "--model", tiny_model, "--json")
            said = json.loads(result.out)
            ids = [one["id"] for one in said["tokens"]]
            assert ids == model.tokenizer.encode(TEXT, parse_special="--special" in words)
            assert said["count"] == len(ids)
            pieces = [one["piece"] for one in said["tokens"]]
            assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces) == (
                TEXT.encode()
            )
            shown = zinc("tokenize", "-p", TEXT, *words[2:], "--model", tiny_model).out.splitlines()
            assert [int(line.split()[0]) for line in shown] == [*ids, len(ids)]


def test_no_text_and_no_tokens(zinc, tiny_model):
    assert zinc("tokenize", "-p", "", "--model", tiny_model).out == "0 tokens\n"
    missing = zinc("tokenize", "hello there", "--model", tiny_model)
    assert (missing.code, "give a text with --prompt" in missing.err) == (2, True)
    assert "FILE" in zinc("tokenize").err or "--prompt" in zinc("tokenize").err
