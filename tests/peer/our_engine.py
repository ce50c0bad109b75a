"""Logits of the runtime under test, for comparison."""

import gc
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.named_adapters import NamedAdapter
from tests.peer.binary64_attention import binary64_attention


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


def exact_logits(path: Path, tokens: Sequence[int], chunk: int) -> NDArray[np.float32]:
    """``our_logits`` with attention in binary64. They stay beside the file, so that all
    tests and processes that want them compute them once."""
    digest = hashlib.sha256(repr((list(tokens), chunk)).encode()).hexdigest()[:12]
    stored = path.with_name(f"{path.name}.{digest}.npy")
    if not stored.exists():
        with binary64_attention():
            logits = our_logits(path, tokens, chunk=chunk)
        part = path.with_name(f"{stored.stem}.{os.getpid()}.npy")
        np.save(part, logits)
        os.replace(part, stored)
    found: NDArray[np.float32] = np.load(stored)
    return found
