"""The drafter of a model that has a draft block or a head, and the limits it needs."""

from __future__ import annotations

from reference.engine import block_limits, dflash
from reference.engine.dflash import DFlashDrafter
from reference.engine.draft_block import DraftBlock
from reference.limits import Limits
from reference.model.dflash import DFlashHead
from reference.model.draft_head import DraftHead
from reference.runner import ModelRunner


def drafting_limits(limits: Limits, drafts: int, head: DraftHead | None) -> Limits:
    """``limits`` of a model with ``head``, or with a draft block, for at most ``drafts`` drafts of
    a sequence."""
    if isinstance(head, DFlashHead):
        return dflash.drafting_limits(limits, drafts, head)
    return block_limits.drafting_limits(limits, drafts)


def drafter_limits(target: Limits, head: DraftHead | None) -> Limits:
    """The limits of the drafter's runner for a model with the limits ``target``."""
    if isinstance(head, DFlashHead):
        return dflash.head_limits(target)
    return block_limits.block_limits(target)


def drafter_of(runner: ModelRunner) -> DraftBlock | DFlashDrafter:
    """The drafter whose graph ``runner`` executes."""
    head = runner.model.head
    return DFlashDrafter(runner, head) if isinstance(head, DFlashHead) else DraftBlock(runner)
