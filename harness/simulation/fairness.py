"""A contest of equal tenants that always have requests: their shares of any five seconds."""

from random import Random

from contract.types import QosClass, Request, SamplingParams, Tenant
from harness.simulation.crowd import Crowd, Delivered, timed_engine, token_counts
from harness.simulation.history import VOCAB
from harness.simulation.invariants import Invariant, Violation
from reference.engine import EngineOptions
from reference.limits import Limits, pages_for

WINDOW_SECONDS = 5.0
MIN_JAIN_INDEX = 0.98
BEGIN_SECONDS = 2.0
"""Seconds after which the first requests of all tenants run."""
END_SECONDS = 14.0
LONGEST_ANSWER = 18
"""Tokens of the longest answer."""
STEP_SECONDS = 0.02
CONTEXT = 64
CHUNK = 24
"""Prompt tokens in a step."""


def play_mix(seed: int) -> None:
    """Let two to four equal tenants compete, with very different numbers of waiting requests.
    Raises Violation where ``check_shares`` does."""
    random = Random(seed)
    slots = random.choice([2, 3, 4, 6])
    pages = slots * pages_for(CONTEXT)
    qos = random.choice(list(QosClass))
    tenants = [
        Tenant(id, f"tenant-{id}", max_slots=slots, max_kv_pages=pages, qos=qos)
        for id in range(random.choice([2, 3, 4]))
    ]
    limits = Limits(slots, CONTEXT, pages, step_tokens=slots + CHUNK, step_rows=slots)
    ahead = random.choice([0, 1, 3])
    options = EngineOptions(chunk_tokens=CHUNK, steps_ahead=ahead, prefix_cache=False)
    engine, clock = timed_engine(limits, options, tenants, STEP_SECONDS)
    backlogs = [random.choice([slots, 2 * slots, 10 * slots]) for _ in tenants]
    backlogs[0] = 10 * slots

    def ask(tenant: int, number: int) -> Request:
        prompt = tuple(random.randrange(VOCAB) for _ in range(random.randint(1, 8)))
        sampling = SamplingParams(seed=random.getrandbits(64))
        tokens = random.randint(6, LONGEST_ANSWER)
        return Request(number, prompt, tokens, sampling, tenant=tenant, ignore_end=True)

    crowd = Crowd(engine, clock, dict(enumerate(backlogs)), ask)
    crowd.refill()
    while clock() < END_SECONDS:
        crowd.refill(engine.step())
    check_shares(crowd.delivered, len(tenants), BEGIN_SECONDS, END_SECONDS)


def check_shares(delivered: Delivered, tenants: int, begin: float, end: float) -> None:
    """Raise Violation unless the tenants' shares of every window from ``begin`` to ``end`` seconds
    are almost equal, or differ by an answer at each end of the window at most: slots are given for
    whole answers. Jain's index, (sum x)^2 / (n sum x^2), is 1 for equal shares and 1 / n for one
    tenant who gets all."""
    for moment, counts in token_counts(delivered, WINDOW_SECONDS, begin, end):
        shares = [counts[tenant] for tenant in range(tenants)]
        index = sum(shares) ** 2 / (tenants * sum(share * share for share in shares))
        part = sum(shares) / tenants
        apart = max(abs(share - part) for share in shares)
        if index < MIN_JAIN_INDEX and apart > 2 * LONGEST_ANSWER:
            raise Violation(
                Invariant.FAIRNESS,
                f"until {moment:.2f} s the tenants got {shares} tokens, Jain index {index:.3f}",
            )
