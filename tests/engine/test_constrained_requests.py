"""Requests with masks, biases and log-probabilities: the same bits however they are run."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.types import FinishReason, Request, SamplingParams, TokenEvent
from reference.engine import Engine, EngineOptions, MaskProvider
from reference.engine.drafter import PromptLookup
from reference.limits import Limits
from reference.model.open import open_model
from reference.ops.log_probabilities import log_probabilities
from reference.runner import ModelRunner
from reference.sched.constraints import pack_mask
from tests.engine.small_engine import events_of
from tests.named_tiers import around_steps, quick_tier, runner_on

VOCAB = 320
LIMITS = Limits(
    slots=3, context=96, pages=14, step_tokens=32, step_rows=16, masks=3, biases=5,
    top_log_probabilities=6, draft_tokens=11,
)  # fmt: skip
TIERS = around_steps("native", "opencl")


def two_residues(generated: list[int]) -> NDArray[np.uint32] | None:
    """A rule with a state: after a token t only those that are t + 1 or t + 2 modulo 5; the first
    is free."""
    if not generated:
        return None
    last = generated[-1]
    return pack_mask((v for v in range(VOCAB) if (v - last) % 5 in (1, 2)), VOCAB)


def few(generated: list[int]) -> NDArray[np.uint32]:
    """Twenty tokens, others at each position."""
    start = 13 * len(generated) % 300
    return pack_mask(range(start, start + 20), VOCAB)


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 31 + i * 7) % 256 for i in range(length))


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
PENALIZED = SamplingParams(repeat_penalty=1.3, presence_penalty=0.2, repeat_last_n=16)
ASKED: tuple[tuple[Request, MaskProvider | None], ...] = (
    (Request(1, prompt(1, 9), 12, log_probabilities=6), two_residues),
    (Request(2, prompt(2, 40), 10, SAMPLED, logit_bias=((7, 9.0), (300, 8.5))), None),
    (Request(3, prompt(3, 5), 14, PENALIZED, log_probabilities=0, ignore_end=True), None),
    (Request(4, prompt(4, 21), 11, SAMPLED, logit_bias=((3, -4.0),), log_probabilities=2), few),
    (Request(5, prompt(5, 30), 8), None),
    (Request(6, prompt(6, 3), 20, log_probabilities=3, ignore_end=True), None),
)
Outcome = dict[int, list[TokenEvent]]


def run(
    runner: ModelRunner, asked: Sequence[tuple[Request, MaskProvider | None]] = ASKED, *,
    depth: int = 0, chunk: int | None = None, ends: frozenset[int] = frozenset(),
) -> Outcome:  # fmt: skip
    """Every event of requests that are served together."""
    options = EngineOptions(steps_ahead=depth, chunk_tokens=chunk, end_of_generation=ends)
    engine = Engine(runner, options)
    for request, allowed in asked:
        engine.submit(request, allowed=allowed)
    return events_of(engine)


@pytest.fixture(scope="module", params=TIERS)
def runner(request, tiny_model_path) -> Iterator[ModelRunner]:
    with runner_on(tiny_model_path, TIERS[request.param], LIMITS) as runner:
        yield runner


@pytest.fixture(scope="module")
def cpu(tiny_model_path) -> Iterator[ModelRunner]:
    with runner_on(tiny_model_path, quick_tier, LIMITS) as runner:
        yield runner


@pytest.fixture(scope="module")
def alone(cpu) -> Outcome:
    """Every request by itself on the CPU tier."""
    return {one[0].id: run(cpu, [one])[one[0].id] for one in ASKED}


@pytest.mark.parametrize(("depth", "chunk"), [(0, None), (1, 7), (3, 16)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (3, 0, 5, 2), (4, 3)], ids=str)
def test_company_depth_and_tier_change_no_bit(runner, alone, order, depth, chunk):
    """Tokens and log-probabilities are those of the solo run; requests wait, join and are
    preempted on the way."""
    asked = [ASKED[index] for index in order]
    events = run(runner, asked, depth=depth, chunk=chunk)
    assert events == {request.id: alone[request.id] for request, _ in asked}


@pytest.mark.parametrize("depth", [0, 1])
def test_guessing_changes_nothing(runner, alone, depth):
    """Biases, penalties and log-probabilities of several tokens a step; masks beside them."""
    engine = Engine(runner, EngineOptions(steps_ahead=depth), drafter=PromptLookup())
    for request, allowed in ASKED:
        engine.submit(request, allowed=allowed)
    assert events_of(engine) == alone
    assert engine.statistics.speculation.accepted > 0


def test_preemption_changes_nothing(runner, alone):
    """A masked sequence too resumes from its tokens, when its tenant's pages are cut down."""
    engine = Engine(runner, EngineOptions(steps_ahead=1))
    for request, allowed in ASKED:
        engine.submit(request, allowed=allowed)
    events: Outcome = {request.id: [] for request, _ in ASKED}
    for _ in range(5):
        for event in engine.step():
            events[event.request_id].append(event)
    engine.put_tenant(replace(engine.tenants[0], max_kv_pages=5))
    for event in engine.run():
        events[event.request_id].append(event)
    assert events == alone
    assert engine.statistics.preempted > 0


def test_without_constraints_other_tokens_come_out(cpu, alone):
    """The negative control: each of them decides."""
    for index in (0, 1, 3):
        request = replace(ASKED[index][0], logit_bias=())
        free = run(cpu, [(request, None)])[request.id]
        assert [e.token for e in free] != [e.token for e in alone[request.id]]


def test_every_token_is_allowed(alone):
    """And the providers were told what had been generated, in order."""
    tokens = [event.token for event in alone[1]]
    assert all((after - token) % 5 in (1, 2) for token, after in pairwise(tokens))
    for place, event in enumerate(alone[4]):
        start = 13 * place % 300
        assert start <= event.token < start + 20


def test_a_provider_sees_each_token_once(cpu):
    seen: list[list[int]] = []

    def watch(generated: list[int]) -> NDArray[np.uint32] | None:
        seen.append(generated)
        return few(generated)

    events = run(cpu, [(ASKED[3][0], watch)], depth=3)[4]
    tokens = [event.token for event in events]
    assert seen == [tokens[:count] for count in range(len(tokens))]


def test_log_probabilities_are_those_of_the_logits(cpu, alone):
    """Of the model's own, whatever mask, bias and penalties made of them; only where asked."""
    for (request, _), most in zip(ASKED, (6, None, 0, 2, None, 3), strict=True):
        assert request.log_probabilities == most
        events = alone[request.id]
        if most is None:
            assert all((e.log_probability, e.top) == (None, ()) for e in events)
            continue
        tokens = np.array([event.token for event in events], np.int32)
        logits = forced(cpu, request, tokens)
        chosen, ids, logs = log_probabilities(logits=logits, token=tokens, top=6)
        assert [e.log_probability for e in events] == chosen.tolist()
        for event, row_ids, row_logs in zip(events, ids.tolist(), logs.tolist(), strict=True):
            assert event.top == tuple(zip(row_ids, row_logs, strict=True))[:most]


def forced(cpu: ModelRunner, request: Request, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """The logits that gave each of ``tokens``, teacher-forced."""
    parts: list[NDArray[np.float32]] = []
    sequence = (*request.prompt, *tokens.tolist()[:-1])
    engine = Engine(cpu)
    engine.submit(Request(99, sequence, 0), lambda first, rows: parts.append(rows))
    list(engine.run())
    return np.concatenate(parts)[len(request.prompt) - 1 :]


def nothing(generated: list[int]) -> NDArray[np.uint32] | None:
    return pack_mask((), VOCAB) if len(generated) == 3 else None


def raising(generated: list[int]) -> NDArray[np.uint32] | None:
    if len(generated) == 3:
        raise KeyError("no such rule")
    return None


def misshapen(generated: list[int]) -> NDArray[np.uint32] | None:
    return np.zeros(3, np.uint32) if len(generated) == 3 else None


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("bad", [nothing, raising, misshapen])
def test_a_mask_that_fails_ends_one_request(runner, alone, bad, depth, caplog):
    """Three tokens, then an error; the others do not notice. A provider's failure is logged."""
    caplog.set_level(logging.CRITICAL if bad is nothing else logging.ERROR)
    others = [ASKED[0], ASKED[3]]
    events = run(
        runner, [(Request(9, prompt(9, 7), 8, ignore_end=True), bad), *others], depth=depth
    )
    ended = events.pop(9)
    assert [event.finish_reason for event in ended] == [None, None, None, FinishReason.ERROR]
    assert ended[-1] == TokenEvent(9, -1, 10, FinishReason.ERROR)
    assert events == {1: alone[1], 4: alone[4]}
    assert [record.name for record in caplog.records] == (
        [] if bad is nothing else ["reference.engine.constraining"]
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": tuple((token, 1.0) for token in range(6))}, "logit_bias"),
        ({"log_probabilities": 7}, "log_probabilities"),
    ],
)
def test_what_cannot_be_had_is_refused(cpu, alone, changes, field):
    engine = Engine(cpu)
    with pytest.raises(RequestError) as caught:
        engine.submit(replace(ASKED[5][0], **changes))
    assert caught.value.field == field
    engine.submit(ASKED[5][0])
    assert list(engine.run()) == alone[6]


def test_a_step_has_masks_for_all_slots_or_none(tiny_model_path):
    model = open_model(tiny_model_path)
    with model.file, quick_tier() as tier:
        with (
            ModelRunner(model, tier, replace(LIMITS, masks=2)) as runner,
            pytest.raises(ValueError, match="a mask for every slot, or none"),
        ):
            Engine(runner)
        with (
            ModelRunner(model, tier, replace(LIMITS, masks=0)) as runner,
            pytest.raises(RequestError, match="allowed: this engine was built without masks"),
        ):
            Engine(runner).submit(Request(1, (5,), 3), allowed=few)


ENDS = frozenset(range(0, VOCAB, 2))
"""So many tokens end an answer that every one would end at once."""
LEAST = (
    (Request(1, prompt(1, 9), 12, SAMPLED, min_tokens=7), None),
    (Request(2, prompt(2, 40), 14, SAMPLED, min_tokens=9, stop_tokens=(1, 3, 5)), few),
    (Request(3, prompt(3, 5), 9, min_tokens=5, stop_tokens=(7, 9, 300), ignore_end=True), None),
    (Request(4, prompt(4, 21), 11, PENALIZED, min_tokens=11), None),
    (Request(5, prompt(5, 30), 8, SAMPLED), None),
)


def written_out(request: Request, own: MaskProvider | None) -> MaskProvider:
    """The definition: masks that forbid the ends as long as the answer is too short."""
    ends = {*request.stop_tokens, *(() if request.ignore_end else ENDS)}

    def allowed(generated: list[int]) -> NDArray[np.uint32]:
        short = len(generated) < request.min_tokens
        rest = pack_mask([v for v in range(VOCAB) if not short or v not in ends], VOCAB)
        return rest if own is None else rest & own(generated)

    return allowed


def test_a_least_number_of_tokens_is_a_mask(runner, cpu):
    defined: Outcome = {}
    for request, own in LEAST:
        plain = replace(request, min_tokens=0, stop_tokens=())
        defined |= run(cpu, [(plain, written_out(request, own))], ends=ENDS)
    for depth in (0, 3):
        assert run(runner, LEAST, depth=depth, ends=ENDS) == defined
    for request, _ in LEAST:
        assert len(defined[request.id]) >= max(1, request.min_tokens)
    assert len(defined[5]) == 1, "without a least number it ends at once"


@pytest.mark.parametrize("least", [-1, 5, 2.0, True])
def test_a_least_number_that_cannot_be(cpu, least):
    with pytest.raises(RequestError, match="min_tokens"):
        Engine(cpu).submit(Request(1, (1,), 4, min_tokens=least))  # type: ignore[arg-type]
