"""Sessions of an agent: prompts that grow by answers and results of tools, and are edited."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from contract.types import Request, SamplingParams, TokenEvent
from harness.digest import RunningDigest
from reference.engine import Engine
from reference.observer import Observer

GREEDY = SamplingParams(temperature=0.0, repeat_last_n=0)
VOCABULARY = 256


class Reuse(Observer):
    """Notes how many tokens of each prompt came from the cache."""

    def __init__(self) -> None:
        self.reused: dict[int, int] = {}

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """See ``Observer``."""
        self.reused.setdefault(request_id, reused)


@dataclass
class Session:
    """An agent's conversation on an engine. ``computed`` are the tokens of its latest sequence
    that were computed, ``twice`` the tokens of each prompt that were computed before."""

    engine: Engine
    reuse: Reuse
    number: int
    seed: int
    tenant: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    turns: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def read(self, count: int) -> None:
        """``count`` more tokens of somebody else's: a result of a tool, or a question."""
        self.tokens += self._random.integers(0, VOCABULARY, count).tolist()

    def answer(self, most: int, turn: int | None = None) -> list[int]:
        """The model's answer, which becomes part of the conversation."""
        prompt = tuple(self.tokens)
        id = self.number * 1000 + self.turns
        self.turns += 1
        turns = () if turn is None else (turn,)
        events, digest = ask(self.engine, prompt, most, id=id, tenant=self.tenant, turns=turns)
        known = common(prompt, self.computed)
        self.twice.append(max(0, known - self.reuse.reused[id]))
        self.lengths.append(len(prompt))
        self.digests.append(digest)
        self.prompts.append(prompt)
        tokens = [event.token for event in events]
        self.tokens += tokens
        # The last token of an answer is sampled only.
        self.computed = self.tokens[:-1]
        return tokens


def ask(
    engine: Engine, prompt: Sequence[int], most: int, **fields: object
) -> tuple[list[TokenEvent], str]:
    """The answer to a prompt, and the digest of the logits it was sampled from."""
    digest = RunningDigest()
    request = Request(
        prompt=tuple(prompt), max_tokens=most, sampling=GREEDY, ignore_end=True, **fields
    )  # type: ignore[arg-type]
    engine.submit(request, digest, len(prompt) - 1)
    events = [event for event in engine.run() if event.request_id == request.id]
    return events, digest.after(len(events)) or ""


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their beginning on."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(np.array(first[:length]) != np.array(second[:length]))
    return int(differing[0]) if len(differing) else length
