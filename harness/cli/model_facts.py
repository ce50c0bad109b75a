"""What a model file is, as JSON values: also of files this build cannot run."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import BY_NAME
from contract.errors import ZincError
from contract.ir.cost import graph_cost
from contract.ir.nodes import BufferDecl, BufferKind, Graph
from contract.ir.scratch import buffer_bytes, plan_scratch
from contract.shape_key import ShapeKey
from harness.generate import checked_context
from reference.memory.pages import pages_for
from reference.model.config import read_config
from reference.model.families.tensors import Limits
from reference.model.gguf import GgufFile, StringArray, Value
from reference.model.open import Model
from reference.model.tokenizer import load_tokenizer

SHOWN_CHARACTERS = 200
"""Longest text shown whole in a summary."""
SHOWN_ITEMS = 5
"""Items of an array shown in a summary."""


def file_facts(file: GgufFile) -> dict[str, Any]:
    """Size, shards, metadata, tensors and the types they are stored in. Bytes everywhere."""
    tensors = file.tensors.values()
    mix: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        row = mix.setdefault(tensor.ggml_type.name, {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += math.prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    return {
        "path": str(file.path),
        "bytes": file.size,
        "shards": len(file.shards),
        "gguf_version": file.version,
        "architecture": json_value(file.metadata.get("general.architecture")),
        "name": json_value(file.metadata.get("general.name")),
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "types": dict(sorted(mix.items(), key=lambda item: -item[1]["bytes"])),
        "metadata": {key: summary(value) for key, value in file.metadata.items()},
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "type": tensor.ggml_type.name,
                "bytes": tensor.nbytes,
                "offset": tensor.offset,
                "shard": tensor.shard,
            }
            for tensor in tensors
        ],
    }


def vocabulary_facts(file: GgufFile) -> dict[str, Any]:
    """Size and special tokens, or ``problem``: why the tokenizer cannot be used."""
    try:
        tokenizer = load_tokenizer(file.metadata, str(file.path))
        return {
            "model": json_value(file.metadata.get("tokenizer.ggml.model")),
            "pre_tokenizer": json_value(file.metadata.get("tokenizer.ggml.pre")),
            "tokens": tokenizer.vocab_size,
            "bos": _token(tokenizer, tokenizer.bos_id),
            "eos": _token(tokenizer, tokenizer.eos_id),
            "adds_bos": tokenizer.add_bos,
            "end_of_generation": [_token(tokenizer, t) for t in sorted(tokenizer.eog_ids)],
            "chat_template": "tokenizer.chat_template" in file.metadata,
        }
    except ZincError as error:
        return {"problem": str(error)}


def run_facts(file: GgufFile, *, context: int | None, kv_dtype: str, chunk: int) -> dict[str, Any]:
    """Sizes, memory and work of the forward pass, or ``problem``: why there is none.

    Work is that of one decode token with ``context`` positions to attend to. RequestError when
    the model has no such context.
    """
    try:
        model = Model(file, read_config(file))
        # The graph is built for the shortest context first: whether a file can run is a matter of
        # the file, whether the context exists is a matter of the request.
        model.graph(Limits(slots=1, context=PAGE_TOKENS, pages=1))
    except ZincError as error:
        return {"problem": str(error)}
    positions = checked_context(model, context)
    config = model.config
    graph = model.graph(
        Limits(slots=1, context=positions, pages=pages_for(positions), kv_dtype=BY_NAME[kv_dtype])
    )
    return {
        "layers": config.layers,
        "hidden": config.hidden,
        "heads": _per_layer(config.heads),
        "kv_heads": _per_layer(config.kv_heads),
        "head_dim": _per_layer(config.head_dims),
        "feed_forward": _per_layer(config.feed_forward),
        "longest_context": config.context,
        "memory": memory_facts(graph, positions, min(chunk, positions), kv_dtype),
        "graph": graph_facts(graph, positions),
    }


def memory_facts(graph: Graph, context: int, chunk: int, kv_dtype: str) -> dict[str, Any]:
    """Bytes one session needs: weights, KV pages, one prefill step of ``chunk`` tokens."""
    step = ShapeKey(chunk + 1, 1)

    def total(*kinds: BufferKind) -> int:
        return sum(buffer_bytes(decl, step) for decl in graph.of_kind(*kinds))

    weights, kv = total(BufferKind.WEIGHT), total(BufferKind.STATE)
    scratch = plan_scratch(graph, step).nbytes
    step_data = total(BufferKind.CONSTANT, BufferKind.REQUEST, BufferKind.OUTPUT)
    return {
        "context": context,
        "chunk": chunk,
        "kv_dtype": kv_dtype,
        "weights": weights,
        "kv_per_token": sum(_bytes_per_position(decl, step) for decl in _paged(graph)),
        "kv": kv,
        "scratch": scratch,
        "step_data": step_data,
        "total": weights + kv + scratch + step_data,
    }


def graph_facts(graph: Graph, context: int) -> dict[str, Any]:
    """Nodes by opcode, and the bytes and FLOPs of one decode token."""
    work = graph_cost(graph, ShapeKey(1, 1), context)
    counts = Counter(node.opcode.name for node in graph.nodes)
    return {
        "nodes": len(graph.nodes),
        "opcodes": dict(counts.most_common()),
        "bytes_per_token": work.bytes_moved,
        "flops_per_token": work.flops,
    }


def summary(value: Value | None) -> Any:
    """A metadata value as JSON; long texts and arrays are cut, saying how long they are."""
    if isinstance(value, np.ndarray | StringArray):
        kind = "string" if isinstance(value, StringArray) else value.dtype.name
        items = [_short(json_value(value[i])) for i in range(min(len(value), SHOWN_ITEMS))]
        return {"array": kind, "length": len(value), "first": items}
    return _short(json_value(value))


def json_value(value: Any) -> Any:
    """A metadata value as JSON has it, whole; numbers JSON lacks become text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray | StringArray):
        return [json_value(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
        return f"{value[:SHOWN_CHARACTERS]}... ({len(value):,} characters)"
    return value


def _token(tokenizer: Any, token: int | None) -> dict[str, Any] | None:
    return None if token is None else {"id": token, "text": tokenizer.token_text(token)}


def _per_layer(values: tuple[int, ...]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else list(values)


def _paged(graph: Graph) -> list[BufferDecl]:
    return [decl for decl in graph.of_kind(BufferKind.STATE) if PAGE_TOKENS in decl.shape[1:-1]]


def _bytes_per_position(decl: BufferDecl, step: ShapeKey) -> int:
    pages = decl.shape[0]
    assert isinstance(pages, int)
    return buffer_bytes(decl, step) // (pages * PAGE_TOKENS)
