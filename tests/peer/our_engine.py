"""Logits of the runtime under test, for comparison."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.named_adapters import NamedAdapter


def our_logits(
    path: Path, tokens: Sequence[int], kv_dtype: str = "f32", chunk: int = 128,
    lora: tuple[NamedAdapter, ...] = (), tier: str = "cpu",
) -> NDArray[np.float32]:  # fmt: skip
    """Teacher-forced logits of every position, float32[len(tokens), vocab]. The native tier has the
    bits of the CPU tier in half of its time and memory. The closed session is in cycles: it is
    collected before a caller opens another."""
    options = SessionOptions(
        tier=tier, context=len(tokens), kv_dtype=kv_dtype, chunk=chunk, all_logits=True, lora=lora
    )
    with Session.open(path, options) as session:
        logits = np.empty((len(tokens), session.model.config.vocab), np.float32)
        session.logits(tokens, logits)
    del session
    gc.collect()
    return logits
