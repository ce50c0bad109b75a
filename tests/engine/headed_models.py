"""Synthetic models with an EAGLE-3 or DFlash head in a file beside the model's."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.synth.dflash import BlockForm, write_dflash_head
from harness.synth.eagle import HeadForm, write_eagle_head
from harness.synth.sizes import sized_spec
from reference.model.gguf.file import open_gguf
from reference.model.gguf.writer import TensorSource, write_gguf
from reference.model.heads import read_head
from reference.model.open import Model, open_model


def head_of(path: Path) -> Path | None:
    """The file of a model's head, None for a model without one."""
    head = path.with_suffix(".head")
    return head if head.exists() else None


def headed_model(
    synthetic_model: Callable[..., Path], form: HeadForm | None = None, **fields: Any
) -> Path:
    """A model of these fields, and its EAGLE-3 head, which has no other form for the same
    fields."""
    path = synthetic_model(**fields)
    if head_of(path) is None:
        write_eagle_head(path.with_suffix(".head"), sized_spec("tiny", **fields), form)
    return path


def block_model(
    synthetic_model: Callable[..., Path], form: BlockForm | None = None, **fields: Any
) -> Path:
    """Another name of a model of these fields, and its DFlash head, of one form for the same
    fields."""
    path = synthetic_model(**fields)
    own = path.with_stem(f"{path.stem}-dflash")
    with suppress(FileExistsError):
        own.hardlink_to(path)
    if head_of(own) is None:
        write_dflash_head(own.with_suffix(".head"), sized_spec("tiny", **fields), form)
    return own


def changed(
    model: Path, copy: Path, keys: dict[str, object] | None = None, without: str = "",
    more: str = "", replaced: dict[str, TensorSource] | None = None,
) -> Path:  # fmt: skip
    """A copy of a model's head with other keys, without a tensor, with one ``more``, and with some
    replaced."""
    head = head_of(model)
    assert head is not None
    with open_gguf(head) as file:
        kept = (info for info in file.tensors.values() if info.name != without)
        tensors = {i.name: (i.ggml_type, i.shape, file._view(i).tobytes()) for i in kept}
        if more:
            tensors[more] = next(iter(tensors.values()))
        tensors |= replaced or {}  # type: ignore[arg-type]
        write_gguf(copy, {**file.metadata, **(keys or {})}, tensors)  # type: ignore[dict-item]
    return copy


def open_headed(path: Path, owned: ExitStack) -> Model:
    """The model in a file with its head if there is one; ``owned`` closes both."""
    model = open_model(path)
    owned.callback(model.file.close)
    head = head_of(path)
    if head is None:
        return model
    return replace(model, head=read_head(owned.enter_context(open_gguf(head))))
