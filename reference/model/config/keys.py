"""Typed, range-checked access to the metadata keys of one architecture."""

from __future__ import annotations

from dataclasses import field

import numpy as np

from contract.errors import ModelFileError, UnsupportedModel
from contract.lazy_dataclass import dataclass
from reference.model.gguf.file import GgufFile

MIN_NUMBER, MAX_NUMBER = 2.0**-149, (2.0 - 2.0**-23) * 2.0**127
"""The smallest and the largest binary32 number above 0."""
MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
MAX_CONTEXT = 1 << 24
"""Largest context a file may declare, in tokens; public models stay far below the bounds here."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Reads the keys ``architecture.*`` of ``file`` and records in ``used`` which were looked at.

    Every error names the file and the key."""

    file: GgufFile
    architecture: str
    used: set[str] = field(default_factory=set)

    def key(self, name: str) -> str:
        """The full name of a key."""
        self.used.add(name)
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the file has the key."""
        return self.key(name) in self.file.metadata

    def error(self, name: str, problem: str) -> ModelFileError:
        """The error for a value that contradicts the rest of the file."""
        return ModelFileError(
            self.file.path, f"key {self.key(name)}", problem, "the file was converted wrongly"
        )

    def file_error(self, key: str, problem: str) -> ModelFileError:
        """The same for a key without the architecture's name."""
        return ModelFileError(
            self.file.path, f"key {key}", problem, "the file was converted wrongly"
        )

    def unsupported(self, name: str, problem: str, supported: str) -> UnsupportedModel:
        """The error for a value that this build does not implement."""
        return UnsupportedModel(self.file.path, f"key {self.key(name)}", problem, supported)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer from ``low`` to ``high``; required when there is no default."""
        if default is None:
            value = self.file.require(self.key(name), int)
        else:
            value = self.file.get(self.key(name), int, default)
        if not low <= value <= high:
            raise self.error(name, f"is {value}, must be {low} to {high}")
        return value

    def positive(self, name: str, default: float | None = None, allow_zero: bool = False) -> float:
        """A binary32 number above 0; required when there is no default."""
        if default is None:
            value = self.file.require(self.key(name), float)
        else:
            value = self.file.get(self.key(name), float, default)
        if not (MIN_NUMBER <= value <= MAX_NUMBER or (value == 0 and allow_zero)):
            raise self.error(name, f"is {value}, must be a positive number")
        return value

    def factor(self, name: str) -> float:
        """A positive number; 1 where the file has none, or 0."""
        return self.positive(name, 0.0, allow_zero=True) or 1.0

    def flag(self, name: str, default: bool) -> bool:
        """Yes or no."""
        return self.file.get(self.key(name), bool, default)

    def per_layer(
        self, name: str, layers: int, blocks: int, low: int, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """A value for each of ``layers``, from a scalar or from an array of exactly ``blocks``
        values."""
        value = self.file.metadata.get(self.key(name))
        if value is None and default is not None:
            return default
        if not isinstance(value, np.ndarray):
            return (self.integer(name, low, MAX_WIDTH),) * layers
        if len(value) != blocks or not np.issubdtype(value.dtype, np.integer):
            raise self.error(name, f"has {len(value)} {value.dtype} entries for {blocks} layers")
        if value.min() < low or value.max() > MAX_WIDTH:
            raise self.error(name, f"has entries outside {low} to {MAX_WIDTH}")
        return tuple(int(entry) for entry in value[:layers])

    def flags(self, name: str, layers: int, blocks: int) -> tuple[bool, ...]:
        """A bool for each of ``layers``, from a required array of that or of ``blocks`` bools."""
        value = self.file.require(self.key(name), np.ndarray)
        if len(value) not in (layers, blocks) or not set(value.tolist()) <= {0, 1}:
            raise self.error(
                name, f"has {len(value)} {value.dtype} entries, must be {blocks} times yes or no"
            )
        return tuple(bool(entry) for entry in value[:layers])
