"""The LoRA adapters that a command names: files, what requests call them, and their scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from contract.errors import RequestError
from contract.lazy_dataclass import dataclass
from harness.console import text_of_name

Scales = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter in the file ``path`` that requests call ``name``. ``scale`` is its scale where a
    request gives none."""

    name: str
    path: Path
    scale: float = 1.0

    def __str__(self) -> str:
        return f"{self.name}={self.path}:{self.scale:g}"


def named_adapters(text: str) -> tuple[NamedAdapter, ...]:
    """The adapters of ``[NAME=]FILE[:SCALE]``, with commas between them; a name is by default that
    of the file. Raises ValueError."""
    found = tuple(map(_named, filter(None, text.split(","))))
    if len({one.name for one in found}) < len(found):
        raise ValueError(text)
    return found


def _named(text: str) -> NamedAdapter:
    name, given, path = text.rpartition("=")
    file, colon, scale = path.rpartition(":")
    if not colon or not _is_number(scale):
        file, scale = path, "1"
    if not file or (given and not name):
        raise ValueError(text)
    found = Path(file).expanduser()
    return NamedAdapter(text_of_name(name or found.stem), found, float(scale))


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) < float("inf")
    except ValueError:
        return False


def default_scales(adapters: Sequence[NamedAdapter]) -> Scales:
    """All adapters, each with its own scale."""
    return tuple((index, one.scale) for index, one in enumerate(adapters))


def scales_by_name(adapters: Sequence[NamedAdapter], given: Mapping[str, float]) -> Scales:
    """The adapters that a request calls by their names. Raises RequestError."""
    indices = {one.name: index for index, one in enumerate(adapters)}
    for name in given:
        if name not in indices:
            known = ", ".join(indices) or "none"
            raise RequestError("lora", f"names {name!r}; the adapters here are {known}")
    return tuple((indices[name], scale) for name, scale in given.items())
