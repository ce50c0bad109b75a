"""Heads by llama.cpp, through functions of its library that its binding names partly. To be
called in the child process of ``llama_cpp_peer``."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREADS = 1


def head_logits(
    model: str, head: str, tokens: list[int], layers: list[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The inputs of ``layers`` of the model side by side, float32[len(tokens), ..], and the head's
    logits after each of ``tokens`` but the first, -inf for tokens that it does not have."""
    import llama_cpp
    from llama_cpp import llama_cpp_ext

    target, target_context, features = _features(model, tokens, layers)
    drafter, context = _open(head, len(tokens), target_context)
    llama_cpp_ext.llama_set_embeddings_nextn(context, True, False)
    _run(llama_cpp.llama_encode, context, None, features)
    hidden = llama_cpp.llama_model_n_embd(drafter)
    joined = _copied(llama_cpp_ext.llama_get_embeddings_nextn(context), len(tokens), hidden)
    _run(llama_cpp.llama_decode, context, tokens[1:], joined[:-1])
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(drafter))
    logits = _copied(llama_cpp.llama_get_logits(context), len(tokens) - 1, vocab)
    _free((context, target_context), (drafter, target))
    return features, logits


def block_logits(
    model: str, head: str, tokens: list[int], layers: list[int], block: list[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The fused rows of ``tokens`` by a DFlash head, float32[len(tokens), ..], and its logits of
    ``block``, tokens at the positions behind them, without keys of these rows; -inf for tokens that
    it does not have."""
    import llama_cpp
    from llama_cpp import llama_cpp_ext

    target, target_context, features = _features(model, tokens, layers)
    drafter, context = _open(head, len(tokens) + len(block), target_context)
    llama_cpp_ext.llama_set_embeddings_nextn(context, True, True)
    llama_cpp.llama_set_causal_attn(context, False)
    _run(llama_cpp.llama_encode, context, None, features)
    hidden = llama_cpp.llama_model_n_embd(drafter)
    joined = _copied(llama_cpp_ext.llama_get_embeddings_nextn(context), len(tokens), hidden)
    _run(llama_cpp.llama_decode, context, block, None, first=len(tokens))
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(drafter))
    logits = _copied(llama_cpp.llama_get_logits(context), len(block), vocab)
    _free((context, target_context), (drafter, target))
    return joined, logits


def _features(
    model: str, tokens: list[int], layers: list[int]
) -> tuple[Any, Any, NDArray[np.float32]]:
    """The model, its context after ``tokens``, and the inputs of ``layers`` side by side."""
    import llama_cpp

    library = llama_cpp.llama_cpp._lib
    keep = library["_Z30llama_set_embeddings_layer_inpP13llama_contextjb"]
    keep.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool]
    kept = library["_Z30llama_get_embeddings_layer_inpP13llama_contextj"]
    kept.argtypes, kept.restype = [ctypes.c_void_p, ctypes.c_uint32], ctypes.POINTER(ctypes.c_float)
    target, target_context = _open(model, len(tokens), None)
    for layer in {*layers}:
        keep(target_context, layer, True)
    _run(llama_cpp.llama_decode, target_context, tokens, None)
    width = llama_cpp.llama_model_n_embd(target)
    features = np.concatenate(
        [_copied(kept(target_context, layer), len(tokens), width) for layer in layers], axis=1
    )
    return target, target_context, features


def _free(contexts: tuple[Any, ...], models: tuple[Any, ...]) -> None:
    import llama_cpp

    for opened in contexts:
        llama_cpp.llama_free(opened)
    for loaded in models:
        llama_cpp.llama_model_free(loaded)


def _open(path: str, tokens: int, other: Any) -> tuple[Any, Any]:
    """A model and a context of it."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    assert model
    sizes = llama_cpp.llama_context_default_params()
    sizes.n_ctx, sizes.n_batch, sizes.n_ubatch = max(256, tokens), max(256, tokens), 256
    sizes.n_threads = sizes.n_threads_batch = THREADS
    sizes.type_k = sizes.type_v = 0
    sizes.flash_attn_type = 0
    if other is not None:
        sizes.ctx_other = other
    context = llama_cpp.llama_init_from_model(model, sizes)
    assert context
    return model, context


def _run(
    call: Any, context: Any, tokens: list[int] | None, rows: np.ndarray | None, *, first: int = 0
) -> None:
    """Decode or encode ``tokens`` with ``rows`` for each, from position ``first`` on; all give
    results."""
    import llama_cpp

    count = len(tokens if tokens is not None else rows if rows is not None else ())
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    named = (ctypes.c_int32 * count)(*(tokens or ()))
    values = None if rows is None else np.ascontiguousarray(rows, np.float32)
    batch.n_tokens = count
    batch.token = named if tokens is not None else None
    if values is not None:
        batch.embd = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    for n in range(count):
        batch.pos[n], batch.n_seq_id[n], batch.logits[n] = first + n, 1, 1
        batch.seq_id[n][0] = 0
    assert call(context, batch) == 0


def _copied(pointer: Any, rows: int, columns: int) -> NDArray[np.float32]:
    values = np.ctypeslib.as_array(pointer, (rows * columns,)).copy()
    return values.reshape(rows, columns).astype(np.float32)
