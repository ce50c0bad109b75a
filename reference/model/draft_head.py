"""What heads have in common: files that draft for one model from the inputs of some of its layers.

A head projects these inputs, side by side, to a row of its own width."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NoReturn

import numpy as np

from contract.arrays import Bytes, Ints
from contract.errors import ModelFileError, RequestError, UnsupportedModel
from contract.lazy_dataclass import dataclass
from reference.model.adapters import TensorFile
from reference.model.config.keys import MAX_LAYERS, Keys
from reference.model.config.records import ModelConfig
from reference.model.gguf.file import GgufFile

STORED = "head:"
"""Prefix of the names of a head's tensors among those of its model."""
ROPE_TABLE = "constant.head_rope_table"
TOKEN_TABLE = "constant.head_tokens"
"""Tables of a head's graph: its rotation, and the model's ids of its tokens."""
LAYERS = "target_layers"
"""The key of the layers whose inputs a head reads."""
TOKENS = "d2t"
"""The tensor with the model's id of each token of a head."""
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
"""Tensors that a head may have for itself instead of the model's."""
ID_TYPES = "i64", "i32"
"""The types that the ids of a head's tokens may have."""
ID_LIMIT = 1 << 31


@dataclass(frozen=True)
class DraftHead:
    """An open head. It reads the inputs of ``layers`` of a model of width ``target_hidden``; the
    number after the last layer stands for the result of that layer. ``tokens`` are the model's ids
    of the head's tokens, None if the head has the model's vocabulary."""

    KIND: ClassVar[str] = "a head"
    """What errors and descriptions call it."""

    file: GgufFile
    config: ModelConfig
    layers: tuple[int, ...]
    target_hidden: int
    tokens: Ints | None

    @property
    def hidden(self) -> int:
        """The width of its rows."""
        return self.config.hidden

    @property
    def norms_states(self) -> bool:
        """Whether the model's graph norms what it reads of its layers."""
        return True

    @property
    def owns_output(self) -> bool:
        """Whether its logits are products with a matrix of its own."""
        return self.has(OUTPUT)

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.file.tensors


@dataclass(frozen=True, slots=True)
class HeadedFile:
    """The tensors of a model file, and those of a head."""

    file: TensorFile
    head: GgufFile

    def path_of(self, name: str) -> Path:
        """The path of the file that holds a tensor."""
        return self.head.path if name.startswith(STORED) else self.file.path_of(name)

    def tensor_bytes(self, name: str) -> Bytes:
        """A tensor's blocks, uint8[rows, row_bytes]."""
        if name.startswith(STORED):
            return self.head.tensor_bytes(name.removeprefix(STORED))
        return self.file.tensor_bytes(name)


def read_layers(keys: Keys, name: str = LAYERS) -> tuple[int, ...]:
    """The layers in the key ``name``. Raises ModelFileError unless they are numbers of layers."""
    value = keys.file.require(keys.key(name), np.ndarray)
    if (
        not 0 < len(value) <= MAX_LAYERS
        or not np.issubdtype(value.dtype, np.integer)
        or (value < 0).any()
    ):
        raise keys.error(
            name, f"has {len(value)} {value.dtype} entries, must be up to {MAX_LAYERS} layers"
        )
    return tuple(int(layer) for layer in value)


def read_tokens(file: GgufFile) -> Ints | None:
    """The model's ids of the head's tokens, None if the file has no list of them."""
    if TOKENS not in file.tensors:
        return None
    stored = file.tensors[TOKENS].ggml_type.name
    if stored not in ID_TYPES:
        raise UnsupportedModel(
            file.path, f"tensor {TOKENS}", f"is of type {stored}", f"it holds {ID_TYPES[0]}"
        )
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


def check_sizes(head: DraftHead, target: ModelConfig) -> None:
    """Raise RequestError for the first property in which the head does not fit the model."""
    if head.target_hidden != target.hidden:
        refuse_head(
            head, f"reads rows of {head.target_hidden} elements; the model's have {target.hidden}"
        )
    if max(head.layers) > target.layers:
        refuse_head(head, f"reads layer {max(head.layers)}; the model has {target.layers}")
    if head.tokens is not None and int(head.tokens.max()) >= target.vocab:
        refuse_head(head, f"drafts token {head.tokens.max()}; the model has {target.vocab} tokens")
    for name in (EMBEDDING, OUTPUT):
        if not head.has(name) and head.hidden != target.hidden:
            refuse_head(
                head,
                f"has no {name} and rows of {head.hidden} elements; the model's {name} has "
                f"{target.hidden}",
            )
    if not head.has(OUTPUT) and head.tokens is not None:
        refuse_head(head, f"has no {OUTPUT}, but {len(head.tokens)} tokens of its own")


def refuse_head(head: DraftHead, problem: str) -> NoReturn:
    """Raise RequestError for a head that does not fit its model."""
    raise RequestError("draft_model", f"is {head.KIND} that {problem}; take the head of this model")
