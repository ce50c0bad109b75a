"""The simulated runner notices each misuse of a device when it happens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from contract.errors import DeviceLost
from contract.records import LAST_TOKEN, LOGIT_BIAS, QUERY_TOKEN
from contract.types import Request, SamplingParams
from harness.simulation.clock import VirtualClock
from harness.simulation.history import solo_run
from harness.simulation.invariants import Violation
from harness.simulation.runner import SimulatedRunner, StepSeconds
from reference.engine.constraining import log_probabilities_of
from reference.limits import Limits
from reference.runner import LOG_PROBABILITIES, StepInput
from reference.sched.slots import sampling_record

PROMPT = tuple(range(100, 120))
PAGES = (3, 1)
SAMPLING = SamplingParams(repeat_penalty=1.5, repeat_last_n=5, seed=77)
SOLO = solo_run(Request(0, PROMPT, 8, SAMPLING, ignore_end=True), 64)


def runner_of(*, recurrent: bool = False, model: int = 0) -> SimulatedRunner:
    limits = Limits(
        2, 64, 6, step_tokens=40, recent_tokens=8, saved_states=1, biases=2, top_log_probabilities=2
    )
    runner = SimulatedRunner(limits, VirtualClock(), recurrent=recurrent, model=model)
    runner.slot_scopes = [0, 0]
    return runner


def step_of(
    tokens: Sequence[int], start: int, *, slot: int = 0, pages: Sequence[int] = PAGES,
    rows: Sequence[int] | None = None,
) -> StepInput:  # fmt: skip
    """Tokens from position ``start`` on; a row of the last, unless ``rows`` says which."""
    query = np.zeros(len(tokens), QUERY_TOKEN)
    query["token"], query["slot"] = tokens, slot
    query["position"] = np.arange(start, start + len(tokens))
    output_rows = np.array([len(tokens) - 1] if rows is None else rows, np.int32)
    sampling = [sampling_record(SAMPLING, slot, start + row + 1) for row in output_rows.tolist()]
    table = np.zeros((2, 4), np.int32)
    table[slot, : len(pages)] = pages
    return StepInput(query, output_rows, np.array(sampling), table)


def run(runner: SimulatedRunner, step: StepInput) -> list[int]:
    tokens: list[int] = runner.collect(runner.submit(step)).token.tolist()
    return tokens


@pytest.mark.parametrize("cut", [1, 7, 16, 19])
def test_tokens_are_those_of_the_closed_form(cut):
    """Prompt in two chunks, then tokens that only the device knows, submitted ahead."""
    runner = runner_of(recurrent=True)
    late = [runner.submit(step_of(PROMPT[:cut], 0)), runner.submit(step_of(PROMPT[cut:], cut))]
    runner.collect(late[0])
    tokens = runner.collect(late[1]).token.tolist()
    ahead = [runner.submit(step_of([LAST_TOKEN], 20 + number)) for number in range(3)]
    tokens += [token for step in ahead for token in runner.collect(step).token.tolist()]
    assert tokens == [event.token for event in SOLO.events[:4]]


def test_biases_and_the_model_have_a_part_in_every_token():
    """Those of the row's own records, found where the record of the row says."""
    biases = np.array([(7, 1.5), (9, -0.5), (7, 1.5), (9, 0.5)], LOGIT_BIAS)
    found = set()
    for model in (0, 1):
        for first, count in ((0, 0), (0, 2), (2, 2), (2, 1)):
            step = step_of(PROMPT, 0)
            step.sampling["bias_first"], step.sampling["bias_count"] = first, count
            (token,) = run(runner_of(model=model), replace(step, bias=biases))
            pairs = tuple(biases[first : first + count].tolist())
            request = Request(0, PROMPT, 8, SAMPLING, ignore_end=True, logit_bias=pairs)
            assert token == solo_run(request, 64, model=model).events[0].token
            found.add(token)
    assert len(found) == 8
    step = step_of(PROMPT, 0)
    step.sampling["bias_count"] = 1
    with pytest.raises(Violation, match="biases that a step lacks"):
        run(runner_of(), step)


def test_log_probabilities_are_those_of_the_closed_form():
    request = Request(0, PROMPT, 8, SAMPLING, ignore_end=True, log_probabilities=2)
    runner = runner_of()
    step = replace(step_of(PROMPT, 0), requested=LOG_PROBABILITIES)
    output = runner.collect(runner.submit(step))
    listed = log_probabilities_of(request, output, 0)
    (event, *_) = solo_run(request, 64).events
    assert listed == (event.log_probability, event.top)
    assert len(set(event.top)) == 2


def test_stale_recent_tokens_give_other_tokens():
    """A slot that takes over pages without computing what the penalties look at."""
    runner = runner_of()
    run(runner, step_of(PROMPT[:-1], 0))
    (token,) = run(runner, step_of(PROMPT[-1:], 19, slot=1))
    assert token != SOLO.events[0].token


def test_a_last_token_belongs_to_one_position():
    runner = runner_of()
    run(runner, step_of(PROMPT, 0))
    run(runner, step_of([5], 20, rows=[]))
    with pytest.raises(Violation, match="last token for position 20, not 21"):
        run(runner, step_of([LAST_TOKEN], 21))


def test_copies_saves_and_loads_take_their_turn():
    """Queued behind the steps that write the page and before those that overwrite it."""
    runner = runner_of()
    copies = runner.page_copies()
    runner.submit(step_of(PROMPT, 0))
    saved = copies.save(1)
    copies.copy(3, 5)
    runner.submit(step_of(PROMPT[::-1], 0))
    copies.load(saved, 4)
    (token,) = run(runner, step_of([SOLO.events[0].token], 20, slot=1, pages=(5, 4)))
    assert runner.memory.pages[5].after == list(SOLO.histories[1:17])
    assert runner.memory.pages[4].after == list(SOLO.histories[17:22])
    assert token >= 0


@pytest.mark.parametrize("where", ["submit", "collect"])
def test_a_fault_loses_everything(where):
    runner = runner_of()
    run(runner, step_of(PROMPT, 0))
    runner.fail_next(where)
    with pytest.raises(DeviceLost):
        run(runner, step_of([LAST_TOKEN], 20))
    with pytest.raises(Violation, match="HISTORY"):
        run(runner, step_of([5], 20))


def test_a_step_is_read_before_its_events_are_overwritten():
    runner = runner_of()
    first = runner.submit(step_of(PROMPT, 0))
    for number in range(4):
        runner.submit(step_of([LAST_TOKEN], 20 + number))
    with pytest.raises(Violation, match="overwritten"):
        runner.collect(first)


def test_time_passes_as_steps_cost():
    """Steps queue up on the device; the host waits for the one it reads."""
    clock = VirtualClock()
    seconds = StepSeconds(fixed=1.0, token=0.5, attended=0.0, host=0.25)
    runner = SimulatedRunner(Limits(1, 64, 4), clock, seconds=seconds)
    runner.slot_scopes = [0]
    table = np.arange(4, dtype=np.int32)[None]
    steps = [step_of(PROMPT[:2], 0), step_of(PROMPT[2:4], 2)]
    late = [runner.submit(StepInput(s.query, s.output_rows, s.sampling, table)) for s in steps]
    assert clock() == 0.5
    runner.collect(late[0])
    assert clock() == 2.25
    runner.collect(late[1])
    assert clock() == 4.25
    clock.advance_to(1.0)
    assert clock() == 4.25
