"""The first steps of a model, computed while it is loaded: some work of devices and drivers happens
in the first step of each size only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from contract.records import QUERY_TOKEN
from reference.engine.draft_model import GREEDY
from reference.hidden_rows import HiddenRows
from reference.runner import ModelRunner, StepInput
from reference.sched.slots import sampling_record


def warm_up(
    runner: ModelRunner,
    tokens: int,
    rows: int,
    *,
    requested: tuple[str, ...] = (),
    block: bool = False,
    plain: bool = False,
    frequent: bool = False,
) -> None:
    """Compute a step of ``tokens`` tokens and ``rows`` output rows that nobody reads, in slot 0 and
    the first pages, with the ``requested`` outputs. ``block``: the runner is that of a draft block,
    ``plain``: the step has no drafts, ``frequent``: it can sample frequent tokens only. No request
    may have begun."""
    limits = runner.limits
    query = np.zeros(tokens, QUERY_TOKEN)
    query["position"] = np.arange(tokens)
    pages = np.zeros((limits.slots, limits.slot_pages), np.int32)
    pages[:] = np.arange(limits.slot_pages)
    outputs = np.arange(tokens - rows, tokens, dtype=np.int32)
    sampling = np.array([sampling_record(GREEDY, 0, int(n) + 1) for n in outputs])
    hidden, pairs = None, None
    if block:
        layout = HiddenRows.of(limits)
        hidden = np.full(tokens, layout.zeros, np.int32)
        pairs = np.array([(n, layout.drafted(0)) for n in range(rows)], np.int32)
    step = StepInput(query, outputs, sampling, pages, requested, block_ends=query, plain=plain)
    runner.step(replace(step, hidden_rows=hidden, hidden_pairs=pairs, frequent=frequent))
