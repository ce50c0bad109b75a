"""No tenant holds more slots than its part, however it asks."""

from random import Random

import pytest

from harness.simulation.adversaries import LABELS
from harness.simulation.invariants import Violation
from harness.simulation.shares import Cheat, compete, max_slots_held
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import WaitQueue

WAYS = {
    "labels in turn": Cheat(labels=LABELS),
    "labels for long": Cheat(labels=LABELS, period=7, cancels=0.05),
    "short requests": Cheat(prompt=1, tokens=1), "long prompts": Cheat(prompt=100, tokens=1),
    "several answers each": Cheat(prompt=40, tokens=1, copies=8),
    "cached prompts": Cheat(prompt=100, shared=99, tokens=6), "cancels": Cheat(cancels=0.5),
    "right drafts": Cheat(guessed=True),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("weights", "slots"), [((1, 1), 2), ((1, 1), 1), ((1, 1, 1, 1), 7)])
def test_no_way_of_asking_wins_slots(way, weights, slots):
    compete(Random(1), weights, slots, cheat=0, how=WAYS[way], tokens=30)


@pytest.mark.parametrize(
    ("weights", "slots", "most"),
    [((1, 1), 2, 1), ((1, 1), 1, 1), ((1, 1), 3, 2), ((3, 1), 8, 6), ((1, 2, 1), 8, 2)],
)
def test_a_whole_part_is_the_most_a_tenant_holds(weights, slots, most):
    assert max_slots_held(weights, slots, 0) == most


def test_where_every_label_ages_alone_labels_win(monkeypatch):
    """Negative control: the lines of one tenant take turns as if they were tenants."""

    def by_line(self: WaitQueue, tenant: int, group: object) -> float | None:
        ages = [
            self._line_aged_since(tenant, asked, line)
            for asked, line in group.lines.items()  # type: ignore[attr-defined]
        ]
        return min((age for age in ages if age is not None), default=None)

    monkeypatch.setattr(WaitQueue, "_tenant_aged_since", by_line)
    with pytest.raises(Violation, match="SHARES"):
        compete(Random(1), (1, 1), 2, cheat=0, how=WAYS["labels in turn"], tokens=30)


def test_where_tokens_are_counted_long_prompts_win(monkeypatch):
    """Negative control: a slot that is left over goes to who got the fewest tokens recently."""
    monkeypatch.setattr(
        Tenants,
        "_mean_slots",
        lambda self, account: account.decoded.per_second(self._clock()) / 1000,
    )
    with pytest.raises(Violation, match="SHARES"):
        compete(Random(1), (1, 1), 1, cheat=0, how=WAYS["long prompts"], tokens=30)
