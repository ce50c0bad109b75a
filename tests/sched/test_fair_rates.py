"""Tokens a second, simulated: equal tenants get the same in any 5 s, others by their weights.

Every tenant always has requests waiting, and every step decodes one token in each running request.
Lengths differ between tenants, so that taking turns by request would not be fair."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.types import Tenant
from reference.sched.rates import WINDOW_SECONDS
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import WaitingRequest, WaitQueue
from tests.sched.manual_clock import ManualClock

SLOTS = 16
STEP_SECONDS = 0.025
WINDOW_STEPS = round(WINDOW_SECONDS / STEP_SECONDS)
SECONDS = 40
UNLIMITED = 10**6

Lengths = Sequence[tuple[int, int]]
"""For each tenant the least and the most tokens of an answer."""

ALIKE: Lengths = [(5, 40)] * 16
UNLIKE: Lengths = [(5 + 40 * id, 15 + 60 * id) for id in range(16)]
"""The first tenant's answers take a quarter of a second, the sixteenth's more than ten."""


@dataclass(slots=True)
class RunningRequest:
    tenant: int
    pages: int
    left: int


def decoded(
    weights: Sequence[float], lengths: Lengths, *, rule: type[Tenants] = Tenants, seed: int = 0
) -> NDArray[np.int64]:
    """int64[steps, tenants]: tokens of each step, after one window of warming up."""
    clock, random_ = ManualClock(), random.Random(seed)
    tenants = rule(
        [
            Tenant(id, f"tenant {id}", weight, max_slots=SLOTS, decode_tokens_per_s=UNLIMITED)
            for id, weight in enumerate(weights)
        ],
        clock=clock,
    )
    queue = WaitQueue(tenants, clock=clock)
    running: list[RunningRequest] = []
    for id in range(len(weights)):
        tenants.occupy(id, live=1)
        queue.push(WaitingRequest(id, id, clock.now, random_.randint(1, 8)))
    arrivals = len(weights)
    rows = []
    for step in range(round(SECONDS / STEP_SECONDS)):
        clock.now = step * STEP_SECONDS
        while len(running) < SLOTS and (taken := queue.next(lambda w: True)) is not None:
            tenants.occupy(taken.tenant, slots=1, pages=taken.pages)
            length = random_.randint(*lengths[taken.tenant])
            running.append(RunningRequest(taken.tenant, taken.pages, length))
            queue.push(WaitingRequest(arrivals, taken.tenant, clock.now, random_.randint(1, 8)))
            arrivals += 1
        rows.append(np.bincount([entry.tenant for entry in running], minlength=len(weights)))
        for id, tokens in enumerate(rows[-1].tolist()):
            tenants.count(id, prefilled=0, decoded=tokens)
        for entry in running:
            entry.left -= 1
            if not entry.left:
                tenants.occupy(entry.tenant, slots=-1, pages=-entry.pages)
        running = [entry for entry in running if entry.left]
    return np.array(rows[WINDOW_STEPS:], np.int64)


def windows(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[windows, tenants]: sums over every 5 s there is."""
    sums = np.concatenate([np.zeros((1, tokens.shape[1]), np.int64), np.cumsum(tokens, axis=0)])
    return sums[WINDOW_STEPS:] - sums[:-WINDOW_STEPS]


def jain(tokens: NDArray[np.int64]) -> float:
    """The least of Jain's index over all windows: 1 when all tenants get the same, 1/n when one
    gets all."""
    sums = windows(tokens).astype(float)
    return float((sums.sum(1) ** 2 / (sums.shape[1] * (sums**2).sum(1))).min())


def worst_share(sums: NDArray[np.int64], weights: Sequence[float]) -> float:
    """How far, at most, a tenant's part of all tokens is from its weight's part of all weights."""
    shares = sums / sums.sum(-1, keepdims=True)
    return float(np.abs(shares - np.array(weights) / sum(weights)).max())


@pytest.mark.parametrize("tenants", [2, 4, 8, 16])
@pytest.mark.parametrize("lengths", [ALIKE, UNLIKE], ids=["alike", "unlike"])
def test_equal_tenants_get_the_same_in_any_window(tenants, lengths):
    """Where the slots can be divided evenly, answers of any length."""
    assert jain(decoded([1.0] * tenants, lengths)) >= 0.98


@pytest.mark.parametrize("tenants", [3, 5, 6, 7])
@pytest.mark.parametrize("seed", range(3))
def test_slots_left_over_go_round(tenants, seed):
    """Where they cannot, answers short beside a window."""
    assert jain(decoded([1.0] * tenants, ALIKE, seed=seed)) >= 0.98


@pytest.mark.parametrize("tenants", [3, 4])
def test_with_four_slots_a_tenant_the_left_over_ones_do_not_matter(tenants):
    """Even if they never go round: with at least 3.5 slots a tenant, one more or less keeps the
    index above 0.98."""
    assert jain(decoded([1.0] * tenants, UNLIKE)) >= 0.98
    for slots in range(7, 200):
        for sharing in range(2, int(slots / 3.5) + 1):
            least, more = divmod(slots, sharing)
            squares = more * (least + 1) ** 2 + (sharing - more) * least**2
            assert slots**2 / (sharing * squares) >= 0.98


@pytest.mark.parametrize("weights", [(1, 3), (1, 2, 5), (1, 1, 2, 4), (8, 4, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("lengths", [ALIKE, UNLIKE], ids=["alike", "unlike"])
def test_shares_follow_weights_in_any_window(weights, lengths):
    """Where the weights divide the slots: within 2 % in every window."""
    assert worst_share(windows(decoded(weights, lengths)), weights) <= 0.02


@pytest.mark.parametrize("weights", [(1, 2), (1, 2, 3), (3, 1, 1), (5, 3, 2, 1)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_shares_follow_weights_in_the_long_run(weights, seed):
    """Where they do not: within 2 % over the whole run."""
    tokens = decoded(weights, ALIKE, seed=seed)
    assert worst_share(tokens.sum(0), weights) <= 0.02


class FirstCome(Tenants):
    """No shares: requests are admitted as they come."""

    def dominant_share(self, id: int) -> float:
        return 0.0

    def recent_slots(self, id: int) -> float:
        return 0.0


def test_first_come_first_served_is_not_fair():
    """Negative control: taking turns by request fails every measure above."""
    assert jain(decoded([1.0] * 4, UNLIKE, rule=FirstCome)) < 0.9
    tokens = decoded((1, 2, 5), ALIKE, rule=FirstCome)
    assert worst_share(windows(tokens), (1, 2, 5)) > 0.1
    assert worst_share(tokens.sum(0), (1, 2, 5)) > 0.1


def test_the_simulation_is_deterministic():
    first, again = (decoded((1, 2, 4), UNLIKE, seed=7) for _ in range(2))
    assert (first == again).all()
    assert (first != decoded((1, 2, 4), UNLIKE, seed=8)).any()
