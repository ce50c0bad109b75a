"""Kernels that are compiled ahead of time and kept in the package, each with its text's digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

DIGESTS = "digests.json"
COMPILERS = 2
"""Run at the same time."""


class Build(Protocol):
    """One file as it is to be built."""

    @property
    def name(self) -> str:
        """That of the file without its ending."""

    @property
    def text(self) -> str:
        """What the compiler gets."""


B = TypeVar("B", bound=Build)


@dataclass(frozen=True, slots=True)
class Digests:
    """The compiler that built the files, and the digest of each one's text by its name."""

    compiler: str
    modules: dict[str, str]


def digest_of(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_digests(folder: Path) -> Digests:
    """What is said of the files that are there."""
    path = folder / DIGESTS
    return Digests(**json.loads(path.read_text())) if path.is_file() else Digests("", {})


def refresh(
    folder: Path, compiler: str, builds: Iterable[B], made: Callable[[B], bytes | None]
) -> None:
    """Have ``made`` compile what has changed into ``folder``, and remove what is no more.

    A build whose ``made`` is None needs no file, which its digest says, too.
    """
    folder.mkdir(exist_ok=True)
    known = read_digests(folder)
    kept = known.modules if known.compiler == compiler else {}
    requested = {build.name: build for build in builds}
    digests = {name: digest_of(build.text) for name, build in sorted(requested.items())}
    changed = [requested[name] for name in requested if kept.get(name) != digests[name]]
    with ThreadPoolExecutor(COMPILERS) as pool:
        for build, data in zip(changed, pool.map(made, changed), strict=True):
            path = folder / f"{build.name}.zrt"
            path.unlink(missing_ok=True)
            if data is not None:
                path.write_bytes(data)
    for path in folder.glob("*.zrt"):
        if path.stem not in requested:
            path.unlink()
    document = asdict(Digests(compiler, digests))
    (folder / DIGESTS).write_text(json.dumps(document, indent=1) + "\n")
