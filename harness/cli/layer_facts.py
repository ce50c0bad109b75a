"""Facts about a model's layers, as JSON values; equal layers share an entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from contract.dtypes import DType
from reference.model.config.records import ModelConfig, Rope
from reference.model.dflash import DFlashHead
from reference.model.draft_head import EMBEDDING, DraftHead
from reference.model.gguf.tensors import TensorInfo
from reference.model.open import Model

EXPERT_TENSOR = "_exps."
"""Part of the names of tensors that stack all experts, whose first axis is the expert."""


def layer_facts(model: Model, kv_dtype: DType) -> dict[str, list[dict[str, Any]]]:
    """``attention``, ``recurrent`` and ``feed_forward``: entries with the ``layers`` they describe.

    ``kv_per_token`` is the bytes per token of one layer's keys and values, stored as ``kv_dtype``,
    which the heads must allow; 0 if the layer reads those of another layer."""
    config = model.config
    recurrent = [n for n in range(config.layers) if config.is_recurrent(n)]
    return {
        "attention": _alike(config.attention_layers, lambda n: _attention(config, n, kv_dtype)),
        "recurrent": _alike(recurrent, lambda n: _recurrent(config)),
        "feed_forward": _alike(_fed(model), lambda n: _feed_forward(model, n)),
    }


def active_parameters(model: Model) -> int:
    """Elements of the tensors used for one token; of experts, the share a token uses.

    Drafting blocks are not counted."""
    return sum(_active(model.config, tensor) for tensor in model.file.tensors.values())


def _active(config: ModelConfig, tensor: TensorInfo) -> int:
    elements = math.prod(tensor.shape)
    block = tensor.name.removeprefix("blk.").partition(".")[0]
    layer = int(block) if tensor.name.startswith("blk.") and block.isdigit() else None
    if layer is not None and layer >= config.layers:
        return 0
    if config.experts is None or layer is None or EXPERT_TENSOR not in tensor.name:
        return elements
    return elements // config.experts.count * config.experts.used[layer]


def _alike(
    layers: Iterable[int], describe: Callable[[int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """One entry for all layers with the same description, in order of their first layer."""
    found: list[dict[str, Any]] = []
    for layer in layers:
        facts = describe(layer)
        for entry in found:
            if entry | facts == entry:
                entry["layers"].append(layer)
                break
        else:
            found.append({"layers": [layer], **facts})
    return found


def _attention(config: ModelConfig, layer: int, kv_dtype: DType) -> dict[str, Any]:
    row_bytes = kv_dtype.row_bytes(config.head_dims[layer])
    owns = config.kv_layers[layer] == layer
    return {
        "heads": config.heads[layer],
        "kv_heads": config.kv_heads[layer],
        "head_dim": config.head_dims[layer],
        "window": abs(config.windows[layer]),
        "chunked": config.windows[layer] < 0,
        "owns_kv": owns,
        "kv_per_token": 2 * config.kv_heads[layer] * row_bytes if owns else 0,
        "rope": _rope(config.ropes[layer]),
    }


def _rope(rope: Rope) -> dict[str, Any]:
    scaled = rope.scaling.yarn or rope.scaling.factor != 1.0
    return {
        "base": rope.base,
        "channels": rope.dims,
        "pairs": "halves" if rope.neox else "neighbours",
        "scaling": ("yarn" if rope.scaling.yarn else "linear") if scaled else None,
        "factor": rope.scaling.factor,
        "divisors": list(rope.factor_tensors),
    }


def _recurrent(config: ModelConfig) -> dict[str, Any]:
    if (short := config.short_conv) is not None:
        return {"kind": "short convolution", "taps": short.taps}
    if (mamba := config.mamba) is not None:
        return {
            "kind": "mamba",
            "heads": mamba.heads,
            "head_dim": mamba.head_dim,
            "state_size": mamba.state_size,
            "taps": mamba.taps,
        }
    net = config.delta_net
    assert net is not None
    return {
        "kind": "delta net",
        "value_heads": net.value_heads,
        "key_heads": net.key_heads,
        "head_dim": net.state_size,
        "taps": net.taps,
    }


def _fed(model: Model) -> list[int]:
    """The layers with a dense block or experts."""
    names = model.file.tensors
    kinds = ("ffn_down", "ffn_down_exps")
    layers = range(model.config.layers)
    return [n for n in layers if any(f"blk.{n}.{kind}.weight" in names for kind in kinds)]


def _feed_forward(model: Model, layer: int) -> dict[str, Any]:
    config, mixture = model.config, model.config.experts
    # With experts, families differ in the meaning of the metadata's width, so look at the tensor.
    dense = f"blk.{layer}.ffn_down.weight" in model.file.tensors
    facts: dict[str, Any] = {"width": config.feed_forward[layer] if dense else 0}
    if mixture is not None and not mixture.is_dense(layer):
        facts["experts"] = mixture.count
        facts["experts_used"] = mixture.used[layer]
        facts["expert_width"] = mixture.widths[layer]
        facts["shared_expert_width"] = mixture.shared_width
    return facts


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
