"""Opens a model file: configuration, tokenizer, chat template, tensors and graphs, for any tier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path

from contract.errors import ZincError
from contract.ir.graph import Graph
from contract.lazy_dataclass import dataclass
from reference.limits import Limits
from reference.model.adapters import (
    NO_ADAPTERS,
    AdaptedFile,
    Adapter,
    Adapters,
    TensorFile,
    open_adapter,
)
from reference.model.config import ModelConfig, read_config
from reference.model.dflash import DFlashHead
from reference.model.draft_head import DraftHead, HeadedFile
from reference.model.eagle import EagleHead
from reference.model.families import build_graph
from reference.model.families.dflash_head import build_dflash_head
from reference.model.families.draft_block import build_draft_block
from reference.model.families.eagle_head import build_eagle_head
from reference.model.families.plain_steps import without_drafts
from reference.model.families.smooth_keys import Powers, smoothing_powers
from reference.model.families.tensors import ModelTensors
from reference.model.gguf.file import GgufFile, open_gguf
from reference.model.split_latent import SplitFile, is_joined
from reference.model.tokenizer import Tokenizer, load_tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True)
class Model:
    """An open model file with its checked configuration, the LoRA adapters that requests may use,
    and the head that drafts for it, if there is one."""

    file: GgufFile
    config: ModelConfig
    adapters: Adapters = field(default=NO_ADAPTERS, kw_only=True)
    head: DraftHead | None = field(default=None, kw_only=True)
    _cached_graph: dict[Limits, Graph] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def close(self) -> None:
        """Unmap the model file and its adapters' files. Their tensors must not be read any more."""
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
        """The exponents that smooth the keys of each layer with outliers."""
        return smoothing_powers(self.config, self.file)

    def graph(self, limits: Limits) -> Graph:
        """The verified graph of the forward pass for an engine with ``limits``. Raises
        ModelFileError or UnsupportedModel for tensors that do not fit the family.

        The last graph is cached, since the memory plan and the runner both need it."""
        graph = self._cached_graph.get(limits)
        if graph is None:
            graph = self._without_drafts(limits)
        if graph is None:
            tensors = self._tensors()
            if limits.adapters:
                tensors.adapters = self.adapters
            tensors.head = self.head if limits.hidden_rows else None
            graph = build_graph(self.config, tensors, limits)
            self._cached_graph.clear()
            self._cached_graph[limits] = graph
        return graph

    def _without_drafts(self, limits: Limits) -> Graph | None:
        """The graph of steps without drafts, derived from the cached graph, since building one
        takes a tenth of a start; None if the cached graph has other limits."""
        for drafting, graph in self._cached_graph.items():
            if drafting.draft_tokens and limits == replace(drafting, draft_tokens=0):
                return without_drafts(graph)
        return None

    @cached_property
    def draft_problem(self) -> str | None:
        """The reason why the file's draft block cannot be used, None if it can."""
        try:
            self.draft_graph(Limits(slots=1, context=16, pages=1, hidden_rows=1))
        except ZincError as error:
            return str(error)
        return None

    def draft_graph(self, limits: Limits) -> Graph:
        """The verified graph of the head for an engine with ``limits``, or of the draft block."""
        tensors = self._tensors()
        if isinstance(self.head, EagleHead):
            return build_eagle_head(self.config, self.head, tensors, limits)
        if isinstance(self.head, DFlashHead):
            return build_dflash_head(self.config, self.head, tensors, limits)
        return build_draft_block(self.config, tensors, limits)

    @cached_property
    def stored(self) -> GgufFile | SplitFile:
        """The tensors of the model file, as converters write them now."""
        split = is_joined(self.file, self.config)
        return SplitFile(self.file, self.config) if split else self.file

    @property
    def tensors(self) -> TensorFile:
        """The tensors that graphs read: the file's, and those of adapters and the head."""
        opened = self.adapters.opened
        own: TensorFile = AdaptedFile(self.stored, self.adapters) if opened else self.stored
        return own if self.head is None else HeadedFile(own, self.head.file)

    def check_unchanged(self) -> None:
        """Raise ModelFileError when a file that steps may read was written since it was opened."""
        self.file.check_unchanged()
        if self.head is not None:
            self.head.file.check_unchanged()

    def _tensors(self) -> ModelTensors:
        return ModelTensors(str(self.file.path), self.stored.tensors, self._powers)


def open_model(path: str | Path, adapters: Sequence[Path] = ()) -> Model:
    """Map and check the model file at ``path`` and the LoRA files ``adapters``, which requests name
    by their index. Raises ModelFileError or UnsupportedModel; then no file stays open."""
    with ExitStack() as owned:
        file = owned.enter_context(open_gguf(path))
        config, opened = read_config(file), list[Adapter]()
        for adapter in adapters:
            opened.append(open_adapter(adapter, file))
            owned.callback(opened[-1].file.close)
        model = Model(file, config, adapters=Adapters(tuple(opened)))
        owned.pop_all()
        return model
