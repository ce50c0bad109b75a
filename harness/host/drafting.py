"""Opens what guesses the tokens of a session: its prompt, or a smaller model of its vocabulary."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from contract.dtypes import DEFAULT_KV
from contract.lazy_dataclass import dataclass
from contract.tier import Tier
from harness.memory import plans_of, storage_problem
from harness.progress import Progress
from reference.engine.draft_model import DraftModel, check_vocabularies, draft_limits
from reference.engine.drafter import Drafter, PromptLookup
from reference.limits import Limits
from reference.memory.planner import MemoryPlan
from reference.model.open import Model, open_model
from reference.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft model and the sizes it runs with; ``plan`` is the memory it takes."""

    model: Model
    limits: Limits
    plan: MemoryPlan


def open_draft_model(path: Path, target: Model, owned: ExitStack) -> Model:
    """The draft model in a file, for a target with the same vocabulary.

    Raises ModelFileError, UnsupportedModel, and RequestError where the vocabularies differ.
    """
    model = open_model(path)
    owned.callback(model.file.close)
    check_vocabularies(model, target)
    return model


def plan_drafting(model: Model, tier: Tier, target: Limits) -> Drafting:
    """The sizes and the memory of a draft model for a target of the sizes ``target``.

    Keys and values are stored as the target's, or as F16 where the model's heads do not allow it.
    """
    limits = draft_limits(target)
    if storage_problem(model, limits.kv_dtype) is not None:
        limits = replace(limits, kv_dtype=DEFAULT_KV)

    def limits_at(context: int) -> Limits:
        return replace(limits, context=min(context, model.config.context))

    plan = plans_of(model, limits_at, tier.footprint, tier.info.host_unified)(target.context)
    return Drafting(model, limits_at(target.context), plan)


def load_drafter(
    drafting: Drafting | None,
    target: Model,
    tier: Tier,
    most: int,
    owned: ExitStack,
    progress: Progress,
) -> Drafter | None:
    """What guesses at most ``most`` tokens ahead: a draft model, which is uploaded to ``tier`` and
    closed by ``owned``, else the prompt; None where nothing shall."""
    if not most:
        return None
    if drafting is None:
        return PromptLookup()
    model = drafting.model
    progress.start("loading", sum(tensor.nbytes for tensor in model.file.tensors.values()), "B")
    try:
        runner = owned.enter_context(ModelRunner(model, tier, drafting.limits, progress.advance))
    finally:
        progress.close()
    runner.prepare()
    return DraftModel(runner, target)
