"""GGUF model files: ``open_gguf`` maps and checks a file, ``write_gguf`` writes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reference.model.gguf.file import GgufFile, open_gguf
from reference.model.gguf.metadata import Value
from reference.model.gguf.strings import StringArray
from reference.model.gguf.tensors import TensorInfo
from reference.model.gguf.types import GGML_TYPES, GgmlType, GgufType

if TYPE_CHECKING:
    from reference.model.gguf.writer import HOLE, TensorSource, Typed, WritableValue, write_gguf

__all__ = [
    "GGML_TYPES",
    "HOLE",
    "GgmlType",
    "GgufFile",
    "GgufType",
    "StringArray",
    "TensorInfo",
    "TensorSource",
    "Typed",
    "Value",
    "WritableValue",
    "open_gguf",
    "write_gguf",
]


def __getattr__(name: str) -> Any:
    """Import the writer on first use, since running a model only reads files."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reference.model.gguf import writer

    return getattr(writer, name)
