"""SAMPLE on the native tier, with lists of candidates that are cut while a row is read."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from accel.native.tier import Choices, NativeTier
from contract.opcodes import Opcode
from contract.records import SAMPLING
from harness import tiers
from harness.parity.cases import Case
from harness.parity.execute import by_definition, example, on_tier
from harness.parity.shapes import STRATEGIES
from tests.needs import need_device

ROWS, VOCAB = 12, 5003
MAX_KEPT = (1, 2, 40, 300, VOCAB // 4 - 1, VOCAB // 4, 5000, 0)


@pytest.fixture(scope="module")
def tier() -> Iterator[NativeTier]:
    choices = Choices(threads=2, cache=tiers.kernel_cache("native"))
    with need_device(lambda: NativeTier(choices=choices)) as opened:
        yield opened


def logits_of(kind: str) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((ROWS, VOCAB)).astype(np.float32) * 4
    match kind:
        case "rising":
            rows.sort(axis=1)
        case "falling":
            rows = -np.sort(-rows, axis=1)
        case "few":
            rows = np.rint(rows)
        case "equal":
            rows[:] = rows[:, :1]
        case "tiny":
            signs = rng.choice(np.array([0.0, -0.0, 1e-42, -1e-42, 3e-39], np.float32), rows.shape)
            rows = signs.astype(np.float32)
        case "forbidden":
            rows[rng.random(rows.shape) < 0.99] = -3e38
    return rows


@pytest.mark.parametrize(
    "kind", ["normal", "rising", "falling", "few", "equal", "tiny", "forbidden"]
)
@pytest.mark.parametrize("top_k", MAX_KEPT)
def test_cut_lists_draw_what_the_definition_draws(tier, kind, top_k):
    (shape, *_) = STRATEGIES[Opcode.SAMPLE](None)
    sizes = {"rows": ROWS, "vocab": VOCAB, "recent_tokens": 8, "slots": 3}
    shape = replace(shape, given=dict(shape.given) | sizes)
    case = Case(Opcode.SAMPLE, None, shape, "normal", 0)
    operands = dict(example(case).operands)
    operands["logits"] = logits_of(kind)
    records = operands["sampling"].copy().view(SAMPLING)[:, 0]
    records["temperature"] = np.resize(np.float32([1.0, 0.7, 2.5]), ROWS)
    records["repeat_last_n"], records["mask"], records["top_k"] = 0, 0, top_k
    operands["sampling"] = records.view(np.int32).reshape(ROWS, -1)
    expected = by_definition(case, operands)["token"]
    assert (on_tier(tier, case, operands)["token"] == expected).all()
