"""The memory budget of an engine, and the longest context that fits in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

from contract.amounts import format_bytes
from contract.dtypes import DType
from contract.errors import DoesNotFit, RequestError
from contract.ir.graph import BufferKind, Graph
from contract.ir.scratch import buffer_bytes
from contract.spec import KV
from contract.tier import PROMPT_TOKENS, Tier
from reference.limits import Limits
from reference.memory.planner import (
    FootprintOf,
    MemoryPlan,
    longest_plan,
    plan_memory,
    state_buffers,
)
from reference.model.open import Model
from reference.runner import ModelRunner

MARGIN_BYTES = 256 << 20
MARGIN_PARTS = 20
"""One part in this many of the available memory is left to others, at least MARGIN_BYTES."""
MAX_MARGIN_PARTS = 4
"""Of little memory one part in this many is left to others."""

LimitsAt = Callable[[int], Limits]
"""Gives the limits of an engine for a context in positions."""


def budget_of(available: int, override: int | None = None) -> int:
    """The bytes an engine may use: ``override``, or the available memory less a margin."""
    if override is not None:
        return override
    margin = max(MARGIN_BYTES, available // MARGIN_PARTS)
    return available - min(margin, available // MAX_MARGIN_PARTS)


def weight_bytes_of(graph: Graph, shared: Container[str] = ()) -> int:
    """Bytes of the weights that a runner of ``graph`` uploads, which are not ``shared``."""
    weights = (decl for decl in graph.of_kind(BufferKind.WEIGHT) if decl.name not in shared)
    return sum(
        math.prod(map(int, decl.shape[:-1])) * decl.dtype.row_bytes(int(decl.shape[-1]))
        for decl in weights
    )


def plans_of(
    model: Model, limits_at: LimitsAt, footprint: FootprintOf, unified: bool = True
) -> Callable[[int], MemoryPlan]:
    """A function from a context in positions to its memory plan."""

    def plan_at(context: int) -> MemoryPlan:
        limits = limits_at(context)
        graph = model.graph(limits)
        return plan_memory(graph, limits, footprint(graph, limits.largest), unified)

    return plan_at


def whole_pages(model: Model, limits: Limits, tier: Tier | None) -> tuple[int, int] | None:
    """Of how many layers each of the devices of ``tier`` has whole pages, and how many have pages.
    None for a single device."""
    if tier is None or tier.info.devices == 1:
        return None
    graph = model.graph(limits)
    paged, _ = state_buffers(graph)
    held = tier.footprint(graph, limits.largest).buffers
    sizes = {name: buffer_bytes(graph.buffers[name], limits.largest) for name in paged}
    return sum(held[name] >= nbytes for name, nbytes in sizes.items()), len(paged)


def device_pages_in(plan: MemoryPlan, nbytes: int) -> int:
    """The KV pages, over all layers, that ``nbytes`` bytes of a device hold, which may have pages
    of its own heads; 0 for a model without attention."""
    return nbytes * plan.pages // plan.kv if plan.kv else 0


def pages_in(runner: ModelRunner, nbytes: int) -> int:
    """The KV pages of a runner's model, over all layers and heads, that ``nbytes`` bytes hold; 0
    for a model without attention."""
    graph, limits = runner.graph, runner.limits
    pools, _ = state_buffers(graph)
    total = sum(buffer_bytes(graph.buffers[name], limits.largest) for name in pools)
    return nbytes * limits.pages // total if total else 0


def longest_context(model: Model, override: int | None) -> int:
    """The longest context of ``model`` in positions, or ``override``; raises RequestError when
    ``override`` is more."""
    longest = model.config.context
    if override is not None and override > longest:
        raise RequestError(
            "context", f"is {override}, {model.config.name} has {longest}; give at most that"
        )
    return longest if override is None else override


def check_storage(model: Model, kv_dtype: DType) -> None:
    """Raise RequestError when a head of ``model`` is not a whole number of blocks of
    ``kv_dtype``."""
    problem = storage_problem(model, kv_dtype)
    if problem is not None:
        raise RequestError("kv_dtype", f"is {kv_dtype}, which {problem}")


def storage_problem(model: Model, kv_dtype: DType) -> str | None:
    """Why ``kv_dtype`` cannot store the heads of ``model``, and which types can; None when it
    can."""
    config = model.config
    sizes = {layer: config.head_dims[layer] for layer in config.attention_layers}
    for layer, size in sizes.items():
        if size % kv_dtype.block_elements:
            holding = (d for d in KV if not any(s % d.block_elements for s in sizes.values()))
            return (
                f"stores {kv_dtype.block_elements} channels of a head at a time; head_dim is "
                f"{size} in layer {layer} of {config.name}: take {' or '.join(map(str, holding))}"
            )
    return None


def plan_context(
    model: Model, tier: Tier, limits_at: LimitsAt, override: int | None, budget: int
) -> MemoryPlan:
    """The plan of the context ``override``, or of the longest one within ``budget`` if None.

    Nothing is allocated. Raises RequestError when the model has no such context or its heads do not
    allow the storage of keys and values, DoesNotFit when it does not fit, and UnsupportedOp when
    the tier cannot run the model."""
    longest = longest_context(model, override)
    check_storage(model, limits_at(longest).kv_dtype)
    unified = tier.info.host_unified
    plan_at = plans_of(model, limits_at, tier.footprint, unified)
    fitting = None
    if override is None:
        fitting = longest_plan(plan_at, longest, budget)
    else:
        exact = plan_at(override)
        fitting = exact if exact.budgeted <= budget else None
    if fitting is not None:
        return fitting
    requested = plan_at(longest if override is not None else min(longest, 16))
    parts = (
        f"weights {format_bytes(sum(requested.weights.values()))}",
        f"{requested.kv_dtype} keys and values {format_bytes(requested.kv)}",
    )
    count = f"{requested.slots} sequences" if requested.slots > 1 else "a sequence"
    raise DoesNotFit(
        f"{model.config.name}, {count} of {requested.context} tokens on {tier.info.name} "
        f"({', '.join(parts)})",
        requested.budgeted,
        budget,
        ", or ".join(_remedies(model, tier, limits_at, longest, requested, budget)),
    )


def prompt_steps(best: int) -> Sequence[int]:
    """Candidate numbers of prompt tokens per step, for a tier that is fastest with ``best``:
    ``best`` and its halves, down to PROMPT_TOKENS."""
    steps = [best]
    while steps[-1] > PROMPT_TOKENS:
        steps.append(max(PROMPT_TOKENS, steps[-1] // 2))
    return steps


def room_for_prompts(chunk: int | None, context: int, slots: int) -> int:
    """Prompt tokens a step has room for: those of several prompts, each at most its context."""
    return min(chunk or PROMPT_TOKENS, context * slots)


def plan_steps(
    model: Model, tier: Tier, by_steps: Sequence[LimitsAt], override: int | None, budget: int
) -> tuple[MemoryPlan, LimitsAt]:
    """``plan_context`` with the first of ``by_steps`` that does not shorten the context, else with
    the last. Their steps are ever shorter."""
    longest = longest_context(model, override)
    check_storage(model, by_steps[0](longest).kv_dtype)
    found = whole_context(model, tier, by_steps[:-1], longest, budget)
    if found is None:
        return plan_context(model, tier, by_steps[-1], override, budget), by_steps[-1]
    return found[1], by_steps[found[0]]


def whole_context(
    model: Model, tier: Tier, by_steps: Sequence[LimitsAt], longest: int, budget: int
) -> tuple[int, MemoryPlan] | None:
    """The index of the first of ``by_steps`` whose plan has the ``longest`` context, and that plan;
    None when none has."""
    for number, limits_at in enumerate(by_steps):
        plan = plans_of(model, limits_at, tier.footprint, tier.info.host_unified)(longest)
        if plan.budgeted <= budget:
            return number, plan
    return None


def _remedies(
    model: Model, tier: Tier, limits_at: LimitsAt, longest: int, requested: MemoryPlan, budget: int
) -> Iterator[str]:
    """Yield changes that would make it fit, starting with the largest storage type."""
    known = False
    for dtype in _no_larger_than(requested.kv_dtype):
        if storage_problem(model, dtype) is not None:
            continue
        limits_of = _stored_as(limits_at, dtype)
        plan_at = plans_of(model, limits_of, tier.footprint, tier.info.host_unified)
        plan = longest_plan(plan_at, longest, budget)
        if plan is not None:
            known = True
            option = "" if dtype.name == requested.kv_dtype else f" with --kv-dtype {dtype.name}"
            yield f"--context {plan.context} fits{option}"
    if requested.slots > 1:
        yield "take fewer --slots"
    if not known:
        yield "take a smaller model or a smaller quantization of it"
    yield "free memory or raise --memory-budget"


def _no_larger_than(name: str) -> list[DType]:
    by_size = sorted(KV, key=lambda dtype: -dtype.block_bytes / dtype.block_elements)
    names = [dtype.name for dtype in by_size]
    return by_size[names.index(name) :]


def _stored_as(limits_at: LimitsAt, dtype: DType) -> LimitsAt:
    return lambda context: replace(limits_at(context), kv_dtype=dtype)
