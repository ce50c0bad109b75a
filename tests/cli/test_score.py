"""``zinc-rt score``: how likely the tokens of a text are."""

import io
import json
import math
import struct
from typing import Any

import numpy as np

from reference.ops.log_probabilities import log_probabilities
from tests.cli.conftest import Zinc
from tests.families_table import FAMILIES

TEXT = "the quick brown fox"


def scored(zinc: Zinc, *words: object) -> Any:
    result = zinc("score", *words, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_scores_are_those_of_the_definition(zinc, tiny_model, tmp_path, monkeypatch):
    """The same from a text, a file, standard input and token ids, in any chunk."""
    said = scored(zinc, "--prompt", TEXT, "--model", tiny_model, "--top", 3)
    out = tmp_path / "logits.npy"
    zinc("logits", "--prompt", TEXT, "--model", tiny_model, "--out", out)
    tokens = np.array(said["tokens"], np.int32)
    chosen, ids, _ = log_probabilities(logits=np.load(out)[:-1], token=tokens[1:], top=3)
    assert [one["log_probability"] for one in said["scored"]] == chosen.tolist()
    for one, value, likeliest in zip(said["scored"], chosen, ids.tolist(), strict=True):
        assert struct.pack(">f", value).hex() == one["bits"]
        assert [top["token"] for top in one["top"]] == likeliest
        place = likeliest.index(one["token"]) + 1 if one["token"] in likeliest else None
        assert one["rank"] == place
    assert said["sum"] == math.fsum(chosen.tolist())
    assert said["perplexity"] == math.exp(-said["sum"] / len(chosen))
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    listed = ",".join(map(str, said["tokens"]))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    for words in (
        (file,),
        ("-",),
        ("--tokens", listed, "--chunk", 1),
        ("--prompt", TEXT, "--tier", "native"),
    ):
        again = scored(zinc, *words, "--model", tiny_model, "--top", 3)
        assert (again["scored"], again["sum"]) == (said["scored"], said["sum"])


def test_a_part_of_a_text(zinc, tiny_model):
    whole = scored(zinc, "--prompt", TEXT, "--model", tiny_model)["scored"]
    part = scored(zinc, "--prompt", TEXT, "--from", 5, "--model", tiny_model)["scored"]
    assert part == whole[4:]


def test_an_answer_of_given_tokens(zinc, tiny_model):
    """The scores of its tokens alone, which are those of the whole text's."""
    whole = scored(zinc, "--prompt", TEXT, "--model", tiny_model)
    ids = whole["tokens"]
    for given in (("--tokens", ",".join(map(str, ids[:6]))), ("--prompt", TEXT[:7])):
        said = ",".join(map(str, ids[6:]))
        found = scored(zinc, *given, "--force-tokens", said, "--model", tiny_model)
        assert found["tokens"] == ids
        assert found["scored"] == whole["scored"][5:]


def test_experts_of_a_mixture(zinc, synthetic_model):
    path = synthetic_model(**FAMILIES["qwen3moe"], quant="q4_k_m")
    words = ("--tokens", "1,2,3,4,5,6", "--experts", "--model", path)
    found = scored(zinc, *words, "--tier", "cpu")
    assert np.array(found["experts"]).shape == (5, 2, 3)
    assert scored(zinc, *words, "--tier", "native")["experts"] == found["experts"]


def test_scores_for_people(zinc, tiny_model):
    result = zinc("score", "--prompt", TEXT, "--model", tiny_model)
    lines = result.out.splitlines()
    said = scored(zinc, "--prompt", TEXT, "--model", tiny_model)
    assert len(lines) == len(said["scored"]) + 1
    assert f"sum {said['sum']:.4f}, perplexity {said['perplexity']:.3f}" in lines[-1]
    assert "likeliest: " in lines[0]
