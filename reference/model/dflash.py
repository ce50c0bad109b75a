"""DFlash heads: layers that draft a whole block of tokens in one step.

A block is the last token and a mask token for each draft behind it. Its rows see each other and the
keys of the rows that the model computed before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from contract.dtypes import DEFAULT_KV, DType
from contract.errors import UnsupportedModel
from contract.lazy_dataclass import dataclass
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.dense import PATTERN, WINDOW, refuse_other_sizes, refuse_sliding_base
from reference.model.config.keys import MAX_CONTEXT, MAX_WIDTH, Keys
from reference.model.config.read import DFLASH
from reference.model.config.records import ModelConfig
from reference.model.config.rope import check_text_sections
from reference.model.config.unread import refuse_unread
from reference.model.draft_head import (
    EMBEDDING,
    ID_LIMIT,
    OUTPUT,
    ROPE_TABLE,
    DraftHead,
    read_layers,
    read_tokens,
    refuse_head,
)
from reference.model.gguf.file import GgufFile

MASK = "tokenizer.ggml.mask_token_id"
BLOCK, DEFAULT_BLOCK, MAX_BLOCK = "block_size", 16, 1 << 10
CONNECTIONS = "hyper_connection.count"
SECTIONS = "rope.dimension_sections"
SINKS = "attn_sinks.weight"
ACTIVATION = "hidden_activation"
SCALES: Mapping[str, str] = {
    "embedding_scale": "embedding_scale",
    "logit_scale": "logit_scale",
    "logit_cap": "final_logit_softcapping",
}
"""The keys of the factors of embedding and logits, by their names in a ModelConfig."""
PARTS: Mapping[str, str] = {
    "markov_w": "is part of a Markov head (DSpark), which needs the draft before",
    "conf_proj": "is part of a confidence head (DSpark), which ends a block early",
    "selector_": "is part of a selector (DFlash 2), which chooses among candidates",
    "attn_conv_": "is a convolution (DFlash 2), which mixes neighbouring rows of a block",
    "ffn_conv_": "is a convolution (DFlash 2), which mixes neighbouring rows of a block",
    "hc_": "is of hyper-connections (DSpark of DeepSeek V4), which carry several streams",
    **dict.fromkeys(
        ("attn_k.bias", "attn_k.scale", "attn_v.bias", "attn_v.scale"),
        "changes keys or values, which the model's graph computes without it",
    ),
}
"""Beginnings of the names of tensors that no formula here has, and what they are."""


@dataclass(frozen=True)
class DFlashHead(DraftHead):
    """An open DFlash head, which drafts at most ``block_size`` - 1 tokens at a time. ``mask`` is
    the token that stands for one that is to be drafted."""

    KIND: ClassVar[str] = "a DFlash head"

    block_size: int
    mask: int

    @property
    def owns_output(self) -> bool:
        """Whether its logits are products with a matrix of its own, which may be its embedding."""
        return self.has(OUTPUT) or self.has(EMBEDDING)

    def scaled_as(self, target: ModelConfig) -> ModelConfig:
        """Its configuration. Where it uses the model's embedding or output matrix, factors that its
        file does not name are the model's."""
        said = {name for name, key in SCALES.items() if f"{DFLASH}.{key}" in self.file.metadata}
        own = {"embedding_scale": self.has(EMBEDDING)}
        factors: dict[str, Any] = {
            name: getattr(target, name)
            for name in SCALES
            if name not in said and not own.get(name, self.owns_output)
        }
        return replace(self.config, **factors)

    def kv_dtype(self, requested: DType) -> DType:
        """The storage type of its keys and values where ``requested`` is the model's."""
        sizes = {*self.config.head_dims}
        return DEFAULT_KV if any(size % requested.block_elements for size in sizes) else requested


def read_dflash_head(file: GgufFile) -> DFlashHead:
    """The head in ``file``. Raises ModelFileError and UnsupportedModel for a file that is broken or
    has parts that this build does not compute, which are named."""
    keys = Keys(file, DFLASH)
    _refuse_parts(file, keys)
    config = require_feed_forward(keys, read_common(keys, causal=False))
    if keys.has(SECTIONS):
        check_text_sections(keys, config.ropes[0].dims)
    activation = file.get(keys.key(ACTIVATION), str, "silu")
    if activation != "silu":
        raise keys.unsupported(ACTIVATION, f"is {activation!r}", "this build reads heads with silu")
    head = DFlashHead(
        file,
        replace(
            config,
            ropes=(replace(config.ropes[0], table=ROPE_TABLE),) * config.layers,
            windows=_windows(keys, config),
            sinks=any(name.endswith(SINKS) for name in file.tensors),
            embedding_scale=keys.positive(SCALES["embedding_scale"], 1.0),
            logit_scale=keys.positive(SCALES["logit_scale"], 1.0),
            logit_cap=keys.positive(SCALES["logit_cap"], 0.0, allow_zero=True),
        ),
        read_layers(keys),
        keys.integer("target_hidden_size", 1, MAX_WIDTH, config.hidden),
        read_tokens(file),
        keys.integer(BLOCK, 2, MAX_BLOCK, DEFAULT_BLOCK),
        _mask(file),
    )
    refuse_unread(keys)
    return head


def check_mask(head: DFlashHead, target: ModelConfig) -> None:
    """Raise RequestError for a mask token that the model lacks."""
    if head.mask >= target.vocab:
        refuse_head(head, f"has the mask token {head.mask}; the model has {target.vocab} tokens")


def _mask(file: GgufFile) -> int:
    mask = file.require(MASK, int)
    if not 0 <= mask < ID_LIMIT:
        raise UnsupportedModel(file.path, f"key {MASK}", f"is {mask}", "it must be a token")
    return mask


def _windows(keys: Keys, config: ModelConfig) -> tuple[int, ...]:
    """The window of each layer: of those that the pattern marks, all without a pattern."""
    window = keys.integer(WINDOW, 0, MAX_CONTEXT, 0)
    if not window:
        return config.windows
    refuse_sliding_base(keys, config.ropes[0])
    refuse_other_sizes(keys, config)
    marked = (True,) * config.layers
    if keys.has(PATTERN):
        marked = keys.flags(PATTERN, config.layers, config.blocks)
    return tuple(window if yes else 0 for yes in marked)


def _refuse_parts(file: GgufFile, keys: Keys) -> None:
    """Raise UnsupportedModel for a part that no formula here has."""
    known = "this build reads DFlash heads without such parts"
    for name in file.tensors:
        own = name.split(".", 2)[-1] if name.startswith("blk.") else name
        for beginning, meaning in PARTS.items():
            if own.startswith(beginning):
                raise UnsupportedModel(file.path, f"tensor {name}", meaning, known)
    if keys.integer(CONNECTIONS, 0, MAX_WIDTH, 0):
        raise keys.unsupported(CONNECTIONS, f"means that it {PARTS['hc_']}", known)
    anchor = "sample_from_anchor"
    if file.get(keys.key(anchor), bool, False):
        raise keys.unsupported(anchor, "is true: it drafts by the row of the last token too", known)
