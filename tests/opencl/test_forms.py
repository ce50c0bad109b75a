"""A step gives the same bits in every form that holds it: forms are about speed alone."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel.opencl import tier as tier_module
from accel.opencl.launcher import Mode
from accel.packets.rules import lower_graph
from accel.packets.shape_buckets import FEW, SPLIT_TOKENS, shape_buckets
from accel.packets.step import Step
from contract.dtypes import F16
from contract.ir.graph import Graph
from contract.records import QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import LOGITS, ModelRunner, StepInput
from tests.families_table import FAMILIES

LIMITS = Limits(2, 96, 12, F16, step_tokens=24, step_rows=20)
FORMS = shape_buckets(LIMITS.largest)
MODELS = ("llama-8-experts", "qwen35moe-fused", "gemma4-per-layer-embeddings")
"""Experts; delta nets with experts; layers that differ."""
PAGE_TABLE = np.arange(12, dtype=np.int32).reshape(2, 6)


@pytest.mark.parametrize(
    "largest", [ShapeKey(0, 3), ShapeKey(1, 1), ShapeKey(9, 2), LIMITS.largest]
)
def test_forms_rise_to_the_largest_step(largest):
    """Each holds more than the one before; the last is the largest step itself."""
    buckets = shape_buckets(largest)
    assert buckets[-1] == largest
    assert all(one.tokens < other.tokens for one, other in pairwise(buckets))
    assert all(bucket.rows <= largest.rows for bucket in buckets)
    assert {bucket.tokens for bucket in FORMS} == {1, SPLIT_TOKENS, FEW, LIMITS.step_tokens}


def step(slot: int, position: int, tokens: int, rows: int) -> StepInput:
    """``tokens`` of a slot from ``position`` on, of which the first ``rows`` want logits."""
    query = np.zeros(tokens, QUERY_TOKEN)
    query["position"] = position + np.arange(tokens)
    query["token"] = 3 + (7 * query["position"] + 11 * slot) % 90
    query["slot"] = slot
    sampling = np.zeros(rows, SAMPLING)
    sampling["position"], sampling["slot"] = query["position"][:rows] + 1, slot
    sampling["repeat_penalty"], sampling["repeat_last_n"] = 1.2, 8
    sampling["temperature"], sampling["top_p"] = 0.8, 1.0
    return StepInput(query, np.arange(rows, dtype=np.int32), sampling, PAGE_TABLE, (LOGITS,))


@pytest.fixture(scope="module", params=MODELS)
def model_name(request) -> str:
    return request.param


@pytest.fixture(params=[Mode.PERSISTENT, Mode.LAUNCH], ids=str)
def runners(
    open_opencl, synthetic_model, model_name, request, monkeypatch
) -> Iterator[list[ModelRunner]]:
    """One with the tier's forms, and for each larger form one whose steps run in it or above."""
    model = open_model(synthetic_model(quant="q4_k_m", **FAMILIES[model_name]))
    with ExitStack() as stack:
        opened = []
        for first in range(len(FORMS)):
            tier = open_opencl(mode=request.param)
            monkeypatch.setattr(tier, "buckets", lambda largest, first=first: FORMS[first:])
            opened.append(stack.enter_context(ModelRunner(model, tier, LIMITS)))
        yield opened


def test_a_step_that_was_planned_is_not_lowered_again(open_opencl, synthetic_model, monkeypatch):
    """Of a model each form is lowered once, by the plan of its memory."""
    lowered: list[tuple[object, ShapeKey]] = []

    def counted(graph: Graph, bucket: ShapeKey, parts: int, tier: str) -> Step:
        lowered.append((graph, bucket))
        return lower_graph(graph, bucket, parts, tier)

    monkeypatch.setattr(tier_module, "lower_graph", counted)
    model = open_model(synthetic_model(quant="q4_k_m", **FAMILIES[MODELS[0]]))
    tier = open_opencl()
    tier.footprint(model.graph(LIMITS), LIMITS.largest)
    with ModelRunner(model, tier, LIMITS) as runner:
        runner.prepare()
        assert [bucket for graph, bucket in lowered if graph is runner.graph] == list(FORMS)


@st.composite
def counts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Slot, tokens and rows of each step."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 3) | st.integers(1, LIMITS.step_tokens))
        rows = draw(st.integers(0, min(tokens, LIMITS.step_rows)))
        found.append((draw(st.integers(0, 1)), tokens, rows))
    return found


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=counts())
def test_every_form_gives_the_same_bits(runners, steps):
    """Tokens and logits of prefill and decode steps in two slots, from position 0 on."""
    positions = [0, 0]
    for slot, tokens, rows in steps:
        outcomes = [r.step(step(slot, positions[slot], tokens, rows)) for r in runners]
        positions[slot] += tokens
        for outcome in outcomes[1:]:
            assert np.array_equal(outcome.token, outcomes[0].token)
            assert np.array_equal(outcome.logits, outcomes[0].logits)
