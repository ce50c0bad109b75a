"""What ``inspect`` tells of a head."""

from __future__ import annotations

from typing import Any

from reference.model.dflash import DFlashHead
from reference.model.draft_head import EMBEDDING, DraftHead


def head_facts(head: DraftHead) -> dict[str, Any]:
    """The widths and layers of a head; ``tokens`` None are those of its model, ``block`` None means
    that it drafts one token at a time."""
    return {
        "kind": head.KIND,
        "layers": head.config.layers,
        "block": head.block_size if isinstance(head, DFlashHead) else None,
        "target_hidden": head.target_hidden,
        "target_layers": list(head.layers),
        "hidden": head.hidden,
        "tokens": None if head.tokens is None else len(head.tokens),
        "own_embedding": head.has(EMBEDDING),
        "own_output": head.owns_output,
        "weights": sum(tensor.nbytes for tensor in head.file.tensors.values()),
    }
