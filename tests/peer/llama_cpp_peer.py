"""llama.cpp through its Python binding: the tokens and logits it gives for a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="the peer tests need llama-cpp-python (pip install 'zinc-rt[peer]')"
)

GGML_TYPE_F32 = 0
GGML_TYPE_F16 = 1
THREADS = 2


class PeerTokenizer:
    """The tokenizer of a GGUF file, by llama.cpp."""

    def __init__(self, path: Path) -> None:
        self._llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False, n_ctx=8)

    def encode(self, text: str, *, parse_special: bool, add_bos: bool) -> list[int]:
        """Token ids; ``add_bos`` adds what the model's own rule adds."""
        return self._llama.tokenize(text.encode(), add_bos=add_bos, special=parse_special)

    def close(self) -> None:
        self._llama.close()


def peer_logits(
    path: Path, tokens: Sequence[int], kv_type: int = GGML_TYPE_F32, chunk: int = 512
) -> NDArray[np.float32]:
    """Teacher-forced logits of every position, float32[len(tokens), vocab]."""
    llama = llama_cpp.Llama(
        str(path),
        n_ctx=max(64, len(tokens)),
        n_batch=chunk,
        n_ubatch=chunk,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        logits_all=True,
        flash_attn=False,
        type_k=kv_type,
        type_v=kv_type,
        verbose=False,
    )
    try:
        llama.eval(list(tokens))
        return llama.scores[: len(tokens)].copy()
    finally:
        llama.close()
