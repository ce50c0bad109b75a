"""Steps of many tokens of which few rows are read, none and all of a short one among them."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import F32, DType
from contract.ir.graph import BufferKind
from contract.records import QUERY_TOKEN, SAMPLING
from contract.tier import Tier
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import Model
from reference.runner import HIDDEN, LOGITS, ModelRunner, StepInput
from tests.families_table import FAMILIES

LIMITS = Limits(
    slots=3, context=48, pages=9, step_tokens=24, step_rows=4, recent_tokens=8, hidden_states=True
)
ATTENDS_LAST = {**FAMILIES["qwen35moe-fused"], "layers": 3}
"""As real hybrids: the gate of the last attention is of rows as well, and its norm made again."""
Chunk = tuple[int, int]
"""A slot and how many tokens of it."""
Steps = tuple[tuple[tuple[Chunk, ...], tuple[int, ...]], ...]
STEPS: Steps = (
    (((0, 11), (1, 7), (2, 5)), (22, 10)), (((1, 19),), ()),
    (((2, 1), (0, 17), (1, 2)), (19, 0, 18, 17)), (((1, 1), (0, 1), (2, 1)), (0, 1, 2)),
)  # fmt: skip
"""Chunks of a step, and its output rows: in another order than the tokens, of a chunk's middle."""
ONE_PROMPT: Steps = ((((0, 18),), ()), (((0, 17),), (16,)), (((0, 1),), (0,)))
"""A prompt by itself, in a chunk nobody reads and one whose last row is read, and a token."""
Results = list[dict[str, NDArray[np.uint8]]]


def run_steps(model: Model, tier: Tier, kv_dtype: DType = F32, steps: Steps = STEPS) -> Results:
    """Of every step what the rows give, and of the last one all that outlives it. There is room for
    the most rows a step has, for four of STEPS."""
    most = max(len(rows) for _, rows in steps)
    limits = replace(LIMITS, kv_dtype=kv_dtype, step_rows=most)
    pages = np.arange(limits.pages, dtype=np.int32)[::-1].reshape(limits.slots, -1).copy()
    positions = [0] * limits.slots
    found: Results = []
    with ModelRunner(model, tier, limits) as runner:
        for chunks, rows in steps:
            query = np.zeros(sum(count for _, count in chunks), QUERY_TOKEN)
            at = 0
            for slot, count in chunks:
                part = query[at : at + count]
                part["slot"], part["position"] = slot, positions[slot] + np.arange(count)
                part["token"] = 11 + 7 * part["position"] + slot
                positions[slot] += count
                at += count
            output_rows = np.array(rows, np.int32)
            sampling = np.zeros(len(rows), SAMPLING)
            step = StepInput(query, output_rows, sampling, pages, (LOGITS, HIDDEN))
            output = runner.step(step)
            found.append(
                {**output.outputs, "token": np.ascontiguousarray(output.token).view(np.uint8)}
            )
        kept = [decl.name for decl in runner.graph.of_kind(BufferKind.STATE)]
        found.append({name: runner.buffer(name).reshape(-1).copy() for name in kept})
    return found


def differences(expected: Results, got: Results) -> list[tuple[int, str]]:
    """Steps and buffers that have other bits."""
    assert [step.keys() for step in expected] == [step.keys() for step in got]
    return [
        (number, name)
        for number, step in enumerate(expected)
        for name, values in step.items()
        if not np.array_equal(values, got[number][name])
    ]


def assert_definitions(
    model: Model, tier: Tier, kv_dtype: DType = F32, runs: tuple[Steps, ...] = (STEPS, ONE_PROMPT)
) -> None:
    """``tier`` gives every bit of the definitions, which select rows where the graph does."""
    with CpuTier(1, definitions_only=True) as oracle:
        for steps in runs:
            expected = run_steps(model, oracle, kv_dtype, steps)
            assert differences(expected, run_steps(model, tier, kv_dtype, steps)) == []
