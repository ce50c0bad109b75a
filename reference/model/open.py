"""Opening a model: everything about a file that does not depend on a tier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from contract.ir.graph import Graph
from reference.model.config import ModelConfig, read_config
from reference.model.families import build_graph
from reference.model.families.tensors import Limits, ModelTensors
from reference.model.gguf import GgufFile, open_gguf
from reference.model.tokenizer import Tokenizer, load_tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True)
class Model:
    """An open model file with its checked configuration. Close it by closing ``file``."""

    file: GgufFile
    config: ModelConfig

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary of the file. Raises ModelFileError when there is none."""
        return load_tokenizer(self.file.metadata, str(self.file.path))

    @property
    def chat_template(self) -> str | None:
        """The file's Jinja chat template."""
        return self.file.get(TEMPLATE_KEY, str, "") or None

    def graph(self, limits: Limits) -> Graph:
        """The verified forward pass for an engine of these sizes."""
        return build_graph(
            self.config, ModelTensors(str(self.file.path), self.file.tensors), limits
        )


def open_model(path: str | Path) -> Model:
    """Map and check a model file. Raises ModelFileError or UnsupportedModel."""
    file = open_gguf(path)
    try:
        return Model(file, read_config(file))
    except BaseException:
        file.close()
        raise
