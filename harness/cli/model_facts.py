"""Facts about a model file as JSON values, also for files this build cannot run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import BY_NAME, DType
from contract.errors import DoesNotFit, ZincError
from contract.footprint import declared_footprint
from contract.ir.cost import graph_cost
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey
from contract.spec import KV
from contract.tier import Tier
from harness.cli.layer_facts import active_parameters, head_facts, layer_facts
from harness.host.drafting import plan_block
from harness.memory import (
    check_storage,
    longest_context,
    plans_of,
    prompt_steps,
    room_for_prompts,
    storage_problem,
    whole_context,
    whole_pages,
)
from harness.residency import Residency, longest_beyond, plan_residency
from harness.settings_table import SETTINGS
from reference.engine.block_limits import drafting_limits
from reference.engine.drafter import FREQUENT_TOKENS
from reference.limits import Limits, whole_contexts
from reference.memory.planner import FootprintOf, MemoryPlan, longest_plan
from reference.model.adapters import NO_ADAPTERS, Adapters
from reference.model.config import read_config
from reference.model.config.vision import SEEING
from reference.model.gguf.file import GgufFile
from reference.model.gguf.metadata import Value
from reference.model.gguf.strings import StringArray
from reference.model.heads import is_head, read_head
from reference.model.open import Model
from reference.model.tokenizer import load_tokenizer

SHOWN_CHARACTERS = 200
"""Longest text shown completely in a summary, in characters."""
SHOWN_ITEMS = 5
"""Most items of an array shown in a summary."""
SLOTS = (1, 2, 4, 8, 16)
"""Numbers of sequences for which a summary shows the context that fits."""


def file_facts(file: GgufFile) -> dict[str, Any]:
    """The size, shards, metadata, tensors and their types. Sizes are in bytes."""
    tensors = file.tensors.values()
    mix: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        row = mix.setdefault(tensor.ggml_type.name, {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += math.prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    return {
        "path": str(file.path),
        "bytes": file.size,
        "shards": len(file.shards),
        "gguf_version": file.version,
        "architecture": json_value(file.metadata.get("general.architecture")),
        "name": json_value(file.metadata.get("general.name")),
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "types": dict(sorted(mix.items(), key=lambda item: -item[1]["bytes"])),
        "metadata": {key: summary(value) for key, value in file.metadata.items()},
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "type": tensor.ggml_type.name,
                "bytes": tensor.nbytes,
                "offset": tensor.offset,
                "shard": tensor.shard,
            }
            for tensor in tensors
        ],
    }


def vocabulary_facts(file: GgufFile) -> dict[str, Any]:
    """The vocabulary's size and special tokens, or ``problem``: why the tokenizer cannot be
    used."""
    try:
        tokenizer = load_tokenizer(file.metadata, str(file.path))
        return {
            "model": json_value(file.metadata.get("tokenizer.ggml.model")),
            "pre_tokenizer": json_value(file.metadata.get("tokenizer.ggml.pre")),
            "tokens": tokenizer.vocab_size,
            "bos": _token(tokenizer, tokenizer.bos_id),
            "eos": _token(tokenizer, tokenizer.eos_id),
            "adds_bos": tokenizer.add_bos,
            "end_of_generation": [_token(tokenizer, t) for t in sorted(tokenizer.eog_ids)],
            "chat_template": "tokenizer.chat_template" in file.metadata,
        }
    except ZincError as error:
        return {"problem": str(error)}


@dataclass(frozen=True, slots=True)
class RequestedSizes:
    """The sizes a model shall run with. ``context`` None is the longest within ``budget`` bytes,
    ``chunk`` None the engine's choice; ``tier`` None counts what the graph declares, without a
    tier. Requests may use ``adapters``."""

    context: int | None
    kv_dtype: str
    chunk: int | None
    budget: int
    slots: int = 1
    tier: Tier | None = None
    adapters: Adapters = NO_ADAPTERS

    def limits(self, context: int, kv_dtype: DType) -> Limits:
        """The limits of an engine with this context."""
        tokens = room_for_prompts(self.chunk, context, self.slots) + self.slots
        sizes = self.slots, min(64, context)
        limits = whole_contexts(self.slots, context, kv_dtype, tokens, *sizes)
        return replace(limits, adapters=self.adapters.combined)


def run_facts(file: GgufFile, requested: RequestedSizes) -> dict[str, Any]:
    """Sizes, memory and work of the forward pass, or ``problem``: why there is none.

    Work is that of one decode token that attends to the planned context. Raises RequestError when
    the model has no such context, or its heads do not allow the requested storage.

    A head has a problem, too, and ``head`` says what it drafts for."""
    try:
        if is_head(file):
            return {"problem": "it drafts for a model", "head": head_facts(read_head(file))}
        model = Model(file, read_config(file), adapters=requested.adapters)
        # Build the graph for the shortest context first: it depends on the file alone, while a
        # missing context is an error of the request.
        combined = requested.adapters.combined
        model.graph(Limits(slots=1, context=PAGE_TOKENS, pages=1, adapters=combined))
    except ZincError as error:
        return {"problem": str(error)}
    longest = longest_context(model, requested.context)
    check_storage(model, BY_NAME[requested.kv_dtype])
    config = model.config
    requested = _settled(model, requested, longest)
    memory = memory_facts(model, requested, longest)
    context = memory["context"]
    graph = model.graph(requested.limits(context, BY_NAME[requested.kv_dtype]))
    return {
        "layers": config.layers,
        "hidden": config.hidden,
        "images": "not read" if config.architecture in SEEING else None,
        "drafts": _draft_facts(
            model,
            partial(requested.limits, kv_dtype=BY_NAME[requested.kv_dtype]),
            context,
            declared_footprint if requested.tier is None else requested.tier.footprint,
        ),
        "active_parameters": active_parameters(model),
        **layer_facts(model, BY_NAME[requested.kv_dtype]),
        "longest_context": config.context,
        "adapters": adapter_facts(model.adapters),
        "memory": memory,
        "graph": graph_facts(graph, context),
    }


def adapter_facts(adapters: Adapters) -> list[dict[str, Any]]:
    """The matrices that adapters change, and the bytes of the stacked tensors."""
    return [
        {
            "path": str(adapter.file.path),
            "sha256": adapter.digest,
            "alpha": adapter.alpha,
            "ranks": sorted({rank for _, rank, _ in adapter.shapes.values()}),
            "matrices": len(adapter.shapes),
            "stacked_bytes": adapters.nbytes // len(adapters.opened),
        }
        for adapter in adapters.opened
    ]


def _settled(model: Model, requested: RequestedSizes, longest: int) -> RequestedSizes:
    """``requested`` with the prompt tokens per step that an engine would choose."""
    if requested.chunk is not None or requested.tier is None:
        return requested
    dtype, tier = BY_NAME[requested.kv_dtype], requested.tier
    choices = [replace(requested, chunk=tokens) for tokens in prompt_steps(tier.info.prompt_tokens)]
    by_steps = [partial(choice.limits, kv_dtype=dtype) for choice in choices]
    found = whole_context(model, tier, by_steps, longest, requested.budget)
    return choices[-1 if found is None else found[0]]


def memory_facts(model: Model, requested: RequestedSizes, longest: int) -> dict[str, Any]:
    """The memory plan (``MemoryPlan.to_dict``) of the requested context, or of the longest that
    fits.

    ``fits`` compares it with ``budget``, with weights in host memory or on disk where that helps;
    ``notes`` say so. ``kinds`` gives, for each storage type of keys and values,
    its bytes per token, the longest context up to ``longest`` that fits (None: not even a page),
    the memory that takes and where weights are for that ("" for memory of the device); or
    ``problem`` when the heads do not allow the type. ``beyond`` are bytes above the budget, of
    mapped files."""
    kinds: dict[str, dict[str, Any]] = {}
    shown: MemoryPlan | None = None
    for dtype in KV:
        problem = storage_problem(model, dtype)
        if problem is not None:
            kinds[dtype.name] = {"problem": problem}
            continue
        found = _fitting(model, requested, dtype, longest)
        if dtype.name == requested.kv_dtype:
            whole = found.plan is not None and not found.weights and requested.context is None
            shown = found.plan if whole else None
            least = min(longest, PAGE_TOKENS)
            shown = shown or _resident(model, requested, dtype)(requested.context or least)
        kinds[dtype.name] = {
            "kv_per_token": (found.plan or found.plan_at(min(longest, PAGE_TOKENS))).kv_per_token,
            "longest_context": found.plan.context if found.plan is not None else None,
            "total": found.plan.total if found.plan is not None else None,
            "weights": found.weights,
        }
    assert shown is not None
    stored, lines, residency, tier = BY_NAME[requested.kv_dtype], [], None, requested.tier
    if shown.budgeted > requested.budget:
        residency = _residency(model, requested)
        if residency is not None and tier is not None:
            shown, lines = residency.plan, residency.lines(tier, model)
        elif tier is None:
            lines = ["--tier auto says whether weights may stay in host memory or on disk"]
    return {
        **shown.to_dict(),
        "notes": lines,
        "tier": tier.info.name if tier is not None else None,
        "devices": tier.info.devices if tier is not None else 1,
        "whole_pages": whole_pages(model, requested.limits(shown.context, stored), tier),
        "budget": requested.budget,
        "beyond": 0 if residency is None else residency.from_disk,
        "fits": residency is not None or shown.budgeted <= requested.budget,
        "kinds": kinds,
        "sequences": [
            sequence_facts(model, replace(requested, slots=slots), longest)
            for slots in sorted({*SLOTS, requested.slots})
        ],
    }


@dataclass(frozen=True, slots=True)
class _Fitting:
    """The longest ``plan`` of ``plan_at`` within ``budget``, None where not even a page is.
    ``weights`` says where those are that have no room."""

    plan_at: Callable[[int], MemoryPlan]
    plan: MemoryPlan | None
    budget: int
    weights: str = ""


def _resident(model: Model, requested: RequestedSizes, dtype: DType) -> Callable[[int], MemoryPlan]:
    """Plans of contexts with all weights in memory of the device."""
    tier = requested.tier
    footprint = declared_footprint if tier is None else tier.footprint
    unified = tier is None or tier.info.host_unified
    return plans_of(model, partial(requested.limits, kv_dtype=dtype), footprint, unified)


def _fitting(model: Model, requested: RequestedSizes, dtype: DType, longest: int) -> _Fitting:
    """What fits of contexts up to ``longest``, with weights elsewhere where it must be."""
    plan_at, budget = _resident(model, requested, dtype), requested.budget
    plan = longest_plan(plan_at, longest, budget)
    if plan is not None or requested.tier is None:
        return _Fitting(plan_at, plan, budget)
    limits_at = partial(requested.limits, kv_dtype=dtype)
    beyond = longest_beyond(model, requested.tier, limits_at, longest, budget)
    if beyond is None:
        return _Fitting(plan_at, None, budget)
    return _Fitting(*beyond, "in host memory" if beyond[1].streamed else "from disk")


def _residency(model: Model, requested: RequestedSizes) -> Residency | None:
    """The plan with weights in host memory or on disk; None where that does not help either."""
    if requested.tier is None:
        return None
    limits_at = partial(requested.limits, kv_dtype=BY_NAME[requested.kv_dtype])
    try:
        return plan_residency(
            model, requested.tier, [limits_at], requested.context, requested.budget
        )
    except DoesNotFit:
        return None


def sequence_facts(model: Model, requested: RequestedSizes, longest: int) -> dict[str, Any]:
    """The longest context up to ``longest`` with which ``requested.slots`` sequences fit at once.

    ``context`` is None when not even one page each fits, and ``total`` is then the memory that
    would need. ``more`` is the memory with one page more each, None when ``longest`` is reached;
    ``left`` is the unused part of the budget, and ``weights`` says where those are that have no
    room."""
    found = _fitting(model, requested, BY_NAME[requested.kv_dtype], longest)
    plan = found.plan or found.plan_at(min(longest, PAGE_TOKENS))
    facts: dict[str, Any] = {
        "slots": requested.slots,
        "context": plan.context if found.plan is not None else None,
        "total": plan.total,
        "left": found.budget - plan.budgeted,
        "more": None,
        "weights": found.weights,
    }
    if found.plan is not None and plan.context < longest:
        longer = found.plan_at(min(longest, plan.context + PAGE_TOKENS))
        facts["more"] = longer.budgeted - plan.budgeted
    return facts


def graph_facts(graph: Graph, context: int) -> dict[str, Any]:
    """The nodes by opcode, and the bytes and FLOPs of a decode token that attends to ``context``
    positions."""
    work = graph_cost(graph, ShapeKey(1, 1), context)
    counts = Counter(node.opcode.name for node in graph.nodes)
    return {
        "nodes": len(graph.nodes),
        "opcodes": dict(counts.most_common()),
        "context": context,
        "bytes_per_token": work.bytes_moved,
        "flops_per_token": work.flops,
    }


def summary(value: Value | None) -> Any:
    """A metadata value as JSON; long texts and arrays are cut, with their length."""
    if isinstance(value, np.ndarray | StringArray):
        kind = "string" if isinstance(value, StringArray) else value.dtype.name
        items = [_short(json_value(value[i])) for i in range(min(len(value), SHOWN_ITEMS))]
        return {"array": kind, "length": len(value), "first": items}
    return _short(json_value(value))


def json_value(value: Any) -> Any:
    """A complete metadata value as JSON; numbers that JSON lacks become text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray | StringArray):
        return [json_value(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
        return f"{value[:SHOWN_CHARACTERS]}... ({len(value):,} characters)"
    return value


def _token(tokenizer: Any, token: int | None) -> dict[str, Any] | None:
    return None if token is None else {"id": token, "text": tokenizer.token_text(token)}


def _draft_facts(
    model: Model, limits_at: Callable[[int], Limits], context: int, footprint: FootprintOf
) -> dict[str, Any]:
    """``blocks`` is the number of draft blocks in the file. ``problem`` is why the first cannot be
    used, None where it can; then ``total`` is the memory that drafting with it adds for a context,
    and ``weights`` and ``kv_per_token`` are parts of it, all in bytes. ``frequent`` is how many
    tokens it drafts of, ``read`` and ``read_for_all`` are the bytes that a draft of these and of
    all tokens reads."""
    facts: dict[str, Any] = {"blocks": model.config.draft_blocks, "problem": None}
    if not model.config.draft_blocks:
        return facts
    if model.draft_problem is not None:
        return {**facts, "problem": model.draft_problem}
    limits = drafting_limits(limits_at(context), SETTINGS["draft"].default_value())
    block = plan_block(model, limits, footprint, True).plan
    plain = plans_of(model, limits_at, footprint)(context)

    def read_by(frequent: int) -> int:
        graph = model.draft_graph(replace(limits, frequent_tokens=frequent))
        return graph_cost(graph, ShapeKey(1, 1), 1).bytes_read

    drafting = plans_of(model, lambda _: limits, footprint)(context)
    return {
        **facts,
        "weights": sum(block.weights.values()),
        "kv_per_token": block.kv_per_token,
        "total": block.total + drafting.total - plain.total,
        "frequent": min(FREQUENT_TOKENS, model.config.vocab),
        "read": read_by(FREQUENT_TOKENS),
        "read_for_all": read_by(0),
    }
