"""Plans a load: requests, their tenants and their times. The same seed gives the same load."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from contract.errors import ConfigError

WORDS = """\
the of and to in is it you that was for on are with as his they at be this from have or by one
had not but what all were when we there can an your which their said if do will each about how
up out them then she many some so these would other into has more her two like him see time
could no make than first been its who now people my made over did down only way find use may
water long little very after words called just where most know get through back much go good new
write our used me man too any day same right look think also around another came come work three
must because does part even place well such here take why things help put years different away
again off went old number great tell men say small every found still between name should""".split()  # noqa: SIM905
"""Common English words of about one token each."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths: half of them below ``median``, two thirds within a factor of
    e**``spread`` of it, all from ``minimum`` to ``maximum``."""

    median: float
    spread: float
    minimum: int
    maximum: int

    def draw(self, random: np.random.Generator) -> int:
        """Draw one length."""
        drawn = random.lognormal(math.log(self.median), self.spread)
        return int(np.clip(round(drawn), self.minimum, self.maximum))


@dataclass(frozen=True, slots=True)
class RequestKind:
    """A kind of request and its ``share`` of a mix; prompt lengths in words (about one token each),
    answer lengths in tokens."""

    share: float
    prompt: Lengths
    answer: Lengths


CHAT = RequestKind(0.7, Lengths(48, 0.9, 8, 384), Lengths(48, 0.6, 8, 160))
LOOKUP = RequestKind(0.2, Lengths(16, 0.5, 4, 64), Lengths(12, 0.4, 4, 32))
DOCUMENT = RequestKind(0.1, Lengths(320, 0.4, 128, 512), Lengths(40, 0.5, 8, 96))
MIXES: Mapping[str, tuple[RequestKind, ...]] = {
    "mixed": (CHAT, LOOKUP, DOCUMENT),
    "chat": (CHAT,),
    "document": (DOCUMENT,),
}
"""Mixes shaped like public logs of conversations, sized for one processor: most requests are short,
a few are long, and only document requests have answers shorter than their prompts."""
MIX_CONTEXT = 1024
"""Positions that hold any request of any mix."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load of ``requests`` of a mix. Each of ``clients`` sends its next request when it has its
    answer; with ``rate`` requests arrive as a Poisson process of that rate per second. ``tenants``
    take turns."""

    requests: int
    clients: int = 8
    rate: float | None = None
    mix: str = "mixed"
    seed: int = 0
    tenants: int = 1

    def __post_init__(self) -> None:
        for name in ("requests", "clients", "tenants"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: must be at least 1")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError("--rate: must be above 0")
        if self.mix not in MIXES:
            raise ConfigError(f"--mix: {self.mix!r} is none of {', '.join(MIXES)}")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, due ``at`` seconds after the start; 0 when clients send one after the other."""

    number: int
    tenant: int
    at: float
    prompt: str
    max_tokens: int


def draw_load(plan: LoadPlan, repetition: int = 0) -> list[PlannedRequest]:
    """The requests of a plan in sending order. No two prompts of any repetitions share a beginning,
    so no cache can hold one."""
    random = np.random.default_rng([plan.seed, repetition])
    kinds = MIXES[plan.mix]
    shares = np.array([kind.share for kind in kinds])
    requests = []
    at = 0.0
    for number in range(plan.requests):
        kind = kinds[random.choice(len(kinds), p=shares / shares.sum())]
        if plan.rate is not None:
            at += random.exponential(1 / plan.rate)
        words = random.choice(WORDS, kind.prompt.draw(random))
        prompt = f"{plan.seed}-{repetition}-{number}: {' '.join(words)}"
        answer = kind.answer.draw(random)
        requests.append(PlannedRequest(number, number % plan.tenants, at, prompt, answer))
    return requests
