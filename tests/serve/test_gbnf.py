"""Grammars of llama.cpp: which texts they let pass, which are refused and where, and answers."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

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
from harness.serve.run import Running
from reference.model.open import Model
from tests.serve.http import Http

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
"""llama.cpp's ``json.gbnf``."""
ARITHMETIC = r"""
root ::= (expr "=" term "\n")+
expr ::= term ([-+*/] term)*
term ::= num | "(" expr ")"
num  ::= [0-9]+
"""


def accepts(model: Model, grammars: Grammars, grammar: str, text: str) -> bool:
    """Whether a model held to a grammar can write a text and then end."""
    (masks,) = grammars.masks("start: body\n" + gbnf_rules(grammar), 1)
    ids = model.tokenizer.encode(text, add_bos=False)
    end = min(model.tokenizer.eog_ids)
    return all(
        masks(ids[:at])[token // 32] >> (token % 32) & 1 for at, token in enumerate([*ids, end])
    )


CASES: list[tuple[str, list[str], list[str]]] = [
    (JSON, ['{"a": [1, 2.5e3, "x\\n"], "b": {"c": null}}', "{}", '{"é": 1}'],
     ["[1]", '{"a": nul}', '{"a" 1}', '{"a": 1,}']),
    (ARITHMETIC, ["1+2=3\n", "(1*20)/3=4\n5=5\n"], ["1+2", "=3\n", "(1=1\n"]),
    # The longest word is not the right one.
    ('root ::= [a-z]* "b" ("ab" | "a" "c")', ["bac", "xxbbac", "bab"], ["ac", "ba", "xa"]),
    ('root ::= "(" root ")" | "abd" | "a" "bc" | "a"', ["((abc))", "(a)", "abd"], ["((a)", "ab"]),
    # More than one way to read it, and rules that are nothing.
    ('root ::= a a\na ::= "x"* |', ["", "x", "xxxx"], ["y"]),
    ('root ::= root "+" root | [0-9]', ["1", "1+2+3"], ["+", "1+"]),
    # Counts, classes and escapes.
    (r'root ::= [\x41-\u0043]{2,3} [^a-c\]] "\x2d\\" .', ["ABx-\\z", "ABC]-\\\n"[:3] + "d-\\\n"],
     ["Ax-\\z", "ABa-\\z", "AB]-\\z", "ABx-\\"]),
    ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{,1}', ["aab", "aabbccd"], ["ab", "aac", "aabccc"]),
    ('root ::= ("a/b" | "\\"") [-x] [x-]', ["a/b--", '"x-'], ["a/by-"]),
    ("root ::= (\n  'x'\n)".replace("'", '"') + " # the end", ["x"], [""]),
    ('root ::= "é" | "日本" | "\\U0001F600"', ["é", "日本", "😀"], ["日", "e"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_what_passes(
    model: Model, grammars: Grammars, grammar: str, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts(model, grammars, grammar, text), text
    for text in bad:
        assert not accepts(model, grammars, grammar, text), text


REFUSED: list[tuple[str, int, int, str]] = [
    ("", 1, 1, "no rule 'root'"),
    ('a ::= "x"', 1, 10, "no rule 'root'"),
    ("root ::= b", 1, 10, "no rule 'b'"),
    ('root ::= "x"\nroot ::= "y"', 2, 1, "two rules"),
    ('root ::= "x', 1, 10, "no end"),
    ("root ::= [a", 1, 10, "no end"),
    ("root ::= []", 1, 10, "no character"),
    ("root ::= [b-a]", 1, 14, "ends before"),
    ('root ::= ("x"', 1, 14, ") is missing"),
    ('root ::= "x")', 1, 13, "not expected"),
    ('root ::= \\d', 1, 10, "not expected"),
    ('root = "x"', 1, 6, "::= is missing"),
    ("root ::= *", 1, 10, "repeats nothing"),
    ('root ::= "x"{3,2}', 1, 13, "comes first"),
    ('root ::= "x"{}', 1, 13, "number of times"),
    ('root ::= "x"{1000000}', 1, 13, "more than"),
    ('root ::= "\\q"', 1, 11, "no escape"),
    ('root ::= "\\xg0"', 1, 13, "hex digits"),
    ('root ::= "\\ud800"', 1, 13, "hex digits"),
    ("root ::= <think>", 1, 10, "tokens"),
    ("root ::= !<[1]>", 1, 10, "tokens"),
    ("root ::= " + "(" * 200, 1, 110, "groups"),
    ('root ::= "x"*+?', 1, 15, "more than 2 repetitions"),
    ('root ::= "x"' + "*" * 5000, 1, 15, "more than 2 repetitions"),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "line", "column", "says"), REFUSED)
def test_what_is_refused_and_where(grammar: str, line: int, column: int, says: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        gbnf_rules(grammar)
    assert str(refused.value).startswith(f"line {line}, column {column}: ")
    assert says in str(refused.value)


def test_the_deepest_grammar_is_read() -> None:
    """The recursion that reads it is within Python's limit, from within a server's stack too."""
    inner = '"x"'
    for _ in range(99):
        inner = f'("y" {inner} | "z")*+'
    assert len(gbnf_rules(f"root ::= {inner}")) > 99
    assert len(gbnf_rules(f'root ::= {inner} | "(" root ")"')) > 99


def test_a_short_grammar_does_not_become_a_long_expression() -> None:
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


@pytest.mark.parametrize("seed", range(12))
def test_random_grammars_mean_what_their_definition_says(
    model: Model, grammars: Grammars, seed: int
) -> None:
    """Every text of up to three letters passes exactly where the definition lets it."""
    grammar = random_grammar(random.Random(seed))
    rules = _GbnfReader(grammar).rules()
    for text in texts():
        expected = len(text) in ends(rules, rules["root"], text, 0, 0)
        assert accepts(model, grammars, grammar, text) == expected, (grammar, text)


def test_answers_obey(hermes: Running) -> None:
    """Of chat completions, with thoughts before them or not, and of completions."""
    http = Http(hermes.url)
    grammar = 'root ::= "{" pair ("," pair)? "}"\npair ::= "\\"" [a-c]{2} "\\":" ("1" | "2")'
    for fields in ({"enable_thinking": False}, {"temperature": 1.5}):
        body = {
            "messages": [{"role": "user", "content": "a"}],
            "grammar": grammar,
            "max_tokens": 400,
            "seed": 8,
            **fields,
        }
        choice = http.post("/v1/chat/completions", body).json["choices"][0]
        if choice["finish_reason"] == "stop":
            assert all(len(key) == 2 for key in json.loads(choice["message"]["content"]))
    text = {"prompt": "a", "grammar": grammar, "max_tokens": 40, "n": 3, "seed": 1}
    choices = http.post("/v1/completions", text).json["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert all(json.loads(choice["text"]) for choice in choices)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_refusal_names_the_field_and_the_place(hermes: Running, path: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    if path == "/v1/completions":
        body = {"prompt": "a"}
    refused = Http(hermes.url).post(path, body | {"grammar": 'root ::= "a" <x>'})
    assert refused.status == 400
    assert refused.error["param"] == "grammar"
    assert "line 1, column 14" in refused.error["message"]


def test_a_grammar_and_a_format_contradict_each_other(hermes: Running) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "grammar": 'root ::= "a"'}
    more = {"response_format": {"type": "json_object"}}
    assert Http(hermes.url).post("/v1/chat/completions", body | more).status == 400


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"{100000} "b"{100000}',
        "root ::= " + " ".join(["[a-z]{0,1000}"] * 400),
        "\n".join([f'r{n} ::= r{n + 1} r{n + 1} | "{n}"' for n in range(60)])
        + '\nr60 ::= "x"\nroot ::= r0',
    ],
)
def test_a_grammar_that_explodes_is_refused_or_works(hermes: Running, grammar: str) -> None:
    """Within its limits, and nobody else's request fails."""
    http = Http(hermes.url)
    body = {"prompt": "a", "grammar": grammar, "max_tokens": 2}
    assert http.post("/v1/completions", body).status in (200, 400)
    assert http.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
