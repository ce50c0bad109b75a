"""Opens a model: everything about a file that does not depend on a tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path

from contract.errors import ZincError
from contract.ir.graph import Graph
from contract.lazy_dataclass import dataclass
from reference.limits import Limits
from reference.model.adapters import NO_ADAPTERS, AdaptedFile, Adapters, TensorFile, open_adapter
from reference.model.config import ModelConfig, read_config
from reference.model.families import build_graph
from reference.model.families.draft_block import build_draft_block
from reference.model.families.smooth_keys import Powers, equalising_powers
from reference.model.families.tensors import ModelTensors
from reference.model.gguf import GgufFile, open_gguf
from reference.model.tokenizer import Tokenizer, load_tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True)
class Model:
    """An open model file with its checked configuration, and the adapters that requests may use.
    Close ``file`` to close a model without adapters."""

    file: GgufFile
    config: ModelConfig
    adapters: Adapters = field(default=NO_ADAPTERS, kw_only=True)
    _latest: dict[Limits, Graph] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def close(self) -> None:
        """Close the model and its adapters."""
        for file in (self.file, *(adapter.file for adapter in self.adapters.opened)):
            file.close()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer. Raises ModelFileError when there is none."""
        return load_tokenizer(self.file.metadata, str(self.file.path))

    @property
    def chat_template(self) -> str | None:
        """The file's Jinja chat template, or None."""
        return self.file.get(TEMPLATE_KEY, str, "") or None

    @cached_property
    def _powers(self) -> dict[int, Powers]:
        return equalising_powers(self.config, self.file)

    def graph(self, limits: Limits) -> Graph:
        """The verified graph of the forward pass for an engine with ``limits``.

        The latest graph is cached, since the memory plan and the runner both need it."""
        graph = self._latest.get(limits)
        if graph is None:
            tensors = self._tensors()
            if limits.adapters:
                tensors.adapters = self.adapters
            graph = build_graph(self.config, tensors, limits)
            self._latest.clear()
            self._latest[limits] = graph
        return graph

    @cached_property
    def draft_problem(self) -> str | None:
        """The reason why the file's draft block cannot be used, None where it can."""
        try:
            self.draft_graph(Limits(slots=1, context=16, pages=1, hidden_rows=1))
        except ZincError as error:
            return str(error)
        return None

    def draft_graph(self, limits: Limits) -> Graph:
        """The verified graph of the draft block for an engine with ``limits``."""
        return build_draft_block(self.config, self._tensors(), limits)

    @property
    def tensors(self) -> TensorFile:
        """The tensors that graphs read: the file's, and those of adapters."""
        return AdaptedFile(self.file, self.adapters) if self.adapters.opened else self.file

    def _tensors(self) -> ModelTensors:
        return ModelTensors(str(self.file.path), self.file.tensors, self._powers)


def open_model(path: str | Path, adapters: Sequence[Path] = ()) -> Model:
    """Map and check a model file, and the files of adapters. Raises ModelFileError or
    UnsupportedModel."""
    file = open_gguf(path)
    try:
        config = read_config(file)
        opened = Adapters(tuple(open_adapter(adapter, file) for adapter in adapters))
        return Model(file, config, adapters=opened)
    except BaseException:
        file.close()
        raise
