"""Single steps of a model on a tier, for timing."""

from __future__ import annotations

import numpy as np

from contract.records import QUERY_TOKEN, SAMPLING
from contract.tier import Tier
from reference.limits import pages_for
from reference.limits import Limits
from reference.model.open import Model
from reference.runner import Capacity, ModelRunner, StepInput

CONTEXT = 256


def runner_on(model: Model, tier: Tier, tokens: int) -> ModelRunner:
    """A runner of one slot and CONTEXT positions for steps of at most ``tokens``."""
    limits = Limits(slots=1, context=CONTEXT, pages=pages_for(CONTEXT))
    return ModelRunner(model, tier, limits, Capacity(tokens=tokens, rows=1))


def step_of(runner: ModelRunner, tokens: int, start: int = 0) -> StepInput:
    """``tokens`` tokens from position ``start``, logits of the last.

    ``start`` is 0 or where the runner's last step ended: the state of a recurrent layer is that of
    the tokens before, and neither it nor the keys and values of positions never computed exist.
    """
    query = np.zeros(tokens, QUERY_TOKEN)
    query["token"] = np.arange(tokens)
    query["position"] = np.arange(start, start + tokens)
    sampling = np.zeros(1, SAMPLING)
    sampling["repeat_penalty"] = 1.0
    return StepInput(
        query=query,
        output_rows=np.array([tokens - 1], np.int32),
        sampling=sampling,
        recent=np.full((1, runner.limits.recent_tokens), -1, np.int32),
        page_table=np.arange(runner.limits.slot_pages, dtype=np.int32)[None],
    )
