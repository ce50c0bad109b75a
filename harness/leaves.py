"""The leaves of a receipt: for each token, a digest of the row of logits that it was sampled
from."""

from __future__ import annotations

import hashlib

import numpy as np

from contract.arrays import Floats
from harness.digest import RowDigests, row_digest
from reference.ops.row_digest import row_digest as row_digest_by_rule
from reference.runner import LOGITS, ROW_DIGEST

ROW_LEAVES = 1
"""In this form a leaf is the SHA-256 of the whole row. In every other form it is the SHA-256 of the
digests of the row's spans."""


def digest_of_spans(words: Floats) -> str:
    """SHA-256, in hex, of the digests of a row's spans as the engine returns them. The op
    ``row_digest`` defines spans and their digests."""
    return hashlib.sha256(np.ascontiguousarray(words, "<f4").data).hexdigest()


def tree_digest(row: Floats) -> str:
    """``digest_of_spans`` of a row of logits."""
    digests = row_digest_by_rule(logits=row[None], digested=np.ones(1, np.int32))
    return digest_of_spans(digests[0].view(np.float32))


def leaves_of_rows(form: int, digests: bool) -> tuple[RowDigests, str]:
    """The function that makes the leaves of a form, and the name of the model output that it reads.
    ``digests`` says that the engine computes the digests of spans."""
    if form == ROW_LEAVES:
        return RowDigests(row_digest), LOGITS
    if digests:
        return RowDigests(digest_of_spans), ROW_DIGEST
    return RowDigests(tree_digest), LOGITS
