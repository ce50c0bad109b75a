"""Model files that are copies of others with something changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from reference.model.gguf.file import open_gguf
from reference.model.gguf.writer import TensorSource, write_gguf

Change = Callable[[dict[str, Any], dict[str, TensorSource]], None]


def write_changed(source: Path, path: Path, change: Change) -> Path:
    """Write a copy of a model file after ``change(metadata, tensors)``; returns its path."""
    with open_gguf(source) as file:
        metadata = dict(file.metadata)
        tensors: dict[str, TensorSource] = {
            one.name: (one.ggml_type, one.shape, np.array(file.tensor_bytes(one.name)))
            for one in file.tensors.values()
        }
        change(metadata, tensors)
        write_gguf(path, metadata, tensors)
    return path
