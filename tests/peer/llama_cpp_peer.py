"""llama.cpp through its Python binding: the tokens and logits it gives for a file.

It runs in a child process. Only functions called there import the binding, whose native code was
built for one processor."""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.peer.child import Child
from tests.peer.llama_cpp_heads import block_logits, head_logits

NAME = "llama.cpp"
GGML_TYPE_F32 = 0
GGML_TYPE_F16 = 1
GGML_TYPE_Q4_0 = 2
GGML_TYPE_Q8_0 = 8
THREADS = 1
"""Several wait for one another by spinning: 100 times as long where other work runs beside them."""


class Peer:
    """llama.cpp in a child process; its crash fails the test that asked."""

    def __init__(self) -> None:
        self._child = Child(NAME)

    def encode(
        self, path: Path, texts: Iterable[str], *, parse_special: bool, add_bos: bool
    ) -> list[list[int]]:
        """Token ids of every text; ``add_bos`` adds what the model's own rule adds."""
        return self._child.call(_encode, str(path), list(texts), parse_special, add_bos)

    def logits(
        self, path: Path, tokens: Sequence[int], kv_type: int = GGML_TYPE_F32, chunk: int = 512,
        lora: tuple[Path, float] | None = None, flash: bool = False, every: int = 1,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Teacher-forced logits of every position, or of one of ``every``, float32[.., vocab].

        ``lora`` is the file of an adapter, and its scale. Quantized values need ``flash``
        attention."""
        adapter = (None, 1.0) if lora is None else (str(lora[0]), lora[1])
        return self._child.call(
            _logits, str(path), list(tokens), kv_type, chunk, adapter, flash, every
        )

    def head_logits(
        self, path: Path, head: Path, tokens: Sequence[int], layers: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What ``llama_cpp_heads.head_logits`` gives."""
        return self._child.call(head_logits, str(path), str(head), list(tokens), list(layers))

    def block_logits(
        self, path: Path, head: Path, tokens: Sequence[int], layers: Sequence[int],
        block: Sequence[int],
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # fmt: skip
        """What ``llama_cpp_heads.block_logits`` gives."""
        given = str(path), str(head), list(tokens), list(layers), list(block)
        return self._child.call(block_logits, *given)

    def quantize(self, source: Path, out: Path, file_type: int) -> Path:
        """Write ``source`` in the mixture ``file_type`` to ``out``, and return that."""
        status = self._child.call(_quantize, str(source), str(out), file_type)
        assert status == 0
        return out

    def close(self) -> None:
        """End the child process."""
        self._child.close()


@functools.lru_cache(maxsize=1)
def _vocabulary(path: str) -> Any:
    import llama_cpp

    return llama_cpp.Llama(path, vocab_only=True, verbose=False, n_ctx=8)


def _encode(path: str, texts: list[str], parse_special: bool, add_bos: bool) -> list[list[int]]:
    llama = _vocabulary(path)
    return [llama.tokenize(t.encode(), add_bos=add_bos, special=parse_special) for t in texts]


def _logits(
    path: str, tokens: list[int], kv_type: int, chunk: int, adapter: tuple[str | None, float],
    flash: bool, every: int,
) -> NDArray[np.float32]:  # fmt: skip
    import llama_cpp

    llama = llama_cpp.Llama(
        path,
        n_ctx=max(64, len(tokens)),
        n_batch=chunk,
        n_ubatch=chunk,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        logits_all=True,
        flash_attn=flash,
        # As in llama.cpp's own programs: what the file says.
        yarn_attn_factor=-1.0,
        yarn_beta_fast=-1.0,
        yarn_beta_slow=-1.0,
        type_k=kv_type,
        type_v=kv_type,
        lora_path=adapter[0],
        lora_scale=adapter[1],
        verbose=False,
    )
    try:
        llama.eval(tokens)
        scores: NDArray[np.float32] = llama.scores[: len(tokens) : every].copy()
        return scores
    finally:
        llama.close()


def _quantize(source: str, out: str, file_type: int) -> int:
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = file_type
    parameters.nthread = THREADS
    return int(
        llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(parameters))
    )
