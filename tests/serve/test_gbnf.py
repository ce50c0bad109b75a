"""Grammars of llama.cpp: which texts they let pass, which are refused and where, and answers."""

import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.host.structured.gbnf import (
    CharacterClass,
    GbnfNode,
    InOrder,
    OneOf,
    Repeated,
    RuleName,
    Text,
    _GbnfReader,
    gbnf_rules,
)
from harness.host.structured.grammars import GrammarRefused, Grammars
from reference.model.open import Model
from tests.serve.http import Http
from tests.tables import table

TABLES = table(__file__, "gbnf")

JSON = Path(__file__).with_name("json.gbnf").read_text()
"""llama.cpp's ``json.gbnf``."""


def accepts(model: Model, grammars: Grammars, grammar: str, text: str) -> bool:
    """Whether a model held to a grammar can write a text and then end."""
    (masks,) = grammars.masks("start: body\n" + gbnf_rules(grammar), 1)
    ids = model.tokenizer.encode(text, add_bos=False)
    end = min(model.tokenizer.eog_ids)
    return all(
        masks(ids[:at])[token // 32] >> (token % 32) & 1 for at, token in enumerate([*ids, end])
    )


CASES: list[tuple[str, list[str], list[str]]] = TABLES["cases"]


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_what_passes(model, grammars, grammar, good, bad):
    for text in good:
        assert accepts(model, grammars, grammar, text), text
    for text in bad:
        assert not accepts(model, grammars, grammar, text), text


REFUSED: list[tuple[str, int, int, str]] = TABLES["refused"]


@pytest.mark.parametrize(("grammar", "line", "column", "says"), REFUSED)
def test_what_is_refused_and_where(grammar, line, column, says):
    with pytest.raises(GrammarRefused) as refused:
        gbnf_rules(grammar)
    assert str(refused.value).startswith(f"line {line}, column {column}: ")
    assert says in str(refused.value)


def test_the_deepest_grammar_is_read():
    """The recursion that reads it is within Python's limit, from within a server's stack too."""
    inner = '"x"'
    for _ in range(99):
        inner = f'("y" {inner} | "z")*+'
    assert len(gbnf_rules(f"root ::= {inner}")) > 99
    assert len(gbnf_rules(f'root ::= {inner} | "(" root ")"')) > 99


def test_a_short_grammar_does_not_become_a_long_expression():
    """A rule of thousands of characters that is named a thousand times stays one rule."""
    rules = 'a ::= "' + "a" * 10_000 + '"\nroot ::= ' + "a " * 1000
    tracemalloc.start()
    try:
        written = gbnf_rules(rules)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert written.startswith("body: rule1\n")
    assert peak < 10 << 20


def ends(rules: dict[str, GbnfNode], node: GbnfNode, text: str, at: int, deep: int) -> set[int]:
    """Where a text that begins at ``at`` may end by the definition of GBNF, a part at a time."""
    if deep > 40:
        return set()
    match node:
        case Text(said):
            return {at + len(said)} if text.startswith(said, at) else set()
        case CharacterClass(regex):
            plain = re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", regex)
            return {at + 1} if re.compile(plain, re.S).match(text, at) else set()
        case RuleName(name):
            return ends(rules, rules[name], text, at, deep + 1)
        case InOrder(parts):
            found = {at}
            for part in parts:
                found = {e for a in found for e in ends(rules, part, text, a, deep + 1)}
            return found
        case OneOf(parts):
            return {e for part in parts for e in ends(rules, part, text, at, deep + 1)}
        case Repeated(part, least, most):
            found, all_ends, count = {at}, {at} if not least else set(), 0
            while found and count < (len(text) + 1 + least if most is None else most):
                found = {e for a in found for e in ends(rules, part, text, a, deep + 1)}
                count += 1
                all_ends |= found if count >= least else set()
            return all_ends


def random_grammar(draw: random.Random) -> str:
    """Three rules over the letters a, b and c; each leads to later ones, some to itself."""

    def part(depth: int, rule: int) -> str:
        kind = draw.randrange(7 if depth < 3 else 3)
        if kind == 0:
            return '"' + "".join(draw.choices("abc", k=draw.randrange(1, 4))) + '"'
        if kind == 1:
            return draw.choice(["[ab]", "[^a]", "[b-c]"])
        if kind == 2 and rule < 2:
            return f"r{rule + 1}"
        if kind == 3 and draw.random() < 0.3:
            return f'"a" r{rule} "c"'
        inner = " ".join(part(depth + 1, rule) for _ in range(draw.randrange(1, 3)))
        if kind == 4:
            return f"({inner} | {part(depth + 1, rule)})"
        return f"({inner})" + draw.choice(["?", "*", "+", "{1,2}", ""])

    lines = [f"r{n} ::= {part(0, n)} {part(0, n)} | {part(0, n)}" for n in range(3)]
    return "\n".join(["root ::= r0", *lines])


def texts() -> Iterator[str]:
    yield ""
    for length in (1, 2, 3):
        for number in range(3**length):
            yield "".join("abc"[number // 3**place % 3] for place in range(length))


@pytest.mark.parametrize("seed", range(4, 12))
def test_random_grammars_mean_what_their_definition_says(model, grammars, seed):
    """Every text of up to three letters passes exactly where the definition lets it."""
    grammar = random_grammar(random.Random(seed))
    rules = _GbnfReader(grammar).rules()
    for text in texts():
        expected = len(text) in ends(rules, rules["root"], text, 0, 0)
        assert accepts(model, grammars, grammar, text) == expected, (grammar, text)


def test_answers_obey(hermes):
    """Of chat completions, with thoughts before them or not, and of completions."""
    http = Http(hermes.url)
    grammar = 'root ::= "{" pair ("," pair)? "}"\npair ::= "\\"" [a-c]{2} "\\":" ("1" | "2")'
    for fields in ({"enable_thinking": False}, {"temperature": 1.5}):
        body = {
            "messages": [{"role": "user", "content": "a"}], "grammar": grammar, "max_tokens": 400,
            "seed": 8, **fields,
        }  # fmt: skip
        choice = http.post("/v1/chat/completions", body).json["choices"][0]
        if choice["finish_reason"] == "stop":
            assert all(len(key) == 2 for key in json.loads(choice["message"]["content"]))
    text = {"prompt": "a", "grammar": grammar, "max_tokens": 40, "n": 3, "seed": 1}
    choices = http.post("/v1/completions", text).json["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert all(json.loads(choice["text"]) for choice in choices)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"{100000} "b"{100000}',
        "root ::= " + " ".join(["[a-z]{0,1000}"] * 400),
        "\n".join([f'r{n} ::= r{n + 1} r{n + 1} | "{n}"' for n in range(60)])
        + '\nr60 ::= "x"\nroot ::= r0',
    ],
)
def test_a_grammar_that_explodes_is_refused_or_works(hermes, grammar):
    """Within its limits, and nobody else's request fails."""
    http = Http(hermes.url)
    body = {"prompt": "a", "grammar": grammar, "max_tokens": 2}
    assert http.post("/v1/completions", body).status in (200, 400)
    assert http.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
