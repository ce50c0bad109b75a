"""A prefix hit is invisible in the bits: pages shared, copied, brought back, with their states.

Prompts run one after another on a model; the logits of all positions that a hit leaves to compute
are those of a run that found nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import F32, I3R, I4R, I12, Q8_0
from contract.records import QUERY_TOKEN, SAMPLING
from reference.limits import Limits, pages_for
from reference.memory.kv import KvMemory
from reference.model.open import open_model
from reference.runner import LOGITS, ModelRunner, StepInput
from tests.families_table import HYBRIDS
from tests.named_tiers import named

SLOTS, PAGES, CONTEXT, STATES = 2, 5, 80, 8
SCOPE = ("tenant", 0)
TIERS = named("native", "opencl")
MODELS: dict[str, dict[str, Any]] = {
    "attention-f32": {"fields": {"architecture": "qwen3", "quant": "q4_k_m"}, "kv_dtype": F32},
    "attention-i12": {"fields": {"architecture": "qwen3", "quant": "q4_k_m"}, "kv_dtype": I12},
    "attention-q8_0": {"fields": {"architecture": "qwen3", "quant": "q4_k_m"}, "kv_dtype": Q8_0},
    "attention-i4r": {"fields": {"architecture": "qwen3", "quant": "q4_k_m"}, "kv_dtype": I4R},
    "attention-i3r": {"fields": {"architecture": "qwen3", "quant": "q4_k_m"}, "kv_dtype": I3R},
    "hybrid": {"fields": HYBRIDS["qwen35"], "kv_dtype": I12},
    "mamba": {"fields": HYBRIDS["granitehybrid"], "kv_dtype": I12},
    "latent-and-decays": {"fields": HYBRIDS["kimi-linear-experts"], "kv_dtype": I12},
    "short-convolutions": {"fields": HYBRIDS["lfm2"], "kv_dtype": I12},
}
SHORT = ("attention-i12", "hybrid")
"""Pages and states on every tier; every model on the native one."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (tier, model), marks=[] if tier == "native" or model in SHORT else [pytest.mark.long]
        )
        for tier in TIERS
        for model in MODELS
    ],
    ids=lambda pair: "-".join(pair),
)
def runner(request, synthetic_model) -> Iterator[ModelRunner]:
    tier_name, model_name = request.param
    chosen = MODELS[model_name]
    path: Path = synthetic_model(**chosen["fields"])
    model = open_model(path)
    limits = Limits(
        SLOTS, CONTEXT, PAGES, kv_dtype=chosen["kv_dtype"], step_tokens=PAGE_TOKENS + SLOTS,
        step_rows=PAGE_TOKENS, saved_states=STATES,
    )  # fmt: skip
    with model.file, TIERS[tier_name]() as tier, ModelRunner(model, tier, limits) as runner:
        yield runner


@dataclass
class Prompts:
    """Prompts run one at a time through a memory; ``hits`` are the tokens each one found."""

    runner: ModelRunner
    memory: KvMemory
    hits: list[int] = field(default_factory=list)

    @property
    def recurrent(self) -> bool:
        return self.runner.recurrent.slot_bytes > 0

    def run(self, tokens: NDArray[np.int32], slot: int) -> NDArray[np.float32]:
        """The logits of the positions that were computed, float32[tokens, vocab]."""
        hit = self.memory.adopt(SCOPE, tokens, len(tokens) - 1, 0, slot)
        self.hits.append(hit.tokens)
        taken = self.memory.take(pages_for(len(tokens)) - len(hit.pages), 0, slot)
        assert taken is not None
        pages = [*hit.pages, *taken]
        if hit.state is not None:
            self.runner.recurrent.load(hit.state, slot)
        logits = []
        stops = [*range(hit.tokens // PAGE_TOKENS * PAGE_TOKENS, len(tokens), PAGE_TOKENS)][1:]
        for start, stop in zip([hit.tokens, *stops], [*stops, len(tokens)], strict=True):
            logits.append(self._step(tokens, start, stop, slot, pages))
            self.memory.publish(SCOPE, tokens[:stop], pages)
            if self.recurrent and not stop % PAGE_TOKENS:
                self._keep_state(tokens[:stop], slot)
        self.memory.release(pages, 0)
        self.memory.check([])
        return np.concatenate(logits)

    def _keep_state(self, tokens: NDArray[np.int32], slot: int) -> None:
        place = self.memory.save_state_slot()
        if place is not None:
            self.runner.recurrent.save(slot, place)
            self.memory.attach_state(SCOPE, tokens, place)

    def _step(
        self, tokens: NDArray[np.int32], start: int, stop: int, slot: int, pages: list[int]
    ) -> NDArray[np.float32]:
        query = np.zeros(stop - start, QUERY_TOKEN)
        query["token"], query["slot"] = tokens[start:stop], slot
        query["position"] = np.arange(start, stop)
        table = np.zeros((SLOTS, self.runner.limits.slot_pages), np.int32)
        table[slot, : len(pages)] = pages
        rows = np.arange(stop - start, dtype=np.int32)
        sampling = np.zeros(len(rows), SAMPLING)
        sampling["slot"], sampling["top_p"] = slot, 1.0
        sampling["repeat_penalty"] = 1.0
        inputs = StepInput(query, rows, sampling, table, (LOGITS,))
        return self.runner.step(inputs).logits.copy()


def prompt(seed: int, length: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


ONE, OTHER = prompt(1, 48), prompt(2, 70)
LONGER = np.concatenate([ONE, prompt(3, 9)])
SCHEDULE = [ONE, ONE, LONGER, OTHER, ONE, LONGER]


def nothing_found(runner: ModelRunner) -> Prompts:
    states = STATES if runner.recurrent.slot_bytes else None
    return Prompts(runner, KvMemory(PAGES, cache=False, states=states))


@cache
def cold(runner: ModelRunner) -> list[NDArray[np.float32]]:
    """The logits of the prompts of SCHEDULE where they find nothing."""
    return [nothing_found(runner).run(tokens, 0) for tokens in SCHEDULE]


def warm(runner: ModelRunner, memory: KvMemory) -> Prompts:
    """Run SCHEDULE; AssertionError where a logit is not the cold run's."""
    expected, prompts = cold(runner), Prompts(runner, memory)
    # Else a page may hold what it has to, from the run before.
    nothing_found(runner).run(OTHER[::-1], 0)
    for index, tokens in enumerate(SCHEDULE):
        logits = prompts.run(tokens, index % SLOTS)
        rest = expected[index][prompts.hits[-1] :]
        assert logits.shape == rest.shape
        assert (logits == rest).all(), f"prompt {index} after a hit of {prompts.hits[-1]} tokens"
    return prompts


def memory_of(runner: ModelRunner, host_pages: int, kind: type[KvMemory] = KvMemory) -> KvMemory:
    states = STATES if runner.recurrent.slot_bytes else None
    order = (3, 0, 4, 1, 2)
    copies = runner.page_copies()
    return kind(PAGES, order=order, states=states, copies=copies, host_pages=host_pages)


def test_pages_found_copied_and_brought_back_change_no_bit(runner):
    """OTHER needs every page, so what follows it comes from host memory."""
    prompts = warm(runner, memory_of(runner, host_pages=8))
    recurrent = prompts.recurrent
    assert prompts.hits == ([0, 32, 48, 0, 32, 48] if recurrent else [0, 47, 48, 0, 47, 48])
    assert prompts.memory.statistics.restored > 0
    assert prompts.memory.statistics.copied == (0 if recurrent else 2)


def test_evicted_pages_are_computed_again(runner):
    prompts = warm(runner, memory_of(runner, host_pages=0))
    assert prompts.hits[:4] == ([0, 32, 48, 0] if prompts.recurrent else [0, 47, 48, 0])
    assert prompts.memory.statistics.restored == 0


class WithoutCopying(KvMemory):
    """Gives a page of its own where a copy is needed, with whatever is in it."""

    def _copy_for_slot(self, node: Any, tenant: int, slot: int) -> int | None:
        pages = self.take(1, tenant, slot)
        return pages[0] if pages else None


class WithoutLoading(KvMemory):
    """Counts pages as brought back that were not."""

    def resize(self, pages: int, copies: Any) -> None:
        super().resize(pages, copies)
        restore = self._cached.restore

        def without_loading(nodes: Any, into: Any) -> None:
            loading, copies.load = copies.load, lambda *_: None
            restore(nodes, into)
            copies.load = loading

        self._cached.restore = without_loading  # type: ignore[method-assign]


def test_pages_that_were_not_brought_back_change_bits(runner):
    """A negative control."""
    with pytest.raises(AssertionError, match="prompt 4 after a hit"):
        warm(runner, memory_of(runner, 8, WithoutLoading))


def test_pages_that_were_not_copied_change_bits(runner):
    """A negative control; a recurrent model's hits end with a page, so it has nothing to copy."""
    if runner.recurrent.slot_bytes:
        assert warm(runner, memory_of(runner, 8, WithoutCopying)).memory.statistics.copied == 0
        return
    with pytest.raises(AssertionError, match="prompt 1 after a hit"):
        warm(runner, memory_of(runner, 8, WithoutCopying))
