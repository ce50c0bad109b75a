"""Where a request is sent, what is left of it when its replica dies, and facts of many as one."""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.arithmetic import PAGE_TOKENS
from contract.errors import QueueFull, RequestError, TenantQueueFull, ZincError
from contract.types import LOCAL_TENANT, Request, SamplingParams
from harness.host.remote.work import Work
from harness.host.submissions import EngineStopped
from harness.serve.replicas.affinity import SLACK, PrefixAffinity
from harness.serve.replicas.sums import summed
from harness.serve.replicas.work import Refusal
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from reference.sched.tenants import Usage
from tests.named_tiers import quick_tier

NAMES = ("a", "b", "c")
PROMPT = tuple(range(5 * PAGE_TOKENS))
TOKENS = 24


def test_a_conversation_stays_where_it_began():
    """Though others are idle, and of two that know it who knows more."""
    affinity = PrefixAffinity()
    first = affinity.rank(1, PROMPT, NAMES)[0]
    affinity.sent(1, PROMPT[: 2 * PAGE_TOKENS], first)
    assert affinity.rank(1, PROMPT, NAMES)[0] == first
    other = next(name for name in NAMES if name != first)
    affinity.sent(1, PROMPT[: 3 * PAGE_TOKENS], other)
    assert affinity.rank(1, PROMPT, NAMES)[:2] == [other, first]


def test_what_another_tenant_has_there_is_no_reason():
    affinity = PrefixAffinity()
    first = affinity.rank(2, PROMPT, NAMES)[0]
    other = next(name for name in NAMES if name != first)
    affinity.sent(1, PROMPT, other)
    affinity.ended(other)
    assert affinity.rank(2, PROMPT, NAMES)[0] == first


def test_a_busy_replica_is_passed_by():
    affinity = PrefixAffinity()
    for _ in range(SLACK + 1):
        affinity.sent(1, PROMPT, "a")
    assert affinity.rank(1, PROMPT, NAMES)[-1] == "a"
    affinity.ended("a")
    assert affinity.rank(1, PROMPT, NAMES)[0] == "a"


def test_what_is_remembered_is_bounded():
    affinity = PrefixAffinity(max_pages=4)
    affinity.sent(1, PROMPT, "a")
    assert len(affinity._replicas_of) == 4


def test_replicas_that_are_gone_are_forgotten():
    """Others still have the pages that they had, too."""
    affinity = PrefixAffinity()
    affinity.sent(1, PROMPT, "a")
    affinity.sent(1, PROMPT[: 2 * PAGE_TOKENS], "b")
    affinity.keep(["b"])
    affinity.ended("a")
    assert dict(affinity._load) == {"b": 1}
    assert list(affinity._replicas_of.values()) == [{"b"}] * 2
    assert affinity.rank(1, PROMPT, NAMES)[0] == "b"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(NAMES)), max_size=40))
def test_all_replicas_are_ranked_once(sent):
    affinity = PrefixAffinity()
    for scope, name in sent:
        affinity.sent(scope, PROMPT[scope:], name)
    assert sorted(affinity.rank(0, PROMPT, NAMES)) == sorted(NAMES)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(temperature=0.9, seed=3, repeat_penalty=1.3, repeat_last_n=16),
    ],
)
def test_what_is_left_of_a_request_continues_it(tiny_model_path, sampling):
    """Cut after any number of its tokens: the rest on another engine is the rest."""
    limits = Limits(
        slots=8, context=96, pages=48, step_tokens=64, step_rows=8, top_log_probabilities=1
    )
    model = open_model(tiny_model_path)
    request = Request(
        1, tuple(range(40, 60)), TOKENS, sampling, ignore_end=True, log_probabilities=0
    )
    with model.file, quick_tier() as tier, ModelRunner(model, tier, limits) as runner:

        def events(asked: Sequence[Request]) -> list[list[tuple[int, int, float | None]]]:
            engine = Engine(runner)
            told: dict[int, list[tuple[int, int, float | None]]] = {one.id: [] for one in asked}
            for one in asked:
                engine.submit(one)
            for e in engine.run():
                told[e.request_id].append((e.token, e.position, e.log_probability))
            return list(told.values())

        (whole,) = events([request])
        assert len(whole) == TOKENS
        tokens = tuple(token for token, _, _ in whole)
        cuts = range(TOKENS)
        rests = [replace(Work(request, tokens[:cut]).left, id=cut) for cut in cuts]
        assert events(rests) == [whole[cut:] for cut in cuts]


def test_refusals_arrive_as_they_were():
    errors: list[ZincError] = [
        RequestError("n", "is odd"),
        QueueFull(3, 2.0),
        EngineStopped("gone"),
    ]
    errors += [TenantQueueFull(3, 2.0, rate) for rate in (False, True)]
    for error in errors:
        refusal = pickle.loads(pickle.dumps(Refusal(error, "first")))
        again = refusal.error
        assert type(again) is type(error)
        assert (str(again), vars(again)) == (str(error), vars(error))
        assert refusal.replica == "first"


@dataclass(frozen=True)
class Facts:
    """As engines tell them."""

    steps: int
    name: str
    finished: dict[str, int]
    hit_rate: float = 0.5
    p50_ttft_ms: float | None = None


def test_facts_of_many_are_added():
    """But for shares and percentiles, which one that did nothing does not have."""
    one = Facts(2, "x", {"stop": 1})
    two = Facts(3, "y", {"stop": 1, "length": 4}, 0.75, 8.0)
    assert summed([one, two]) == Facts(5, "x", {"stop": 2, "length": 4}, 0.75, 8.0)
    assert summed([two, one]) == Facts(5, "y", {"stop": 2, "length": 4}, 0.75, 8.0)
    assert summed([one, one]).p50_ttft_ms is None
    assert summed([3, None, 4]) == 7
    assert summed([Counter(a=1), Counter(a=2)]) == Counter(a=3)
    assert summed([None, None]) is None
    assert summed([Usage(1, 2, 3, 0.5, 1.5)] * 2) == Usage(2, 4, 6, 1.0, 3.0)
    assert summed([[(LOCAL_TENANT, one)], [(LOCAL_TENANT, two)]]) == [
        (LOCAL_TENANT, Facts(5, "x", {"stop": 2, "length": 4}, 0.75, 8.0))
    ]
    assert summed([one]) is one
