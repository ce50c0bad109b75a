"""Random runs of the engine, recorded on one tier and replayed on another: always the same bits."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from contract.types import Request, SamplingParams
from harness.trace import record
from harness.trace.record import record_on
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import PromptLookup
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from reference.sched.constraints import pack_mask
from tests.long_cases import long_except
from tests.trace.recordings import TIERS, replay

VOCAB = 320
TRACES = 20
SOAKED = 1000
IN_EVERY_RUN = (0, 4, 8, 9)
"""Each tier is recorded once and replays once."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a seed decides: the sizes, the requests, and how they are served."""

    seed: int

    def rng(self, part: int) -> np.random.Generator:
        """Random numbers for one part of the run."""
        return np.random.default_rng((self.seed, part))

    @property
    def limits(self) -> Limits:
        """Few pages, so that somebody waits or is preempted; masks for all or none."""
        rng = self.rng(0)
        slots = int(rng.integers(2, 5))
        return Limits(
            slots=slots, context=64, pages=int(rng.integers(4, 2 * slots + 4)),
            step_tokens=int(rng.integers(slots + 8, 40)), step_rows=20, draft_tokens=11,
            saved_states=int(rng.integers(0, 4)), masks=slots * int(rng.integers(0, 2)), biases=4,
            top_log_probabilities=3,
        )  # fmt: skip

    def requests(self) -> list[Request]:
        """Prompts that begin alike, so that prefixes are shared, sampled in all ways."""
        rng = self.rng(1)
        shared = tuple(rng.integers(0, 256, 40).tolist())
        made = []
        for number in range(int(rng.integers(4, 9))):
            prompt = shared[: int(rng.integers(0, 40))] + tuple(rng.integers(0, 256, 4).tolist())
            biases = ((int(rng.integers(VOCAB)), float(rng.normal())),)
            made.append(
                Request(
                    number,
                    prompt,
                    int(rng.integers(0, 24)),
                    SamplingParams(
                        temperature=float(rng.choice([0.0, 0.8])),
                        repeat_penalty=float(rng.choice([1.0, 1.2])),
                        seed=int(rng.integers(1 << 40)),
                    ),
                    logit_bias=biases if rng.integers(2) else (),
                    log_probabilities=[None, 0, 3][rng.integers(3)],
                    ignore_end=True,
                )
            )
        return made

    def serve(self, runner: ModelRunner) -> None:
        """All of them, joining at random steps, some with masks, some cancelled."""
        rng = self.rng(2)
        engine = Engine(
            runner,
            EngineOptions(
                steps_ahead=int(rng.integers(0, 4)),
                copy_pages=not runner.recurrent.slot_bytes,
                host_pages=0 if runner.recurrent.slot_bytes else int(rng.integers(0, 9)),
            ),
            drafter=PromptLookup() if rng.integers(2) else None,
        )
        mask = pack_mask(rng.choice(VOCAB, 60, replace=False).tolist(), VOCAB)
        for request in self.requests():
            masked = runner.limits.masks and rng.integers(2)
            engine.submit(request, allowed=(lambda generated: mask) if masked else None)
            for _ in range(int(rng.integers(0, 4))):
                engine.step()
            if not rng.integers(6):
                engine.cancel(request.id)
        for _ in engine.run():
            pass


def record_and_replay(path: Path, folder: Path, seed: int, recorded: str, replayed: str) -> None:
    """One trace."""
    run = Run(seed)
    trace = folder / f"{seed}.trace"
    model, tier = open_model(path), TIERS[recorded]()
    with model.file, pytest.MonkeyPatch.context() as patch:
        if seed % 2 == 0:
            # Every output is compared, logits too.
            patch.setattr(record, "WATCHED_BYTES_MAX", 1 << 40)
        recorder = record_on(tier, trace, model, run.limits)
        with recorder, ModelRunner(model, recorder, run.limits) as runner:
            run.serve(runner)
    result = replay(path, trace, replayed)
    assert result.difference is None, f"seed {seed}: {result.difference}"
    assert result.whole
    assert result.submissions > 0
    trace.unlink()


def models(synthetic_model: Callable[..., Path], seed: int) -> Path:
    """Attention alone, or with recurrent layers."""
    return synthetic_model(architecture=("qwen3", "qwen35")[seed % 3 == 2], quant="q4_k_m")


@pytest.mark.parametrize("seed", long_except(range(TRACES), *IN_EVERY_RUN))
def test_a_random_run_replays(synthetic_model, tmp_path, seed):
    """On another tier than it was recorded on, in all pairs."""
    pairs = list(permutations(TIERS, 2))
    recorded, replayed = pairs[seed % len(pairs)]
    model = models(synthetic_model, seed // len(pairs))
    record_and_replay(model, tmp_path, seed, recorded, replayed)


@pytest.mark.soak
def test_random_runs_replay(synthetic_model, tmp_path):
    for seed in range(TRACES, SOAKED):
        names = ("cpu", "late") if seed % 2 else ("late", "opencl")
        record_and_replay(models(synthetic_model, seed), tmp_path, seed, *names)
