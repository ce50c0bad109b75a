"""Parses names of hub models: ``hf.co/ORG/REPO[:QUANT]`` or ``hf.co/ORG/REPO/FILE.gguf``.

The files a name means are determined from a list of paths alone, so the same rules search a
repository on the hub and its pulled files. Names are restricted to a small alphabet, so that no
file name can lead out of a folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from contract.errors import CatalogError
from contract.lazy_dataclass import dataclass

HOSTS = ("hf.co/", "huggingface.co/")
WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
GGUF = rf"(?:{WORD}/)*{WORD}\.gguf"
NAME = re.compile(
    rf"(?:hf\.co|huggingface\.co)/(?P<repository>{WORD}/{WORD})"
    rf"(?::(?P<quant>{WORD})|/(?P<path>{GGUF}))?"
)
ADDRESS = re.compile(
    rf"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/(?P<repository>{WORD}/{WORD})"
    rf"(?:/(?:tree|blob|resolve)/(?P<revision>{WORD})(?:/(?P<path>{GGUF}))?)?/?(?:[?#].*)?"
)
SPLIT = re.compile(r"-(?P<part>\d{5})-of-(?P<parts>\d{5})$")
QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d_\w+|TQ\d_0|MXFP4(?:_MOE)?|BF16|F16|F32))$", re.IGNORECASE
)
NOT_A_MODEL = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix|mtp|lora|vocab)(?:[-._/]|$)", re.I)
PREFERRED = ("Q4_K_M", "UD-Q4_K_M", "Q4_0", "Q4_K_S", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
"""The preferred quants: a name without a quant means the first of these in the repository."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed name; without ``quant`` and ``path`` it means the preferred quant."""

    repository: str
    quant: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        rest = f":{self.quant}" if self.quant else f"/{self.path}" if self.path else ""
        return f"hf.co/{self.repository}{rest}"


def pasted_name(text: str) -> str:
    """The name that an address of the hub means, as copied from a browser; any other text as it
    is. Raises CatalogError for a revision that is not the newest: a name has none."""
    match = ADDRESS.fullmatch(text.strip())
    if match is None:
        return text
    repository, revision, path = match["repository"], match["revision"], match["path"]
    if revision not in (None, "main"):
        raise CatalogError(
            f"{text[:200]!r} is of revision {revision}, and only main can be fetched; download the "
            "file and name its path"
        )
    return f"hf.co/{repository}" + (f"/{path}" if path else "")


def is_hub_name(text: str) -> bool:
    """Whether ``text`` starts like a name of the hub."""
    return text.startswith(HOSTS)


def parse_hub_name(text: str) -> HubName:
    """Parse a name of the hub; raises CatalogError for anything else."""
    match = NAME.fullmatch(text)
    if match is None:
        raise CatalogError(
            f"{text[:200]!r} names no model of the hub; write hf.co/ORG/REPO, "
            "hf.co/ORG/REPO:QUANT or hf.co/ORG/REPO/FILE.gguf"
        )
    return HubName(match["repository"], match["quant"], match["path"])


def stem_of(path: str) -> str:
    """The path without its extension and part number, which all parts of one model share."""
    return SPLIT.sub("", path.removesuffix(".gguf"))


def quant_of(stem: str) -> str:
    """The quant at the end of a stem, as written, else its folder's, else the whole stem."""
    match = QUANT.search(stem) or QUANT.search(stem.rpartition("/")[0])
    return match[1] if match else stem


def models_among(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The models among ``paths``: stem to the paths of its parts, in order.

    Files that are not language models, and names that are unsafe as paths, are left out."""
    models: dict[str, list[str]] = {}
    for path in sorted(paths):
        if re.fullmatch(GGUF, path) and not NOT_A_MODEL.search(path.removesuffix(".gguf")):
            models.setdefault(stem_of(path), []).append(path)
    return {stem: tuple(parts) for stem, parts in models.items()}


def choose(name: HubName, paths: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """The stem and the parts of the model that ``name`` means among the files ``paths``. Raises
    CatalogError that lists the choices if it means no model, several, or an incomplete one."""
    models = models_among(paths)
    stem = _stem_meant(name, models)
    parts = models[stem]
    split = SPLIT.search(parts[0].removesuffix(".gguf"))
    if split is not None and len(parts) != int(split["parts"]):
        raise CatalogError(f"{name}: has {len(parts)} of the {int(split['parts'])} parts of {stem}")
    return stem, parts


def _stem_meant(name: HubName, models: Mapping[str, tuple[str, ...]]) -> str:
    if name.path is not None:
        stem = stem_of(name.path)
        if name.path not in models.get(stem, ()):
            raise CatalogError(f"{name}: no such model file there; {_offer(name, models)}")
        return stem
    for quant in PREFERRED if name.quant is None else (name.quant,):
        stems = [stem for stem in models if quant_of(stem).lower() == quant.lower()]
        if len(stems) == 1:
            return stems[0]
        if stems:
            files = " or ".join(f"hf.co/{name.repository}/{models[stem][0]}" for stem in stems[:4])
            raise CatalogError(f"{name}: {len(stems)} models are {quant}; name the file: {files}")
    if name.quant is None and len(models) == 1:
        return next(iter(models))
    raise CatalogError(f"{name}: no {name.quant or PREFERRED[0]} there; {_offer(name, models)}")


def _offer(name: HubName, models: Mapping[str, tuple[str, ...]]) -> str:
    if not models:
        return "it holds no GGUF model; look for a repository whose name ends in -GGUF"
    quants = sorted({quant_of(stem) for stem in models})
    return f"name one of hf.co/{name.repository}:{', :'.join(quants[:40])}"
