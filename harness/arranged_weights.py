"""The weights that the native tier stores arranged in its cache folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from harness.tiers import AUTO, arranged_folder


def needs_model_file(tier: str, model: Path) -> bool:
    """Whether the tier of this name reads all of a model file when it opens the model."""
    if tier not in (AUTO, "native"):
        return True
    from accel.native.weight_cache import has_entry

    return not has_entry(arranged_folder(), model)


def remove_arranged(models: Iterable[Path]) -> int:
    """Remove what is stored of model files that still exist; gives the bytes freed."""
    from accel.native.weight_cache import remove_entries

    return remove_entries(arranged_folder(), models)


def arranged_usage() -> tuple[int, int]:
    """The number of stored models and their bytes."""
    from accel.native.weight_cache import usage

    return usage(arranged_folder())
