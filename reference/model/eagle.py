"""EAGLE-3 heads: one layer that attends to the embeddings of tokens and to the rows of the
positions before them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from contract.lazy_dataclass import dataclass
from reference.model.config.common import read_common, require_feed_forward
from reference.model.config.keys import MAX_WIDTH, Keys
from reference.model.config.read import EAGLE
from reference.model.config.rope import read_llama_rope
from reference.model.config.unread import refuse_unread
from reference.model.draft_head import LAYERS, ROPE_TABLE, DraftHead, read_layers, read_tokens
from reference.model.gguf.file import GgufFile

OLDER_LAYERS = "extract_layers"
"""The former name of the key of the layers whose inputs a head reads."""
READ_LAYERS = 3


@dataclass(frozen=True)
class EagleHead(DraftHead):
    """An open EAGLE-3 head. ``fc_norm``: the concatenated inputs are normed first.
    ``normed_residual``: its layer adds to the normed row."""

    KIND: ClassVar[str] = "an EAGLE-3 head"

    fc_norm: bool
    normed_residual: bool

    @property
    def norms_states(self) -> bool:
        """Whether the concatenated inputs are normed."""
        return self.fc_norm


def read_eagle_head(file: GgufFile) -> EagleHead:
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
        read_tokens(file),
        file.get(keys.key("norm_before_fc"), bool, False),
        file.get(keys.key("norm_before_residual"), bool, False),
    )
    refuse_unread(keys)
    return head


def _layers(keys: Keys) -> tuple[int, ...]:
    name = LAYERS if keys.has(LAYERS) or not keys.has(OLDER_LAYERS) else OLDER_LAYERS
    layers = read_layers(keys, name)
    if len(layers) != READ_LAYERS:
        raise keys.unsupported(name, f"has {len(layers)} layers", f"a head reads {READ_LAYERS}")
    return layers
