"""The plan of a serving benchmark: what to measure, on what, and its sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from contract.dtypes import BY_NAME
from harness.bench.engines import PEER, fixed_workers
from harness.bench.measure import BenchmarkPlan
from harness.tiers import TierOptions, open_tier
from reference.limits import Limits, pages_for
from reference.model.open import Model
from reference.runner import ModelRunner

SLOTS = 16
SEQUENCES = (1, 4, 16)
"""Numbers of sequences that decode together."""
CONTEXT = 1024
CHUNK_TOKENS = 512
DRAFT_TOKENS = 11
"""Most drafted tokens per sequence."""
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServingPlan(BenchmarkPlan):
    """What to measure. ``prompt_tokens`` and ``decode_tokens`` are per sequence when several decode
    together; other measurements derive their sizes from them. Each is repeated ``repeat`` times.
    The host's cost is that of ``host_steps`` steps; 0 leaves it out."""

    prompt_tokens: int = 32
    decode_tokens: int = 32
    repeat: int = 3
    host_steps: int = 200

    @property
    def tiers(self) -> tuple[str, ...]:
        """The engines other than the peer."""
        return tuple(name for name in self.engines if name != PEER)

    @property
    def peer_sequences(self) -> int:
        """Sequences that the peer decodes together."""
        return SEQUENCES[-1]

    @property
    def limits(self) -> Limits:
        """Limits of the measured runner, with pages for what is measured instead of every slot's
        whole context."""
        longest = 4 * (self.prompt_tokens + self.decode_tokens)
        pages = SLOTS * pages_for(longest) + pages_for(CONTEXT)
        return Limits(
            slots=SLOTS,
            context=CONTEXT,
            pages=pages,
            kv_dtype=BY_NAME[self.kv_dtype],
            step_tokens=SLOTS + CHUNK_TOKENS,
            step_rows=SLOTS + DRAFT_TOKENS,
            draft_tokens=DRAFT_TOKENS,
        )


@contextmanager
def serving_runner(plan: ServingPlan, model: Model, tier_name: str) -> Iterator[ModelRunner]:
    """The model on a tier, with SLOTS slots and every shape bucket lowered."""
    options = TierOptions(plan.threads, plan.device, fixed_workers(tier_name))
    with (
        open_tier(tier_name.partition(":")[0], options) as tier,
        ModelRunner(model, tier, plan.limits) as runner,
    ):
        runner.prepare()
        yield runner


def random_prompts(seed: int, vocab: int, count: int, length: int) -> list[Tokens]:
    """``count`` prompts of ``length`` random tokens, the same for the same seed."""
    drawn = np.random.default_rng(seed).integers(0, vocab, (count, length))
    return [tuple(row) for row in drawn.tolist()]
