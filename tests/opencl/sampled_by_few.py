"""Greedy tokens of a model by so many of a device's workers, and the columns of the largest logits.

Run as a program: MODEL DEVICE_THREADS WORKERS; one JSON list of [token, column] comes out."""

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import I12
from contract.types import Request
from harness.tiers import TierOptions, open_tier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner

TOKENS = 60


def main(path: str, threads: str, workers: str) -> None:
    """Print what was sampled beside what should have been."""
    options = TierOptions(threads=int(threads), workers=int(workers))
    largest: list[int] = []

    def note(*rows: NDArray[np.float32]) -> None:
        largest.append(int(rows[-1].reshape(-1, rows[-1].shape[-1])[-1].argmax()))

    limits = Limits(1, 128, 8, I12, step_tokens=16, step_rows=1)
    model = open_model(Path(path))
    with open_tier("opencl", options) as tier, ModelRunner(model, tier, limits) as runner:
        engine = Engine(runner, EngineOptions(end_of_generation=frozenset(), steps_ahead=0))
        engine.submit(Request(1, (3, 4, 5), TOKENS, ignore_end=True), on_logits=note)
        tokens = [event.token for event in engine.run()]
    print(json.dumps([tokens, largest[-TOKENS:]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
