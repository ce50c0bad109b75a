"""The leaves of receipts: a digest of the row of logits that each token was sampled from."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from harness.digest import RowDigests, row_digest
from reference.ops.row_digest import row_digest as row_digest_by_rule
from reference.runner import LOGITS, ROW_DIGEST

ROW_LEAVES = 1
"""The form of leaves that are SHA-256 of a row; in others they are that of its spans' digests."""


def digest_of_spans(words: NDArray[np.float32]) -> str:
    """SHA-256, hex, of the digests of a row's spans (rule R12), as the engine gives them."""
    return hashlib.sha256(np.ascontiguousarray(words, "<f4").data).hexdigest()


def tree_digest(row: NDArray[np.float32]) -> str:
    """``digest_of_spans`` of a row of logits."""
    digests = row_digest_by_rule(logits=row[None], digested=np.ones(1, np.int32))
    return digest_of_spans(digests[0].view(np.float32))


def leaves_of_rows(form: int, digests: bool) -> tuple[RowDigests, str]:
    """What makes leaves of a form, and the output that it is given; ``digests`` says that the
    engine makes those of spans."""
    if form == ROW_LEAVES:
        return RowDigests(row_digest), LOGITS
    if digests:
        return RowDigests(digest_of_spans), ROW_DIGEST
    return RowDigests(tree_digest), LOGITS
