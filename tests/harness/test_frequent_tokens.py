"""Drafters that draft frequent tokens only: answers are the same, and other texts are noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from contract.records import QUERY_TOKEN
from contract.types import SamplingParams
from harness.host.options import SessionOptions
from harness.host.session import Session
from reference.engine import drafter
from reference.engine.drafter import MOST_RARE, RECENT_TOKENS, DraftRequest, are_frequent
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import LOGITS, ModelRunner, StepInput
from reference.sched.slots import sampling_record
from tests.engine.headed_models import block_model, head_of
from tests.engine.test_draft_block import drafting_model
from tests.long_cases import long_except
from tests.named_tiers import open_by_name

pytestmark = pytest.mark.usefixtures("unmeasured_steps")
TIERS = "cpu", "native", "opencl", "vulkan"
FREQUENT = 256
"""Of 300 tokens."""
PROMPTS = {"frequent": range(7, 40), "rare": range(260, 293)}
SAMPLINGS = SamplingParams(), SamplingParams(temperature=0.9, top_k=40, seed=5)
DRAFTERS = "qwen35", "deepseek2", "dflash", "itself"
SyntheticModel = Callable[..., Path]


@pytest.fixture(scope="module")
def paths(
    request: pytest.FixtureRequest, synthetic_model: SyntheticModel
) -> tuple[Path, Path | None]:
    """A model, and what drafts for it: a model or a head of random weights without tokens of its
    own, or None for the model's own block."""
    if request.param == "itself":
        model = synthetic_model(architecture="qwen3", quant="q4_k_m", layers=3)
        return model, model
    if request.param == "dflash":
        model = block_model(synthetic_model, architecture="qwen3", quant="q4_k_m")
        return model, head_of(model)
    return drafting_model(synthetic_model, request.param), None


def marks_of(drafter: str, tier: str) -> list[pytest.MarkDecorator]:
    """On a processor that plays a graphics card one drafter is enough: what a tier has of its own,
    the first rows of a head, is compared below."""
    if tier == "vulkan" and drafter != "dflash":
        return [pytest.mark.soak]
    return [] if tier in ("cpu", "native") else [pytest.mark.long]


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize(
    ("paths", "tier"),
    [pytest.param(*one, marks=marks_of(*one)) for one in product(DRAFTERS, TIERS)],
    indirect=["paths"],
)
def test_answers_are_the_same(
    paths: tuple[Path, Path | None], tier: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a prompt of frequent tokens only such are drafted, after one of others any."""
    open_by_name(tier).close()
    monkeypatch.setattr(drafter, "FREQUENT_TOKENS", FREQUENT)
    steps, submit = Counter[bool](), ModelRunner.submit

    def submitting(self: ModelRunner, inputs: StepInput):  # type: ignore[no-untyped-def]
        if self.frequent_tokens and len(inputs.output_rows):
            steps[inputs.frequent] += 1
        return submit(self, inputs)

    model, drafting = paths
    # A processor that plays a graphics card takes a second for a few.
    count, said = 10 if tier == "vulkan" else 24, []
    for draft in (0, 5):
        options = SessionOptions(
            tier=tier, context=128, draft=draft, draft_model=drafting if draft else None
        )
        with Session.open(model, options) as session:
            if draft:
                monkeypatch.setattr(ModelRunner, "submit", submitting)
            answers = [session.generate(PROMPTS[kind], one, count) for one in SAMPLINGS]
            said.append([("".join(piece.text for piece in one), one.tokens) for one in answers])
            assert (session.engine.statistics.speculation.drafted > 0) == (draft > 0)
    assert said[0] == said[1]
    assert steps[kind == "frequent"] > 0
    if kind == "rare":
        assert not steps[True]


@pytest.mark.parametrize("rare", [0, 1, 4, 5])
def test_where_rare_tokens_are_few(rare: int) -> None:
    """A sixteenth of 64 tokens is four. What is behind the latest tokens does not count."""
    tokens = np.zeros(64, np.int32)
    tokens[:rare] = FREQUENT
    texts = tokens, np.r_[np.full(99, FREQUENT), np.zeros(RECENT_TOKENS)].astype(np.int32)
    few, old = (DraftRequest(0, 0, text, 1) for text in texts)
    assert are_frequent([old], FREQUENT)
    assert are_frequent([old, few], FREQUENT) == are_frequent([few], FREQUENT)
    assert are_frequent([few], FREQUENT) == (rare * MOST_RARE <= 64)


@pytest.mark.parametrize("tier", long_except(TIERS, "cpu", "native"))
@pytest.mark.parametrize("family", ["phi2", "gemma2", "command-r"])
def test_logits_are_the_first_of_all(
    synthetic_model: SyntheticModel, family: str, tier: str
) -> None:
    """With a bias, a cap and a scale behind the product."""
    limits = Limits(slots=1, context=32, pages=2)
    model = open_model(synthetic_model(architecture=family))
    with open_by_name(tier) as opened, closing(model):
        few = model.graph(replace(limits, frequent_tokens=FREQUENT))
        query, pages = np.zeros(1, QUERY_TOKEN), np.arange(2, dtype=np.int32)[None]
        sampling = np.array([sampling_record(SAMPLINGS[0], 0, 1)])
        step = StepInput(query, np.zeros(1, np.int32), sampling, pages, (LOGITS,))
        with ModelRunner(model, opened, limits, frequent=few) as runner:
            whole, part = (runner.step(replace(step, frequent=value)) for value in (False, True))
    assert part.logits.shape[1] == FREQUENT < whole.logits.shape[1]
    assert np.array_equal(part.logits, whole.logits[:, :FREQUENT])
