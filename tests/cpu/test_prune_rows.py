"""What the CPU tier computes of a model's last layer, and that it does not show in the bits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from contract.ir.graph import Node
from contract.ops import TABLE
from reference.cpu.experts import Call
from reference.cpu.tier import CpuTier
from reference.model.open import Model, open_model
from tests.families_table import EACH_KIND, FAMILIES
from tests.few_rows import (
    ATTENDS_LAST,
    ONE_PROMPT,
    STEPS,
    assert_definitions,
    differences,
    run_steps,
)
from tests.long_cases import long_except


class Counting(CpuTier):
    """Notes of each node that runs how many rows its first result has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1, **options)
        self.ran: list[tuple[str, int]] = []

    def call_of(self, node: Node, bound: Mapping[str, Any]) -> Call:
        call = super().call_of(node, bound)
        first = next((o.name for o in TABLE[node.opcode].outputs if o.name in bound), None)

        def counted() -> None:
            if first is not None:
                self.ran.append((node.name, len(bound[first])))
            call()

        return counted


def counts(model: Model, tier: Counting, step: int) -> dict[str, int]:
    """Rows by node of one of STEPS."""
    run_steps(model, tier)
    begins = [n for n, (name, _) in enumerate(tier.ran) if name == "open_step"]
    return dict(tier.ran[begins[step] : [*begins, None][step + 1]])


@pytest.fixture
def dense(synthetic_model) -> Model:
    return open_model(synthetic_model(architecture="qwen3", quant="q4_k_m", layers=2))


def test_the_last_layer_is_computed_for_its_rows(dense):
    """Keys and values of all tokens, whatever stands behind attention of the rows alone."""
    (chunks, rows), tokens = STEPS[0], 23
    assert sum(count for _, count in chunks) == tokens
    with Counting() as tier:
        found = counts(dense, tier, 0)
    behind = ("attn_output", "attn_residual", "ffn_gate_up", "swiglu", "ffn_down", "ffn_residual")
    assert {found[f"{name}[0]"] for name in behind} == {tokens}
    assert {found[f"{name}[1]"] for name in behind} == {len(rows)}
    assert {found[f"{name}[1]"] for name in ("attn_qkv", "attention")} == {tokens}
    assert found["attention[1].rows"] == found["ffn_residual[0].rows"] == len(rows)


def test_a_chunk_that_nobody_reads_ends_with_attention(dense):
    with Counting() as tier:
        found = counts(dense, tier, 1)
    assert found["attention[1]"] == 19
    assert {found[name] for name in ("attn_output[1]", "ffn_down[1]", "lm_head")} == {0}


def test_definitions_run_the_graph_as_it_was_written(dense):
    with Counting(definitions_only=True) as tier:
        found = counts(dense, tier, 0)
    assert found["ffn_residual[1]"] == 23
    assert found["select_rows"] == 2
    assert "attention[1].rows" not in found


@pytest.mark.parametrize("name", [*long_except(FAMILIES, *EACH_KIND), "attends last"])
def test_bits_are_those_of_the_definitions(synthetic_model, name):
    """Logits, hidden states, tokens and all that outlives a step, of each kind of layer. A prompt
    by itself is one of each kind."""
    fields = FAMILIES.get(name, ATTENDS_LAST)
    model = open_model(synthetic_model(quant="q4_k_m", **fields))
    runs = (STEPS,) if name in FAMILIES and name not in EACH_KIND else (STEPS, ONE_PROMPT)
    with CpuTier(1) as tier:
        assert_definitions(model, tier, runs=runs)


def test_other_rows_would_be_noticed(dense):
    """The residual of a neighbouring row fails the comparison above."""
    with CpuTier(1) as tier:
        expected = run_steps(dense, tier)

    class Shifted(CpuTier):
        def call_of(self, node: Node, bound: Mapping[str, Any]) -> Call:
            if node.name == "ffn_residual[0].rows":
                bound = {**bound, "x": np.roll(bound["x"], 1, axis=0)}
            return super().call_of(node, bound)

    with Shifted(1) as tier:
        assert differences(expected, run_steps(dense, tier))
