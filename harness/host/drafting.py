"""Opens the drafter of a session: prompt lookup, the model's own draft block, a head (EAGLE-3 or
DFlash), or a smaller model with the same vocabulary."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import DEFAULT_KV
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Tier
from harness.memory import plans_of, storage_problem, weight_bytes_of
from harness.progress import Progress
from reference.engine import drafter
from reference.engine.drafter import Drafter, PromptLookup
from reference.engine.drafters import drafter_limits, drafter_of
from reference.hidden_rows import shared_names
from reference.limits import Limits
from reference.memory.planner import FootprintOf, MemoryPlan, plan_memory
from reference.model.config import read_config
from reference.model.gguf.file import open_gguf
from reference.model.heads import check_head, is_head, read_head
from reference.model.open import Model
from reference.runner import LOG_PROBABILITIES, LOGITS, NOTHING_SHARED, ModelRunner


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft model with its sizes and its memory ``plan``. With ``block`` it is the draft block or
    head of the session's model, and the plan counts only what the model does not already
    have."""

    model: Model
    limits: Limits
    plan: MemoryPlan
    block: bool = False


def open_draft_model(path: Path, target: Model, owned: ExitStack) -> tuple[Model, Model | None]:
    """Open a draft model's file: returns ``target`` and the draft model, or for a head
    ``target`` with that head and None. Raises ModelFileError, UnsupportedModel, and RequestError
    that names the first difference of the vocabularies."""
    # Imported here and below, because most starts have no model that drafts.
    from reference.engine.draft_model import check_vocabularies

    file = open_gguf(path)
    owned.callback(file.close)
    if not is_head(file):
        model = Model(file, read_config(file))
        check_vocabularies(model, target)
        return target, model
    head = read_head(file)
    check_head(head, target.config)
    check_vocabularies(Model(file, head.config), target)
    target = replace(target, head=head)
    sizes = Limits(slots=1, context=PAGE_TOKENS, pages=1, hidden_rows=1)
    target.graph(sizes), target.draft_graph(sizes)
    return target, None


def plan_drafting(draft: Model | None, model: Model, tier: Tier, target: Limits) -> Drafting | None:
    """Sizes and memory of the drafter for ``model``, which has sizes ``target``: of the model
    ``draft``, else of the draft block if ``target`` has hidden rows for it. None for prompt lookup,
    which needs no memory."""
    if draft is not None:
        return _plan_model(draft, tier, target)
    if not target.hidden_rows:
        return None
    return plan_block(model, target, tier.footprint, tier.info.host_unified)


def plan_block(model: Model, target: Limits, footprint: FootprintOf, unified: bool) -> Drafting:
    """Sizes and additional memory of a model's draft block; ``target`` are the model's sizes."""
    limits, head = drafter_limits(target, model.head), model.head
    if head is not None and storage_problem(Model(head.file, head.config), limits.kv_dtype):
        limits = replace(limits, kv_dtype=DEFAULT_KV)
    graph = model.draft_graph(limits)
    held, shared = footprint(graph, limits.largest), shared_names(model.graph(target), graph)
    buffers, mapped = (
        {name: nbytes for name, nbytes in part.items() if name not in shared}
        for part in (held.buffers, held.mapped)
    )
    own = replace(held, buffers=buffers, mapped=mapped)
    return Drafting(model, limits, plan_memory(graph, limits, own, unified), True)


def _plan_model(model: Model, tier: Tier, target: Limits) -> Drafting:
    """Plan a draft model. Keys and values have the target's type, or F16 if the heads do not allow
    it."""
    from reference.engine.draft_model import draft_limits

    limits = draft_limits(target)
    if storage_problem(model, limits.kv_dtype) is not None:
        limits = replace(limits, kv_dtype=DEFAULT_KV)

    def limits_at(context: int) -> Limits:
        return replace(limits, context=min(context, model.config.context))

    plan = plans_of(model, limits_at, tier.footprint, tier.info.host_unified)(target.context)
    return Drafting(model, limits_at(target.context), plan)


def load_drafter(
    drafting: Drafting | None, target: ModelRunner, most: int, owned: ExitStack, progress: Progress
) -> Drafter | None:
    """The drafter of at most ``most`` tokens for the model of ``target``; None if ``most`` is 0.
    Uploads the draft model or block to the same tier, until ``owned`` closes; without one it is
    prompt lookup."""
    if not most:
        return None
    if drafting is None:
        return PromptLookup()
    from reference.engine.draft_model import DraftModel
    from reference.warm_up import warm_up

    limits, runner = drafting.limits, owned.enter_context(_runner(drafting, target, progress))
    runner.prepare()
    target.recurrent.prepare()
    listed = [LOG_PROBABILITIES] if target.limits.top_log_probabilities else []
    few = 1 + drafts_of(target, most)
    for tokens in (1, few, *_prompts(target, few)):
        sampled = min(tokens, limits.step_rows // limits.slots)
        for frequent in (True, False)[not runner.frequent_tokens :]:
            warm_up(runner, tokens, sampled, block=drafting.block, frequent=frequent)
        rows = tokens if tokens <= few else 1
        for requested, plain in product(((), *listed), (False, True)):
            warm_up(target, tokens, rows, requested=requested, plain=plain)
    return drafter_of(runner) if drafting.block else DraftModel(runner, target.model)


def _runner(drafting: Drafting, target: ModelRunner, progress: Progress) -> ModelRunner:
    """The runner of a draft model, block or head on the tier of ``target``, with a second graph
    that samples frequent tokens only if that reads less."""
    model, limits, tier = drafting.model, drafting.limits, target.tier
    build = model.draft_graph if drafting.block else model.graph
    graph, frequent = build(limits), None
    shared = target.shared_buffers(graph) if drafting.block else NOTHING_SHARED
    own_tokens = Opcode.MAP_TOKENS in graph.opcodes
    fewer = int(graph.buffers[LOGITS].shape[-1]) > drafter.FREQUENT_TOKENS and not own_tokens
    # A matrix that is divided among devices has no first rows on each.
    if fewer and tier.info.devices == 1:
        frequent = build(replace(limits, frequent_tokens=drafter.FREQUENT_TOKENS))
    progress.start("loading", weight_bytes_of(graph, shared), "B")
    try:
        return ModelRunner(
            model, tier, limits, progress.advance, graph=graph, shared=shared, frequent=frequent
        )
    finally:
        progress.close()


def _prompts(target: ModelRunner, few: int) -> list[int]:
    """For each shape bucket of steps of prompts of more than ``few`` tokens the fewest tokens of
    one, unless drafts are verified in it. Empty unless the device has its own memory: such devices
    load kernels at their first launch."""
    if target.tier.info.host_unified:
        return []
    bucket_of = target.executable.bucket_of
    sizes = {few, *(bucket.tokens for bucket in target.executable.buckets if bucket.tokens > few)}
    room = min(target.limits.step_tokens, target.limits.slot_pages * PAGE_TOKENS)
    found = [size + 1 for size in sorted(sizes) if size < room]
    return [one for one in found if bucket_of(ShapeKey(one, 1)) != bucket_of(ShapeKey(few, few))]


def drafts_of(target: ModelRunner, most: int) -> int:
    """How many of at most ``most`` drafted tokens of a sequence the model can verify in one
    step."""
    limits = target.limits
    states = limits.slot_states - 1 if target.model.config.recurrent is not None else most
    room = min(limits.step_rows, limits.step_tokens, limits.slot_pages * PAGE_TOKENS) - 1
    return max(0, min(most, states, room))
