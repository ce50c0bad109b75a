"""Facts about the drafts that a model file can make, as JSON values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.host.drafting import plan_block
from harness.memory import plans_of
from harness.settings_table import SETTINGS
from reference.engine.draft_block import drafting_limits
from reference.limits import Limits
from reference.memory.planner import FootprintOf
from reference.model.open import Model


def draft_facts(
    model: Model, limits_at: Callable[[int], Limits], context: int, footprint: FootprintOf
) -> dict[str, Any]:
    """``blocks`` is the number of draft blocks in the file. ``problem`` is why the first cannot be
    used, None where it can; then ``total`` is the memory that drafting with it adds for a context,
    and ``weights`` and ``kv_per_token`` are parts of it, all in bytes."""
    facts: dict[str, Any] = {"blocks": model.config.draft_blocks, "problem": None}
    if not model.config.draft_blocks:
        return facts
    if model.draft_problem is not None:
        return {**facts, "problem": model.draft_problem}
    limits = drafting_limits(limits_at(context), SETTINGS["draft"].default_value())
    block = plan_block(model, limits, footprint, True).plan
    plain, drafting = (
        plans_of(model, lambda _: limits_at(context), footprint)(context),
        plans_of(model, lambda _: limits, footprint)(context),
    )
    return {
        **facts,
        "weights": sum(block.weights.values()),
        "kv_per_token": block.kv_per_token,
        "total": block.total + drafting.total - plain.total,
    }
