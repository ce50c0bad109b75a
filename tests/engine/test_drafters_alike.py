"""What every source of drafts must not change, on every tier: the prompt or a draft model, right
and wrong, beside preemption, prefix hits, cancels, masks and prompts in chunks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from reference.engine import Engine, EngineOptions
from reference.engine.draft_model import DraftModel, draft_limits
from reference.engine.drafter import Drafter, PromptLookup
from reference.limits import with_drafts
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.engine.small_engine import EVERY_TIER as TIERS
from tests.engine.test_draft_block import DRAFTS, LIMITS, MASKS, REQUESTS, Events, run
from tests.engine.test_speculation import Told
from tests.named_tiers import on_each, runner_on

SyntheticModel = Callable[..., Path]
Case = tuple[ModelRunner, Events]
RUNS = [
    (kind, ahead, chunk)
    for kind in ("prompt", "told", "model")
    for ahead, chunk in ((0, None), (1, 20), (3, 9))
]
pytestmark = pytest.mark.usefixtures("unmeasured_steps")


@pytest.fixture(scope="module")
def case(request, synthetic_model) -> Iterator[Case]:
    """A model on a tier, and its answers without drafts."""
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    with runner_on(path, TIERS[request.param], with_drafts(LIMITS, DRAFTS)) as runner:
        options = EngineOptions(steps_ahead=0, prefix_cache=False)
        yield runner, run(Engine(runner, options), masks=MASKS)


@contextmanager
def drafter_of(kind: str, case: Case) -> Iterator[Drafter]:
    """The prompt, drafts of which one in eight is wrong, or a draft model that is the model."""
    runner, expected = case
    if kind == "model":
        model = open_model(runner.model.file.path)
        with model.file, ModelRunner(model, runner.tier, draft_limits(runner.limits)) as small:
            yield DraftModel(small, runner.model)
    elif kind == "prompt":
        yield PromptLookup(1)
    else:
        answers = {one.prompt: [e.token for e in expected[one.id]] for one in REQUESTS[1:]}
        yield Told(answers, 1)


@pytest.mark.parametrize(
    ("case", "how"), on_each(TIERS, RUNS, ("told", 1, 20)), ids=str, indirect=["case"]
)
def test_no_draft_changes_an_answer(case, how):
    """Six requests in three slots and seven pages, and every second of them once more, cancelled
    after as many tokens as the one before and one more."""
    (runner, expected), (kind, ahead, chunk) = case, how
    requests = REQUESTS[1:] if kind == "told" else REQUESTS
    ended = [replace(one, id=10 + one.id) for one in requests[::2]]
    cancels = {one.id: 1 + number for number, one in enumerate(ended)}
    masks = {**MASKS, **{10 + number: mask for number, mask in MASKS.items()}}
    with drafter_of(kind, case) as drafter:
        options = EngineOptions(steps_ahead=ahead, chunk_tokens=chunk, draft_tokens=DRAFTS)
        engine = Engine(runner, options, drafter=drafter)
        events = run(engine, [*ended, *requests], masks, cancels)
    for one in requests:
        assert events[one.id] == expected[one.id]
    for one in ended:
        given = events[one.id]
        assert 0 < len(given) < one.max_tokens
        tokens = [event.token for event in given]
        assert tokens == [event.token for event in expected[one.id - 10]][: len(tokens)]
    counts = engine.statistics
    assert counts.speculation.accepted > 3
    assert counts.speculation.drafted > counts.speculation.accepted or kind == "model"
    assert counts.preempted
    assert counts.prefix.tokens_hit
