"""Decides which weights are kept on the device if they do not all fit there. Steps copy the others
from host memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from accel.packets.host_memory import available_memory
from contract.amounts import format_bytes
from contract.errors import DoesNotFit
from contract.ir.nodes import Graph
from contract.lazy_dataclass import dataclass
from contract.tier import StreamsWeights, Tier
from harness.memory import LimitsAt, budget_of, longest_context, plan_steps, plans_of
from reference.limits import Limits
from reference.memory.planner import MemoryPlan, longest_plan, plan_memory
from reference.model.open import Model

BLOCK_BYTES = 4 << 20
MAX_SECONDS = 0.2


def disk_rate(path: Path) -> float | None:
    """Bytes a second that the disk of ``path`` gives to one reader, without what the system holds
    of the file in memory; None where that cannot be measured. It reads for about MAX_SECONDS."""
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        return None
    try:
        file = os.open(path, os.O_RDONLY | direct)
    except OSError:
        return None
    done, begin = 0, time.perf_counter()
    try:
        # Direct reads need memory at a page boundary, as a mapping is.
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            while time.perf_counter() - begin < MAX_SECONDS:
                count = os.preadv(file, [block], done)
                done += count
                if count < BLOCK_BYTES:
                    break
    except OSError:
        return None
    finally:
        os.close(file)
    return done / max(time.perf_counter() - begin, 1e-9) if done else None


CONTEXT = 4096
"""The longest context that is chosen by default if not all weights fit. A longer one would leave
less device memory for weights."""
MORE_PARTS = 16
"""Steps of more prompt tokens are taken if they stream at most 1/MORE_PARTS more bytes than the
shortest ones."""


@dataclass(frozen=True, slots=True)
class Residency:
    """A memory plan, and the function that gives the limits for its context. ``ranked`` are weights
    by importance: the first ``resident`` are on the device, the others stay in host memory.
    ``cache`` bytes of the device keep experts that are used often.

    ``from_disk`` is the number of bytes of mapped files that exceed the budget."""

    plan: MemoryPlan
    limits_at: LimitsAt
    ranked: tuple[str, ...] = ()
    resident: int = 0
    from_disk: int = 0
    cache: int = 0

    @property
    def streamed(self) -> tuple[str, ...]:
        """The weights that stay in host memory."""
        return self.ranked[self.resident :]

    @property
    def limits(self) -> Limits:
        """The limits for the plan's context."""
        return self.limits_at(self.plan.context)

    def applied(self, model: Model, tier: Tier, budget: int) -> Residency:
        """Tell the tier which weights to stream; the caller uploads the others afterwards. Returns
        the plan with the tier's exact sizes.

        The plan was an estimate. If the steps need more memory, further weights are streamed."""
        if not self.streamed:
            return self
        assert isinstance(tier, StreamsWeights)
        graph, found = model.graph(self.limits), self
        while True:
            tier.stream(graph, found.streamed, found.cache)
            exact = tier.footprint(graph, self.limits.largest)
            plan = plan_memory(graph, self.limits, exact, tier.info.host_unified)
            found = replace(found, plan=plan)
            over = plan.budgeted - budget
            if over <= 0 or not (found.resident or found.cache):
                return found
            if found.cache:
                found = replace(found, cache=max(0, found.cache - over))
            else:
                found = replace(found, resident=found.resident - 1)

    def lines(self, tier: Tier, model: Model) -> list[str]:
        """Lines for the user about weights that are not on the device; empty if all weights fit.
        Measures the rate of the link, or of the disk with the model's file."""
        if self.streamed:
            assert isinstance(tier, StreamsWeights)
            return [_streaming_line(self.plan, tier.link_rate())]
        if self.from_disk:
            # A token reads few matrices of a stack of experts, so there the disk gives no bound.
            experts = any(len(one.shape) == 3 for one in model.file.tensors.values())
            rate = None if experts else disk_rate(model.file.path)
            return [
                f"{format_bytes(self.from_disk)} more than the budget are weights in mapped files: "
                f"what has no room in memory is read from disk in every step"
                f"{_step_rate_bound(self.from_disk, rate, ': if that is all of it', 'disk')}"
            ]
        return []


def _step_rate_bound(moved: int, rate: float | None, condition: str, link: str) -> str:
    """A text with the number of steps per second that moving ``moved`` bytes per step allows; empty
    if the rate is not known."""
    if rate is None:
        return ""
    steps = rate / moved
    return (
        f"{condition}, at most {steps:,.{0 if steps >= 100 else 1}f} times a second by the {link}, "
        f"just measured at {format_bytes(int(rate))} a second"
    )


def _streaming_line(plan: MemoryPlan, rate: float | None) -> str:
    whole = sum(plan.weights.values()) + plan.streamed
    speed = _step_rate_bound(plan.moved, rate, "", "link")
    moves = "every step copies them to the device"
    if plan.moved < plan.streamed:
        moves = f"a token moves {format_bytes(plan.moved)} of them to the device"
    return (
        f"{format_bytes(plan.streamed)} of {format_bytes(whole)} of weights stay in host memory; "
        f"{moves}{speed}"
    )


def plan_residency(
    model: Model, tier: Tier, by_steps: Sequence[LimitsAt], asked: int | None, budget: int
) -> Residency:
    """The result of ``plan_steps`` or, if that does not fit, a plan with weights in host memory or
    on disk. Raises the errors of ``plan_steps``; DoesNotFit then names the smallest plan that
    works."""
    try:
        return Residency(*plan_steps(model, tier, by_steps, asked, budget))
    except DoesNotFit as error:
        refused = error
    if isinstance(tier, StreamsWeights) and tier.streams:
        return _streaming_steps(model, tier, by_steps, asked, budget)
    found = _from_disk(model, tier, by_steps[-1], asked, budget)
    if found is None:
        raise refused
    return found


def _streaming_steps(
    model: Model, tier: Tier, by_steps: Sequence[LimitsAt], asked: int | None, budget: int
) -> Residency:
    """A plan that streams weights. ``by_steps`` is sorted from long to short steps. Since every
    step copies the weights, the first one is taken that streams at most 1/MORE_PARTS more than the
    last. Raises DoesNotFit."""
    shortest = _streaming(model, tier, by_steps[-1], asked, budget)
    max_streamed = shortest.plan.streamed + shortest.plan.streamed // MORE_PARTS
    for limits_at in by_steps[:-1]:
        with suppress(DoesNotFit):
            found = _streaming(model, tier, limits_at, shortest.plan.context, budget)
            if found.plan.streamed <= max_streamed:
                return found
    return shortest


def _streaming(
    model: Model, tier: Tier, limits_at: LimitsAt, asked: int | None, budget: int
) -> Residency:
    """The plan with as many weights on the device as fit, the most important ones first. Raises
    DoesNotFit."""
    assert isinstance(tier, StreamsWeights)
    unified = tier.info.host_unified
    least_at = _all_streamed(model, tier, limits_at, unified)
    longest = longest_context(model, asked)
    least = least_at(asked) if asked is not None else None
    if least is None or least.budgeted > budget:
        fitting = longest_plan(least_at, longest if asked else min(longest, CONTEXT), budget)
        if fitting is None or asked is not None:
            raise _too_small(model, tier, least or least_at(min(longest, 16)), fitting, budget)
        least = fitting
    limits = limits_at(least.context)
    graph = model.graph(limits)
    ranked = by_importance(graph, list(tier.streamable(graph, limits.largest)))

    def plan_of(resident: int, cache: int = 0) -> MemoryPlan:
        names = ranked[resident:]
        footprint = tier.streaming_footprint(graph, limits.largest, names, cache)
        return plan_memory(graph, limits, footprint, unified)

    resident = _largest_fitting(lambda count: plan_of(count).budgeted <= budget, len(ranked))
    plan, cache = plan_of(resident), 0
    others = sum(len(graph.buffers[name].shape) < 3 for name in ranked)
    if tier.caches_experts and others <= resident < len(ranked):
        resident, cache = others, budget - plan_of(others).budgeted
        plan = plan_of(resident, cache)
    room = budget_of(available_memory())
    if plan.streamed > room:
        raise DoesNotFit(
            f"the weights of {model.config.name} that stay in host memory",
            plan.streamed,
            room,
            "raise --memory-budget where the device has more, or free memory of the host",
        )
    return Residency(plan, limits_at, tuple(ranked), resident, cache=cache)


def _all_streamed(
    model: Model, tier: StreamsWeights, limits_at: LimitsAt, unified: bool
) -> Callable[[int], MemoryPlan]:
    """A function from a context to its plan with as few weights on the device as possible."""

    def plan_at(context: int) -> MemoryPlan:
        limits = limits_at(context)
        graph = model.graph(limits)
        names = tier.streamable(graph, limits.largest)
        footprint = tier.streaming_footprint(graph, limits.largest, list(names))
        return plan_memory(graph, limits, footprint, unified)

    return plan_at


def longest_beyond(
    model: Model, tier: Tier, limits_at: LimitsAt, longest: int, budget: int
) -> tuple[Callable[[int], MemoryPlan], MemoryPlan, int] | None:
    """For a budget that is smaller than the weights: a function from a context to its plan with
    weights in host memory or on disk, the plan of the longest context that fits, up to ``longest``,
    and the budget including mapped files. None if not even one page fits."""
    if isinstance(tier, StreamsWeights) and tier.streams:
        plan_at = _all_streamed(model, tier, limits_at, tier.info.host_unified)
    elif tier.info.host_unified:
        plan_at = plans_of(model, limits_at, tier.footprint, tier.info.host_unified)
        budget += plan_at(min(longest, 16)).evictable
    else:
        return None
    found = longest_plan(plan_at, longest, budget)
    return None if found is None else (plan_at, found, budget)


def by_importance(graph: Graph, names: Sequence[str]) -> list[str]:
    """Weights in the order in which they get device memory: attention, recurrence and shared
    experts, then dense feed-forward, then stacks of experts. Within each group, earlier layers come
    first."""

    def group(name: str) -> int:
        if len(graph.buffers[name].shape) == 3:
            return 2
        return 1 if ".ffn_" in name and "shexp" not in name else 0

    return sorted(names, key=group)


def _largest_fitting(fits: Callable[[int], bool], count: int) -> int:
    """The largest number up to ``count`` for which ``fits`` is true, by bisection; ``fits(0)`` is
    known to be true."""
    least, above = 0, count + 1
    while above - least > 1:
        middle = (least + above) // 2
        least, above = (middle, above) if fits(middle) else (least, middle)
    return least


def _too_small(
    model: Model, tier: Tier, least: MemoryPlan, fitting: MemoryPlan | None, budget: int
) -> DoesNotFit:
    """The error for a budget that is too small even with all layers' weights in host memory."""
    count = f"{least.slots} sequences" if least.slots > 1 else "a sequence"
    subject = (
        f"{model.config.name}, {count} of {least.context} tokens on {tier.info.name} with the "
        f"weights of all layers in host memory"
    )
    remedies = [] if fitting is None else [f"--context {fitting.context} fits"]
    remedies += ["take fewer --slots"] if least.slots > 1 else []
    remedies.append("free memory or raise --memory-budget")
    return DoesNotFit(subject, least.budgeted, budget, ", or ".join(remedies))


def _same_limits(limits: Limits, context: int) -> Limits:
    return limits


def refit_residency(
    model: Model, tier: Tier, first: Residency, min_pages: int, budget: int
) -> Residency:
    """Change the plan ``first`` so that it fits another budget: first with fewer pages, but at
    least ``min_pages``, then with fewer weights on the device. The tier must not stream any weights
    at the time of the call. Raises DoesNotFit."""
    if first.plan.budgeted <= budget:
        return first
    pages = first.limits.pages
    while True:
        limits = replace(first.limits, pages=pages)
        if not first.streamed:
            graph = model.graph(limits)
            footprint = tier.footprint(graph, limits.largest)
            plan = plan_memory(graph, limits, footprint, tier.info.host_unified)
            if plan.budgeted <= budget:
                return Residency(plan, partial(_same_limits, limits))
        if pages <= min_pages:
            return _streaming(model, tier, partial(_same_limits, limits), limits.context, budget)
        pages = max(min_pages, pages // 2)


def _from_disk(
    model: Model, tier: Tier, limits_at: LimitsAt, asked: int | None, budget: int
) -> Residency | None:
    """The plan of a tier that reads weights from mapped files. None if the tier does not, if the
    weights fit with a shorter context, or if the other buffers do not fit."""
    plan_at = plans_of(model, limits_at, tier.footprint, tier.info.host_unified)
    longest = longest_context(model, asked)
    shortest = plan_at(min(longest, 16))
    if not tier.info.host_unified or shortest.budgeted <= budget:
        return None
    room = budget + shortest.evictable
    if asked is not None:
        plan = plan_at(asked)
        found = plan if plan.budgeted <= room else None
    else:
        found = longest_plan(plan_at, min(longest, CONTEXT), room)
    if found is None:
        return None
    return Residency(found, limits_at, from_disk=found.budgeted - budget)
