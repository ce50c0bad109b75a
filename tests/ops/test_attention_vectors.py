"""Rule R6 on its worked example and on the vectors that came with the rule."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reference.exact.attention_rows import Partial, exp2, merge, row_integers
from reference.exact.sums import fold_segment
from reference.ops import flash_attn_batched as definition
from tests.needs import need_file
from tests.ops.paged import Sequence, pool_of
from tests.paths import SHARED

Float32 = NDArray[np.float32]
VECTORS = SHARED / "prototypes" / "attention"
CALLS = 13


def floats(text: str) -> Float32:
    """Binary32 values from the hexadecimal of their bits."""
    return np.array([int(word, 16) for word in text.split()], np.uint32).view(np.float32)


def bits(values: Any) -> str:
    """The opposite of ``floats``, -0 as +0."""
    flat = np.atleast_1d(np.asarray(values, np.float32)) + np.float32(0.0)
    return " ".join(f"{word:08x}" for word in flat.view(np.uint32).ravel())


def example(name: str) -> Float32:
    """q [16], K or V [5, 16] of the worked example; each quotient rounded to binary32."""
    i, j = np.arange(16), np.arange(5)[:, None]
    if name == "q":
        x = ((7 * i + 3) % 29 - 14) / 7
    elif name == "k":
        x = ((5 * i + 11 * j) % 31 - 15) / 11 * np.where(j == 4, 4, 1)
    else:
        x = ((3 * i + 7 * j) % 23 - 11) / 27 / np.where(j == 2, 16, 1)
    return x.astype(np.float32)


def attend(q: Float32, keys: Float32, values: Float32, positions: list[int], **params: Any) -> Any:
    """Queries [heads, n] at each of ``positions`` over keys and values [length, kv_heads, n]."""
    kv, page_table = pool_of([Sequence(keys, values)])
    heads, head_dim = q.shape
    out = definition.flash_attn_batched(
        q=np.tile(q.reshape(1, -1), (len(positions), 1)), kv=kv, page_table=page_table,
        query=np.array([(0, 0, position, 0) for position in positions], np.int32), heads=heads,
        kv_heads=keys.shape[1], head_dim=head_dim, **params,
    )  # fmt: skip
    return out.reshape(len(positions), heads, head_dim)


def test_rows_of_the_worked_example():
    """Integers and exponents of q, of the first key and of the first value."""
    q = row_integers(example("q"), 13)
    assert (q.exponent, q.m[:5].tolist()) == (1, [-6437, -2341, 1755, 5851, -7022])
    keys, values = row_integers(example("k"), 10), row_integers(example("v"), 10)
    assert keys.exponent.tolist() == [0, 0, 0, 0, 2]
    assert keys.m[0, :5].tolist() == [-1396, -931, -465, 0, 465]
    assert values.exponent.tolist() == [-2, -2, -6, -2, -2]
    assert values.m[0, :2].tolist() == [-1669, -1214]
    assert (keys.m @ q.m).tolist() == [2459382, 18742112, -3816116, 19220400, 13555180]


def test_tile_of_the_worked_example(monkeypatch):
    """Every number the rule names between the operands and the output."""
    seen: dict[str, str] = {}

    def exponential(d: Float32) -> Float32:
        p = exp2(d)
        seen.update(d=bits(d), p=bits(p))
        return p

    def folded(weights: Float32) -> Float32:
        total = fold_segment(weights)
        seen["l"] = bits(total)
        return total

    scores = definition._scores

    def scored(*rows: Any, **params: Any) -> Float32:
        x = scores(*rows, **params)
        seen["x"] = bits(x)
        return x

    monkeypatch.setattr(definition, "exp2", exponential)
    monkeypatch.setattr(definition, "fold_segment", folded)
    monkeypatch.setattr(definition, "_scores", scored)
    keys, values = example("k")[:, None], example("v")[:, None]
    y = attend(example("q")[None], keys, values, [4], scale=0.25)
    assert seen == {
        "x": "3e588fa9 3fce4ad8 bea803a7 3fd38e8c 4095334b",
        "d": "c0327705 bfb1b528 c0550075 bfac7174 3fd4cd2c",
        "p": "3e143695 3ec399a5 3dcbee85 3ec941aa 404a9df4",
        "l": "4085ee1e",
    }
    assert bits(y[0, 0, :4]) == "be248eb9 be07445f bcc0786f 3dabb74e"
    capped = attend(example("q")[None], keys, values, [4], scale=0.25, soft_cap=5.0)
    assert bits(capped[0, 0, 0]) == "be11ba9b"


def test_row_rule_of_the_worked_example():
    """Ties to even, the clamp, what vanishes, and -0."""
    x = floats("3f400000 bfc00000 3fbffcb9 3a400000 80000000 30800000 3ffffcb9 b9800000")
    rows = row_integers(x, 10)
    assert (rows.exponent, rows.m.tolist()) == (0, [768, -1536, 1536, 1, 0, 0, 2047, 0])


def test_exp2_of_the_worked_example():
    """The polynomial's bits on both sides of a whole number, and the smallest argument."""
    d = floats("00000000 3f000000 bf000000 3fc00000 c0e3ef9e c2a00000")
    assert bits(exp2(d)) == "3f7ffb49 3fb5017c 3f35017c 4035017c 3beb10c6 177ffb49"


def test_merge_of_the_worked_example():
    """A near tile is rescaled; a far one vanishes and leaves the other unchanged."""
    near, far = (part(top, 1.25, 1000.0) for top in (3.0, 100.0))
    later = part(-2.0, 2.5, 77.0)
    merged = merge(near, later)
    assert (merged.top, bits(merged.total), bits(merged.output)) == (3.0, "3faa0000", "447a9a00")
    merged = merge(far, later)
    assert (merged.top, merged.total, merged.output.tolist()) == (100.0, 1.25, [1000.0])


def part(top: float, total: float, output: float) -> Partial:
    """One part of one output channel."""
    return Partial(np.float32(top), np.float32(total), np.array([output], np.float32))


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    """The rule's own vectors; missing ones are a failure under CI."""
    return dict(json.loads(need_file(VECTORS / "vectors.json").read_text()))


def test_vectors_of_rows_and_merges(vectors):
    """Rows of 10 and 13 bits, zero and broken ones, exp2, and two merges."""
    for case in vectors["row to integers"]:
        rows = row_integers(floats(case["x"]), case["bits"])
        assert (rows.m.tolist(), rows.exponent) == (case["m"], case["e"])
    assert bits(exp2(floats(vectors["exp2"]["d"]))) == vectors["exp2"]["p"]
    merges = vectors["merge"]
    left, right, result, far = (
        Partial(floats(merges[name][0])[0], floats(merges[name][1])[0], floats(merges[name][2]))
        for name in ("left", "right", "result", "right after left, far")
    )
    for got, expected in ((merge(left, right), result), (merge(far, right), far)):
        assert (got.top, got.total) == (expected.top, expected.total)
        assert got.output.tolist() == expected.output.tolist()


@pytest.mark.parametrize("name", ["one tile, five positions", "the same with soft_cap 5"])
def test_vectors_of_one_tile(vectors, name):
    """The traced tiles, to the output."""
    tile = vectors[name]
    keys, values = (np.array([floats(row) for row in tile[side]])[:, None] for side in "KV")
    scale, cap = floats(tile["scale"])[0], floats(tile["soft_cap"])[0]
    y = attend(floats(tile["q"])[None], keys, values, [4], scale=float(scale), soft_cap=float(cap))
    assert bits(y) == bits(floats(tile["y"]))


@pytest.mark.parametrize("index", range(CALLS))
def test_vectors_of_whole_calls(vectors, index):
    """head_dim 64 to 512, windows, caps, spans, wide, zero, broken and far rows."""
    calls = vectors["whole calls (inputs and outputs in vectors.npz: q, k, v, y)"]
    assert len(calls) == CALLS
    call = calls[index]
    with np.load(VECTORS / "vectors.npz") as arrays:
        q, keys, values, expected = (arrays[f"{name}{index}"] for name in "qkvy")
    params = {"window": call["window"], "soft_cap": float(call["soft_cap"])}
    scale = float(floats(call["scale"])[0])
    y = attend(q, keys, values, call["queries at"], scale=scale, **params)
    np.testing.assert_array_equal(y, expected)
