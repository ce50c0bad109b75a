"""Access to a file's tensors by name, with the shapes that a family's formulas need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from contract.dtypes import F32, DType
from contract.errors import ModelFileError, UnsupportedModel
from contract.ir.graph import BufferKind, GraphBuilder, View
from contract.ir.source import RowSlice, WeightSource
from contract.lazy_dataclass import dataclass
from reference.model.adapters import NO_ADAPTERS, Adapters
from reference.model.draft_head import DraftHead
from reference.model.families.smooth_keys import Channels, Powers
from reference.model.gguf.tensors import TensorInfo


@dataclass(slots=True)
class ModelTensors:
    """The tensors of one file, and which of them a family has used.

    ``parts`` maps a tensor that holds several matrices to the rows used so far of one group of
    rows. ``powers`` maps a layer whose keys have outliers to its powers of two. Requests may use
    ``adapters``, of which ``adapted`` are the tensors that a family has read. ``head`` is what
    reads the inputs of layers, None in graphs that keep none for it. ``prefix`` begins the names of
    the tensors in graphs."""

    path: str
    tensors: Mapping[str, TensorInfo]
    powers: Mapping[int, Powers] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    parts: dict[str, set[int]] = field(default_factory=dict)
    adapters: Adapters = NO_ADAPTERS
    adapted: set[str] = field(default_factory=set)
    head: DraftHead | None = None
    prefix: str = ""

    @property
    def owner(self) -> str:
        """The beginning of the names of weights in graphs."""
        return "head" if self.prefix else "model"

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor of this name."""
        return name in self.tensors

    def take(self, name: str, *shape: int, rows: RowSlice | None = None) -> DType:
        """Check that ``name`` exists and that ``rows`` of it have ``shape``, and return its type.

        The tensor counts as used once all of its rows are taken. Raises ModelFileError for a
        missing tensor or another shape, UnsupportedModel for a type this build cannot compute with.
        """
        if rows is not None:
            whole = shape[-2] * rows.group // len(rows.selected())
            shape = (*shape[:-2], whole, shape[-1])
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(
                self.path, f"tensor {name}", "is missing", f"expected {list(shape)}"
            )
        if info.shape != shape:
            raise ModelFileError(
                self.path,
                f"tensor {name}",
                f"has shape {list(info.shape)}",
                f"the metadata asks for {list(shape)}",
            )
        if info.dtype is None:
            raise UnsupportedModel(
                self.path,
                f"tensor {name}",
                f"is of type {info.ggml_type}",
                "this build has no arithmetic for it; use another quantization of the model",
            )
        taken = self.parts.setdefault(name, set())
        if rows is not None:
            taken.update(rows.selected())
        if rows is None or len(taken) == rows.group:
            self.used.add(name)
        return info.dtype

    def weight(
        self,
        builder: GraphBuilder,
        logical: str,
        name: str,
        *shape: int,
        rows: RowSlice | None = None,
        powers: Channels = (),
    ) -> View:
        """Declare tensor ``name``, or ``rows`` of it, as buffer ``logical`` of ``shape``.

        Columns of F32 tensors can be multiplied by powers of two, given as exponents."""
        dtype = self.take(name, *shape, rows=rows)
        source = str(WeightSource(self.prefix + name, rows, powers if any(powers) else ()))
        return builder.buffer(logical, BufferKind.WEIGHT, dtype, shape, source=source)

    def parameters(
        self, builder: GraphBuilder, logical: str, name: str, *shape: int, powers: Channels = ()
    ) -> View:
        """Declare an F32 tensor: norm weights, biases, scales, convolution taps."""
        self._check_f32(name)
        return self.weight(builder, logical, name, *shape, powers=powers)

    def reshaped(
        self,
        builder: GraphBuilder,
        logical: str,
        name: str,
        shape: tuple[int, ...],
        stored: tuple[int, ...],
    ) -> View:
        """Declare an F32 tensor of ``stored`` shape as ``shape``. Files that llama.cpp's quantizer
        wrote lack outer axes of one element."""
        self._check_f32(name)
        info = self.tensors.get(name)
        while info is not None and len(info.shape) < len(stored) and stored[0] == 1:
            stored = stored[1:]
        self.take(name, *stored)
        return builder.buffer(logical, BufferKind.WEIGHT, F32, shape, source=name)

    def vector(
        self,
        builder: GraphBuilder,
        logical: str,
        name: str,
        *shape: int,
        rows: RowSlice | None = None,
    ) -> View:
        """Declare an F32 matrix, or ``rows`` of it, as a vector of its elements."""
        self._check_f32(name)
        self.take(name, *shape, rows=rows)
        source = str(WeightSource(name, rows))
        flat = (math.prod(shape),)
        return builder.buffer(logical, BufferKind.WEIGHT, F32, flat, source=source)

    def _check_f32(self, name: str) -> None:
        info = self.tensors.get(name)
        if info is not None and info.dtype is not F32:
            raise UnsupportedModel(
                self.path, f"tensor {name}", f"is of type {info.ggml_type}", "expected f32"
            )

    def reject_unused(self, architecture: str, ignored: tuple[str, ...] = ()) -> None:
        """Raise UnsupportedModel for an unused tensor, of the file or of an adapter: the model is
        not what its metadata says.

        Names that begin with one of ``ignored`` may be unused."""
        unused = sorted(
            name for name in set(self.tensors) - self.used if not name.startswith(ignored)
        )
        if unused:
            raise UnsupportedModel(
                self.path,
                f"tensor {unused[0]}",
                f"is not part of a {architecture} model ({len(unused)} such tensors)",
                "the file belongs to a variant this build does not know",
            )
        self.adapters.reject_unread(self.adapted, ignored)
