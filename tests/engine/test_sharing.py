"""What requests take from each other, prefixes, pages in host memory, slots, changes no bit."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contract.errors import QueueFull, RequestError, TenantQueueFull
from contract.types import LOCAL_TENANT, FinishReason, QosClass, Request, SamplingParams, TokenEvent
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.runner import ModelRunner
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import may_wait
from tests.engine.small_engine import ALL_TIERS as TIERS
from tests.families_table import HYBRIDS
from tests.named_tiers import runner_on
from tests.sched.manual_clock import ManualClock

LIMITS = Limits(slots=3, context=112, pages=12, step_tokens=32, step_rows=32, saved_states=6)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"architecture": "qwen3", "quant": "q4_k_m"}, "qwen35": dict(HYBRIDS["qwen35"]),
    "lfm2": dict(HYBRIDS["lfm2"]), "granitehybrid": dict(HYBRIDS["granitehybrid"]),
    "kimi-linear": dict(HYBRIDS["kimi-linear-experts"]),
}  # fmt: skip
RUNS = [
    *(("qwen3", tier) for tier in TIERS if tier != "vulkan"),
    pytest.param(("qwen35", "quick"), marks=pytest.mark.soak), ("qwen35", "late"),
    ("lfm2", "native"), ("granitehybrid", "native"), ("kimi-linear", "native"),
]  # fmt: skip
"""Late is the CPU, later. Schedules on every tier, Vulkan too, are in tests/invariance."""
SEEDED = SamplingParams(temperature=0.8, seed=11)


@pytest.fixture(scope="module", params=RUNS, ids=" on ".join)
def runner(request, synthetic_model) -> Iterator[ModelRunner]:
    name, tier_name = request.param
    with runner_on(synthetic_model(**MODELS[name]), TIERS[tier_name], LIMITS) as runner:
        yield runner


on_late = pytest.mark.parametrize("runner", [("qwen3", "late")], indirect=True, scope="module")
"""What no tier has a part in."""


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


def tokens_of(engine: Engine, request: Request) -> list[int]:
    engine.submit(request)
    return [event.token for event in engine.run() if event.request_id == request.id]


def alone(runner: ModelRunner, request: Request) -> list[int]:
    return tokens_of(Engine(runner, EngineOptions(prefix_cache=False, steps_ahead=0)), request)


@pytest.mark.parametrize("copy_pages", [False, True])
def test_turns_of_a_conversation_begin_where_the_last_ended(runner, copy_pages):
    engine = Engine(runner, EngineOptions(copy_pages=copy_pages))
    conversation = prompt(1, 20)
    turns = []
    for turn in range(4):
        request = Request(turn, conversation, 9, SEEDED)
        turns.append((request, tokens_of(engine, request)))
        conversation = (*conversation, *turns[-1][1], *prompt(turn + 5, 7))
    reused = engine.statistics.prefix.tokens_hit
    # One engine at a time: another one's pages are the same memory.
    for request, tokens in turns:
        assert tokens == alone(runner, request)
    assert reused >= 16 * (1 + 2 + 3) - 16 * (runner.recurrent.slot_bytes > 0)


def test_a_long_answer_is_found_up_to_its_last_whole_page(runner):
    """However long a sequence decodes on undisturbed, recurrent states are kept at its pages."""
    engine = Engine(runner)
    first = Request(1, prompt(2, 20), 52, SEEDED, ignore_end=True)
    conversation = (*first.prompt, *tokens_of(engine, first), *prompt(3, 9))
    following = Request(2, conversation, 4, SEEDED)
    tokens = tokens_of(engine, following)
    assert engine.statistics.prefix.tokens_hit == 64
    assert tokens == alone(runner, following)


def test_a_prompt_asked_again_is_found_behind_a_long_answer(runner):
    """Recurrent states of the answer take no place from that of the prompt while there are more."""
    engine = Engine(runner)
    asked = Request(1, prompt(2, 20), 52, SEEDED, ignore_end=True)
    tokens = tokens_of(engine, asked)
    again = replace(asked, id=2)
    assert tokens_of(engine, again) == tokens
    assert engine.statistics.prefix.tokens_hit >= 16


def test_a_state_of_tokens_that_nobody_got_spoils_none_before_it(runner):
    """A step ahead of the last token an answer has may be the one that fills a page."""
    last = 63
    for length in range(17, 40):
        first = Request(1, prompt(2, length), 64, SEEDED)
        tokens = alone(runner, replace(first, ignore_end=True))[: last - length + 1]
        if tokens[-1] not in tokens[:-1]:
            break
    engine = Engine(runner, EngineOptions(end_of_generation=frozenset(tokens[-1:]), steps_ahead=1))
    assert tokens_of(engine, first) == tokens
    tokens_of(engine, Request(2, (*first.prompt, *tokens[:-1], *prompt(3, 9)), 1))
    assert engine.statistics.prefix.tokens_hit == 48


def test_a_prefix_that_ends_within_a_page_is_copied(runner):
    """The whole prompt is known but its last token: one token is computed, in a page of its own."""
    if runner.recurrent.slot_bytes:
        return
    first = Request(1, prompt(3, 48), 4)
    expected = alone(runner, first)
    engine = Engine(runner, EngineOptions(copy_pages=True))
    assert tokens_of(engine, first) == tokens_of(engine, replace(first, id=2)) == expected
    assert engine.statistics.prefix.copied == 1
    assert engine.statistics.prefix.tokens_hit == 47


def test_evicted_pages_come_back_from_host_memory(runner):
    requests = [Request(number, prompt(number % 4, 70), 6, SEEDED) for number in range(8)]
    expected = [alone(runner, request) for request in requests]
    engine = Engine(runner, EngineOptions(host_pages=12))
    assert [tokens_of(engine, request) for request in requests] == expected
    assert engine.statistics.prefix.spilled > 0
    assert engine.statistics.prefix.restored > 0
    engine.memory.check([])


def test_tenants_share_prefixes_only_within_their_group(runner):
    """The same prompt by three: the one of the same group begins from it, the other does not."""
    group = [replace(LOCAL_TENANT, id=n, name=f"t{n}", isolation_group=7) for n in (1, 2)]
    tenants = Tenants((*group, replace(LOCAL_TENANT, id=3, name="t3")), clock=lambda: 0.0)
    expected = alone(runner, Request(1, prompt(8, 50), 5))
    engine = Engine(runner, tenants=tenants)
    hits = []
    for tenant in (1, 2, 3):
        assert tokens_of(engine, Request(tenant, prompt(8, 50), 5, tenant=tenant)) == expected
        hits.append(engine.statistics.prefix.tokens_hit)
    assert 0 == hits[0] < hits[1] == hits[2]


def test_an_interactive_request_takes_the_slot_of_batch_work(runner):
    """And gives it back: what was preempted ends as if nothing had been."""
    tenants = Tenants(
        (
            replace(LOCAL_TENANT, id=1, name="chat", qos=QosClass.INTERACTIVE),
            replace(LOCAL_TENANT, id=2, name="jobs", qos=QosClass.BATCH),
        ),
        clock=lambda: 0.0,
    )
    engine = Engine(runner, tenants=tenants)
    jobs = [Request(n, prompt(n, 10 + n), 18, SEEDED, tenant=2) for n in range(3)]
    chat = Request(9, prompt(9, 12), 3, tenant=1)
    tokens: dict[int, list[int]] = {request.id: [] for request in (*jobs, chat)}
    order = []
    for request in jobs:
        engine.submit(request)
    for step in range(200):
        if step == 5:
            engine.submit(chat)
        for event in engine.step():
            tokens[event.request_id].append(event.token)
            if event.finish_reason is not None:
                order.append(event.request_id)
    assert engine.idle
    assert engine.statistics.preempted == 1
    assert order[0] == 9
    assert engine.usage.of(2).slots_preempted == 1
    for request in (*jobs, chat):
        assert tokens[request.id] == alone(runner, replace(request, tenant=0))


@on_late
def test_who_takes_no_tokens_ends_and_holds_up_nobody(runner):
    engine = Engine(runner, EngineOptions(stall_steps=5))
    slow, other = (Request(n, prompt(n, 9), 40) for n in (1, 2))
    engine.submit(slow)
    engine.submit(other)
    seen: dict[int, list[int]] = {1: [], 2: []}
    reasons = {}
    for step in range(200):
        if step == 4:
            engine.stall(1)
        for event in engine.step():
            seen[event.request_id].append(event.token)
            if event.finish_reason is not None:
                reasons[event.request_id] = event.finish_reason
    assert reasons == {1: FinishReason.CLIENT_TOO_SLOW, 2: FinishReason.LENGTH}
    assert seen[2] == alone(runner, other)
    given = seen[1][:-1]
    assert given == alone(runner, slow)[: len(given)]
    assert len(given) < 12
    engine.memory.check([])


@on_late
@pytest.mark.parametrize("clients", [0, 1, 2])
def test_only_clients_are_waited_for_no_longer(runner, clients):
    """Who waits for something else goes on when it is there, and has the same tokens; unless a
    client took none either, before or after."""
    engine = Engine(runner, EngineOptions(stall_steps=5))
    patient, other = (Request(n, prompt(n, 9), 40) for n in (1, 2))
    engine.submit(patient)
    engine.submit(other)
    events: list[TokenEvent] = []
    for step in range(200):
        if step == 4:
            for number in range(2):
                engine.stall(1, patient=not clients or number != clients - 1)
        if step == 20:
            engine.unstall(1)
        events += engine.step()
    given = [event.token for event in events if event.request_id == 1]
    if clients:
        assert given.pop() == -1
        assert len(given) < 12
    assert given == alone(runner, patient)[: len(given)]
    assert clients or len(given) == 40


@on_late
def test_requests_that_run_take_no_place_of_the_line(runner):
    """As many of a tenant may wait as if none of its ran: with another tenant, half of the line."""
    both = [LOCAL_TENANT, replace(LOCAL_TENANT, id=1, name="other")]
    tenants = Tenants(both, clock=ManualClock())
    engine = Engine(runner, EngineOptions(queue_depth=4), tenants=tenants)
    for number in range(LIMITS.slots):
        engine.submit(Request(number, prompt(1, 5), 40, ignore_end=True))
        while engine.statistics.running <= number:
            engine.step()
    for number in range(10, 12):
        engine.submit(Request(number, prompt(1, 5), 3))
    with pytest.raises(TenantQueueFull) as refused:
        engine.submit(Request(12, prompt(1, 5), 3))
    assert (refused.value.depth, refused.value.rate) == (2, False)
    engine.submit(Request(13, prompt(1, 5), 3, tenant=1))


@on_late
def test_a_tenant_has_a_line_of_its_own_length(runner):
    """Alone too, and before it is asked whether there is a place for anybody."""
    tenants = Tenants([replace(LOCAL_TENANT, max_waiting=2)], clock=ManualClock())
    engine = Engine(runner, EngineOptions(queue_depth=2), tenants=tenants)
    for number in range(2):
        engine.submit(Request(number, prompt(1, 5), 3))
    with pytest.raises(TenantQueueFull) as refused:
        engine.submit(Request(7, prompt(1, 5), 3))
    assert (refused.value.depth, refused.value.rate) == (2, False)
    assert engine.usage.of(0).requests_rejected == 1
    events = engine.step()
    engine.submit(Request(8, prompt(1, 5), 3))
    assert len([*events, *engine.run()]) == 9


@on_late
@pytest.mark.parametrize("tenants", [1, 3])
def test_a_place_is_given_as_if_all_that_wait_were_counted(runner, tenants):
    """And none are counted while a tenant that had them all might have one more: each request of
    a long line would take as long as the line is."""
    depth, most, draw = 40, 17 if tenants > 1 else 40, random.Random(7)
    named = [replace(LOCAL_TENANT, id=n, name=f"t{n}", max_waiting=most) for n in range(tenants)]
    engine = Engine(
        runner, EngineOptions(queue_depth=depth), tenants=Tenants(named, clock=ManualClock())
    )
    counted: list[int] = []

    class Line(dict[int, Any]):
        def values(self) -> Any:
            counted.append(len(self))
            return super().values()

    engine._scheduler.waiting = Line()
    own = [0] * tenants
    for number in range(90):
        tenant, waiting = draw.randrange(tenants), sum(own)
        taken = own[tenant] < most and may_wait(own[tenant], waiting, depth, tenants)
        try:
            engine.submit(Request(number, prompt(1, 5), 3, tenant=tenant))
        except QueueFull:
            assert not taken
        else:
            assert taken
            own[tenant] += 1
    assert min(counted) >= (depth if tenants == 1 else min(most, depth // 2))


@on_late
def test_who_waits_for_a_rate_is_told_when_it_is_below(runner):
    """Nine tokens at once, where one a second may be: they are forgotten after five seconds."""
    clock = ManualClock()
    slow = replace(LOCAL_TENANT, decode_tokens_per_s=1, max_waiting=1)
    engine = Engine(runner, tenants=Tenants([slow], clock=clock), clock=clock)
    engine.submit(Request(1, prompt(1, 5), 9, ignore_end=True))
    assert len(list(engine.run())) == 9
    engine.submit(Request(2, prompt(1, 5), 3))
    clock.now += 2
    assert engine.step() == []
    with pytest.raises(TenantQueueFull) as refused:
        engine.submit(Request(3, prompt(1, 5), 3))
    assert refused.value.rate
    clock.now += refused.value.retry_after - 0.01
    assert engine.step() == []
    clock.now += 1
    assert len(list(engine.run())) == 3


def test_a_fault_ends_nobody_and_a_second_one_ends_with_an_error(runner, monkeypatch):
    """A tier that fails once is survived bit for bit; one that goes on failing is not retried for
    ever."""
    requests = [Request(n, prompt(n, 12), 8, SEEDED) for n in range(4)]
    expected = {request.id: alone(runner, request) for request in requests}
    for failures in (1, 99):
        engine = Engine(runner)
        for request in requests:
            engine.submit(request)
        tokens: dict[int, list[int]] = {request.id: [] for request in requests}
        collect, calls = runner.collect, iter(range(1000))

        def failing(submission: Any, collect: Any = collect, calls: Any = calls) -> Any:
            if 3 <= next(calls) < 3 + failures:  # noqa: B023
                raise OSError("the device fell off")
            return collect(submission)

        reasons = {}
        with monkeypatch.context() as patch:
            patch.setattr(runner, "collect", failing)
            while not engine.idle:
                try:
                    events = engine.step()
                except OSError:
                    continue
                for event in events:
                    tokens[event.request_id].append(event.token)
                    reasons[event.request_id] = event.finish_reason
        engine.memory.check([])
        if failures == 1:
            assert tokens == expected
        else:
            assert set(reasons.values()) == {FinishReason.ERROR}
            assert all(tokens[n][:-1] == expected[n][: len(tokens[n]) - 1] for n in tokens)


@on_late
def test_quotas_hold_a_tenant_back(runner):
    """One slot and three pages: its second request waits though two slots are free."""
    clock = ManualClock()
    small = replace(LOCAL_TENANT, id=4, name="small", max_slots=1, max_kv_pages=3)
    engine = Engine(runner, tenants=Tenants((small,), clock=clock), clock=clock)
    with pytest.raises(RequestError, match="KV pages"):
        engine.submit(Request(1, prompt(1, 30), 30, tenant=4))
    for number in (2, 3):
        engine.submit(Request(number, prompt(1, 10), 9, tenant=4))
    engine.step()
    assert engine.statistics.running == 1
    assert engine.statistics.waiting == 1
    assert len(list(engine.run())) >= 17
