"""EAGLE-3 heads: files that draft for one model from the inputs of three of its layers.

A head projects these inputs, concatenated, to a row of its own width. Its only layer attends to the
embeddings of tokens and to the rows of the positions before them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from contract.errors import ModelFileError, RequestError
from contract.lazy_dataclass import dataclass
from reference.model.adapters import TensorFile
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.keys import MAX_WIDTH, Keys
from reference.model.config.read import EAGLE
from reference.model.config.records import ModelConfig
from reference.model.config.rope import read_llama_rope
from reference.model.config.unread import refuse_unread
from reference.model.gguf import GgufFile

STORED = "eagle3:"
"""Prefix of the names of a head's tensors among those of its model."""
ROPE_TABLE = "constant.eagle3_rope_table"
TOKEN_TABLE = "constant.eagle3_tokens"
"""Tables of a head's graph: its rotation, and the model's ids of its tokens."""
LAYERS = "target_layers"
OLDER_LAYERS = "extract_layers"
"""The key of the layers whose inputs a head reads, and its former name."""
TOKENS = "d2t"
"""The tensor with the model's id of each token of a head."""
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
"""Tensors that a head may have for itself instead of the model's."""
READ_LAYERS = 3
ID_LIMIT = 1 << 31


@dataclass(frozen=True)
class EagleHead:
    """An open head. It reads the inputs of ``layers`` of a model of width ``target_hidden``; the
    number of layers stands for the result of the last one. ``fc_norm``: the concatenated inputs are
    normed first. ``normed_residual``: its layer adds to the normed row. ``tokens`` are the model's
    ids of the head's tokens, None if the head has the model's vocabulary."""

    file: GgufFile
    config: ModelConfig
    layers: tuple[int, ...]
    target_hidden: int
    fc_norm: bool
    normed_residual: bool
    tokens: NDArray[np.int32] | None

    @property
    def hidden(self) -> int:
        """The width of its rows."""
        return self.config.hidden

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.file.tensors


@dataclass(frozen=True, slots=True)
class HeadedFile:
    """The tensors of a model file, and those of a head."""

    file: TensorFile
    head: GgufFile

    @property
    def path(self) -> Path:
        """The path of the model file."""
        return self.file.path

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """A tensor's blocks, uint8[rows, row_bytes]."""
        if name.startswith(STORED):
            return self.head.tensor_bytes(name.removeprefix(STORED))
        return self.file.tensor_bytes(name)


def is_head(file: GgufFile) -> bool:
    """Whether a file is an EAGLE-3 head."""
    return file.get("general.architecture", str, "") == EAGLE


def read_head(file: GgufFile) -> EagleHead:
    """The head in ``file``. Raises ModelFileError and UnsupportedModel for a file that is broken or
    of an unknown variant."""
    keys = Keys(file, EAGLE)
    config = require_feed_forward(keys, read_common(keys, read_llama_rope))
    if config.layers != 1:
        raise keys.unsupported("block_count", f"is {config.layers}", "a head has one layer")
    head = EagleHead(
        file,
        replace(config, ropes=(replace(config.ropes[0], table=ROPE_TABLE),)),
        _layers(keys),
        keys.integer("target_hidden_size", 1, MAX_WIDTH, config.hidden),
        file.get(keys.key("norm_before_fc"), bool, False),
        file.get(keys.key("norm_before_residual"), bool, False),
        _tokens(file),
    )
    refuse_unread(keys)
    return head


def _layers(keys: Keys) -> tuple[int, ...]:
    name = LAYERS if keys.has(LAYERS) or not keys.has(OLDER_LAYERS) else OLDER_LAYERS
    value = keys.file.require(keys.key(name), np.ndarray)
    if not np.issubdtype(value.dtype, np.integer) or (value < 0).any():
        raise keys.error(name, f"is {value.tolist()}, must be numbers of layers")
    if len(value) != READ_LAYERS:
        raise keys.unsupported(name, f"has {len(value)} layers", f"a head reads {READ_LAYERS}")
    return tuple(int(layer) for layer in value)


def _tokens(file: GgufFile) -> NDArray[np.int32] | None:
    """The model's ids of the head's tokens."""
    if TOKENS not in file.tensors:
        return None
    ids = file.tensor_array(TOKENS).reshape(-1)
    if (
        not len(ids)
        or len(np.unique(ids)) != len(ids)
        or not 0 <= ids.min() <= ids.max() < ID_LIMIT
    ):
        raise ModelFileError(
            file.path,
            f"tensor {TOKENS}",
            "has an id twice, or one that no token has",
            "convert the head again",
        )
    return ids.astype(np.int32)


def check_head(head: EagleHead, target: ModelConfig) -> None:
    """Raise RequestError for the first property in which the head does not fit the model."""
    if head.target_hidden != target.hidden:
        _refuse(f"reads rows of {head.target_hidden} elements; the model's have {target.hidden}")
    if max(head.layers) > target.layers:
        _refuse(f"reads layer {max(head.layers)}; the model has {target.layers}")
    if head.tokens is not None and int(head.tokens.max()) >= target.vocab:
        _refuse(f"drafts token {head.tokens.max()}; the model has {target.vocab} tokens")
    for name in (EMBEDDING, OUTPUT):
        if not head.has(name) and head.hidden != target.hidden:
            _refuse(
                f"has no {name} and rows of {head.hidden} elements; the model's {name} has "
                f"{target.hidden}"
            )
    if not head.has(OUTPUT) and head.tokens is not None:
        _refuse(f"has no {OUTPUT}, but {len(head.tokens)} tokens of its own")


def _refuse(problem: str) -> NoReturn:
    raise RequestError(
        "draft_model", f"is an EAGLE-3 head that {problem}; take the head of this model"
    )
