"""The second implementation in docs/examples agrees with the reference on every vector and model,
and each of its roundings matters."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from harness.cli.main import main
from harness.synth.spec import spec_of
from harness.synth.write import write_synthetic
from harness.vectors import VECTORS, document, text_of
from tests.paths import ROOT

EXAMPLES = ROOT / "docs" / "examples"
FILES = sorted(EXAMPLES.glob("independent*.py"))
STORED: dict[str, Any] = json.loads(VECTORS.read_text())
RULES = {f"R{number}" for number in range(1, 14)}
F = np.float32


@pytest.fixture(scope="module")
def independent() -> Iterator[ModuleType]:
    """The module, imported as its user does: from its own folder."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        module = importlib.import_module("independent")
        # The inputs are the same in every test.
        made = cache(module.numbers)
        module.numbers = lambda seed, shape, exponent: made(seed, tuple(shape), exponent)
        yield module
    finally:
        sys.path.remove(str(EXAMPLES))


def failures(independent: ModuleType, *ops: str) -> set[str]:
    """Of these operations, or of all, those that a vector does not agree with."""
    cases = [case for case in STORED["cases"] if not ops or case["op"] in ops]
    return {case["op"] for case in cases if not independent.check(case)}


def test_the_stored_vectors_are_those_of_the_reference():
    assert VECTORS.read_text() == text_of(document())


def test_every_rule_and_operation_has_vectors(independent):
    rules = {rule for case in STORED["cases"] for rule in case["rule"].split()}
    assert rules == RULES
    assert {case["op"] for case in STORED["cases"]} == set(independent.OPS)


def test_it_imports_nothing_of_the_project():
    allowed = {*sys.stdlib_module_names, "numpy", *(path.stem for path in FILES)}
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= allowed
            if isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] in allowed


def test_it_runs_alone(tmp_path):
    """Without the project on the path, from another folder; every vector agrees."""
    command = [sys.executable, EXAMPLES / "independent.py", VECTORS]
    run = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
    count = len(STORED["cases"])
    assert run.stdout.strip() == f"{count} of {count} vectors agree"


@pytest.mark.parametrize("model", STORED["models"], ids=lambda model: model["spec"]["quant"])
def test_models_agree(independent, tmp_path, model):
    """The digest of the logits of a prompt, and every token sampled after it."""
    file = tmp_path / "model.gguf"
    write_synthetic(file, spec_of(model["spec"]))
    one = independent.Model(file, model["context"])
    rows = [one.step(token) for token in model["tokens"]]
    assert independent.digest(np.array(rows)) == model["logits_sha256"]
    names = ("temperature", "seed", "top_k", "top_p", "min_p")
    sampling = {name: model["sampling"][name] for name in names}
    logits = rows[-1]
    for token in model["generated"]:
        assert independent.sample(logits, one.position, **sampling) == token
        logits = one.step(token)


def _left_fold(values: Any) -> Any:
    total = np.zeros(values.shape[:-1], F)
    for index in range(values.shape[-1]):
        total = total + values[..., index]
    return total


def _truncated(rules: ModuleType) -> Callable[[Any], Any]:
    exact = rules.quantize

    def quantize(x: Any) -> Any:
        """As the rule says, but rounded towards zero."""
        m, scales = exact(x)
        steps = np.repeat(np.where(scales > 0, scales, F(1)), 256)[: len(x)]
        return np.where(scales.repeat(256)[: len(x)] > 0, np.trunc(x / steps), m).astype(
            np.int32
        ), scales

    return quantize


def _contracted(coefficients: Any, x: Any) -> Any:
    """Multiply-adds that round once, as hardware contracts them."""
    kind = np.asarray(x).dtype
    if kind != F:
        value = coefficients[0] * x + coefficients[1]
        for coefficient in coefficients[2:]:
            value = value * x + coefficient
        return value
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = (value.astype(np.float64) * x + np.float64(coefficient)).astype(F)
    return value


def _norm_in_binary64(x: Any, weight: Any, eps: float) -> Any:
    wide = x.astype(np.float64)
    r = 1 / np.sqrt((wide * wide).mean(axis=-1) + eps)
    return (wide * r[..., None] * weight).astype(F)


MUTATIONS: dict[str, tuple[Callable[[ModuleType], tuple[str, Any]], str]] = {
    "a segment is summed from the left": (lambda r: ("fold", _left_fold), "sum"),
    "multiply-adds are contracted": (lambda r: ("polynomial", _contracted), "exp2"),
    "activations are truncated": (lambda r: ("quantize", _truncated(r)), "product"),
    "norms are computed in binary64": (lambda r: ("rms_norm", _norm_in_binary64), "rms_norm"),
    "a query has a bit more": (lambda r: ("query_bits", lambda n: 14), "attention"),
    "a constant's last bit differs": (
        lambda r: ("EXP2", [*r.EXP2[:3], np.nextafter(r.EXP2[3], F(1))]),
        "attention",
    ),
    "a digest has a block in another order": (
        lambda r: ("NEXT", (*r.NEXT[1:], r.NEXT[0])),
        "row_digest",
    ),
    "spans are not folded apart": (lambda r: ("fold_segments", _left_fold), "sum"),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_another_rounding_is_caught(independent, monkeypatch, what):
    """Negative control: the vectors of the operation fail when one rule is broken."""
    make, op = MUTATIONS[what]
    name, broken = make(independent.rules)
    monkeypatch.setattr(independent.rules, name, broken)
    assert failures(independent, op) == {op}


def test_signs_groups_and_matrices_matter(independent, monkeypatch):
    """Negative control: rotations without signs, a choice of experts that knows no groups, heads
    that all have the first matrix."""

    def of_any(groups: int = 1, groups_used: int = 1, **given: Any) -> Any:
        return independent.experts.case_choice(**given)

    def of_first(matrix_of: list[int], **given: Any) -> Any:
        return heads(matrix_of=[*matrix_of[:1]] * len(matrix_of), **given)

    heads = independent.OPS["heads"]
    monkeypatch.setattr(independent.rotated, "signs", lambda count, philox: np.ones(count, F))
    monkeypatch.setitem(independent.OPS, "choice", of_any)
    monkeypatch.setitem(independent.OPS, "heads", of_first)
    assert failures(independent) == {"rotate", "attention", "choice", "heads"}


def test_a_model_with_another_rounding_is_caught(independent, tmp_path, monkeypatch):
    """Negative control: one truncated activation changes the digest of a model's logits."""
    model = STORED["models"][0]
    write_synthetic(tmp_path / "model.gguf", spec_of(model["spec"]))
    monkeypatch.setattr(independent.rules, "quantize", _truncated(independent.rules))
    one = independent.Model(tmp_path / "model.gguf", model["context"])
    rows = [one.step(token) for token in model["tokens"]]
    assert independent.digest(np.array(rows)) != model["logits_sha256"]


def test_a_changed_vector_is_caught(independent):
    """Negative control: one bit of a stored result differs."""
    case = next(case for case in STORED["cases"] if case["op"] == "exp")
    words = case["out"]["y"]["f32"].split()
    words[0] = f"{int(words[0], 16) ^ 1:08x}"
    changed = case | {"out": {"y": case["out"]["y"] | {"f32": " ".join(words)}}}
    assert independent.check(case)
    assert not independent.check(changed)


def test_it_verifies_a_receipt(tmp_path, monkeypatch, capsys):
    """Of a run with penalties, step by step; and a changed token or digest is seen."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    model, receipt = tmp_path / "model.gguf", tmp_path / "receipt.json"
    write_synthetic(model, spec_of(STORED["models"][0]["spec"]))
    words = ["--model", model, "--tier", "cpu", "--receipt", receipt, "--max-tokens", "11"]
    words += ["--temperature", "1.2", "--seed", "4", "--repeat-penalty", "1.2", "--raw", "hello"]
    assert main(["run", *map(str, words)]) == 0
    capsys.readouterr()

    def check() -> str:
        command = [sys.executable, EXAMPLES / "independent.py", model, receipt]
        run = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
        assert run.stderr == ""
        return run.stdout

    assert check() == "11 leaves and 11 tokens of 11 agree, the root agrees\n"
    document = json.loads(receipt.read_text())
    document["payload"]["choices"][0]["tokens"][10] ^= 1
    document["leaves"][0][3] = "0" * 64
    receipt.write_text(json.dumps(document))
    assert check() == "10 leaves and 10 tokens of 11 agree, the root differs\n"
    # An answer of given tokens: no rule gives them, and the leaves behind the changed one differ.
    request = json.loads(document["payload"]["request"])
    given = document["payload"]["choices"][0]["tokens"]
    document["payload"]["request"] = json.dumps({**request, "force_tokens": given})
    receipt.write_text(json.dumps(document))
    assert check() == "10 leaves and 11 tokens of 11 agree, the root differs\n"
