"""Single steps of a model on a tier, for timing."""

import numpy as np

from contract.dtypes import F32
from contract.records import QUERY_TOKEN
from contract.tier import Tier
from contract.types import SamplingParams
from reference.limits import whole_contexts
from reference.model.open import Model
from reference.runner import ModelRunner, StepInput
from reference.sched.slots import sampling_record

CONTEXT = 256


def runner_on(model: Model, tier: Tier, tokens: int) -> ModelRunner:
    """A runner with one slot of CONTEXT positions, for steps of at most ``tokens``."""
    limits = whole_contexts(1, CONTEXT, F32, step_tokens=tokens, step_rows=1)
    return ModelRunner(model, tier, limits)


def step_of(runner: ModelRunner, tokens: int, start: int = 0) -> StepInput:
    """A step of ``tokens`` tokens from position ``start``, with logits of the last.

    ``start`` must be 0 or the end of the runner's last step: recurrent states, keys and values
    exist only for positions that were computed."""
    query = np.zeros(tokens, QUERY_TOKEN)
    query["token"] = np.arange(tokens)
    query["position"] = np.arange(start, start + tokens)
    return StepInput(
        query=query,
        output_rows=np.array([tokens - 1], np.int32),
        sampling=sampling_record(SamplingParams(), 0, start + tokens)[None],
        page_table=np.arange(runner.limits.slot_pages, dtype=np.int32)[None],
    )
