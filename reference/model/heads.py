"""Reads the heads that draft for a model, by the architecture of their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reference.model.config.read import DFLASH, EAGLE
from reference.model.config.records import ModelConfig
from reference.model.dflash import DFlashHead, check_mask, read_dflash_head
from reference.model.draft_head import DraftHead, check_sizes
from reference.model.eagle import read_eagle_head
from reference.model.gguf.file import GgufFile

READERS: Mapping[str, Callable[[GgufFile], DraftHead]] = {
    EAGLE: read_eagle_head,
    DFLASH: read_dflash_head,
}


def is_head(file: GgufFile) -> bool:
    """Whether a file is a head."""
    return file.get("general.architecture", str, "") in READERS


def read_head(file: GgufFile) -> DraftHead:
    """The head in ``file``. Raises ModelFileError and UnsupportedModel for a file that is broken or
    of an unknown variant."""
    return READERS[file.require("general.architecture", str)](file)


def check_head(head: DraftHead, target: ModelConfig) -> None:
    """Raise RequestError for the first property in which the head does not fit the model."""
    check_sizes(head, target)
    if isinstance(head, DFlashHead):
        check_mask(head, target)
