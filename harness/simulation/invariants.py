"""The invariants of every schedule. A check that finds one broken raises ``Violation``."""

from collections.abc import Callable
from enum import Enum


class Invariant(Enum):
    """The value says what must be true. The first twelve are checked with every step."""

    SLOT_OWNER = "a slot belongs to at most one request"
    PAGE_REFERENCES = "a page's reference count is the number of its referrers"
    PAGE_SUM = "free, cached and held pages are all pages, each counted once"
    PAGE_ISOLATION = "no page is read outside the tenant or isolation group that wrote it"
    EVERY_DECODE = "every sequence that can decode is in every step"
    STEP_CAP = "a step has at most the tokens and rows it may have"
    QUOTA = "no admission exceeds a quota"
    ADMISSION_ORDER = "by class, dominant share, fewest recent slots, then as they came"
    INTERACTIVE_STAYS = "an interactive request is never preempted while others could be"
    BACKPRESSURE = "nothing is computed for a consumer that takes no tokens"
    TOKENS = "tokens come once, in order, those of the solo run, and none after cancel or end"
    USAGE = "the usage's sums are the events that clients saw"
    SAME_SEED_SAME_LOG = "the same seed gives the same log of events"
    HISTORY = "every position read holds exactly the tokens of its sequence"
    LIVENESS = "after the last disturbance every admitted request ends within a computed bound"
    MODEL_TURNS = "models get the device in proportion to the weights of those who use them"
    MODEL_ROOM = "the idle model unused for longest makes room, and none in use ever does"
    ONLY_DOCUMENTED_ERRORS = "an engine refuses what it cannot serve, and raises nothing else"
    NEVER_IDLE = "an engine with room for a request that waits does not rest"
    GONE = "a tenant that is gone leaves nothing behind"
    PROGRESS = "a request that fits ends within its bound, whatever others do"
    SHARES = "no tenant holds more slots than its weight's part while others have requests waiting"
    FAIRNESS = "tenants alike that always have work get equal shares of any five seconds"


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, detail: str) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant.name}: {detail} ({invariant.value})")


def require(holds: bool, invariant: Invariant, detail: Callable[[], str]) -> None:
    """Raise Violation unless ``holds``; ``detail`` is called only then."""
    if not holds:
        raise Violation(invariant, detail())
