"""Kernels that are compiled ahead of time and shipped in the package, each with the digest of its
text."""

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
"""Compilers that run at the same time."""


class Build(Protocol):
    """One file to compile."""

    @property
    def name(self) -> str:
        """The file name without its ending."""

    @property
    def text(self) -> str:
        """The compiler's input."""


B = TypeVar("B", bound=Build)


@dataclass(frozen=True, slots=True)
class Digests:
    """The compiler that made the files, and the digest of each file's text by its name."""

    compiler: str
    modules: dict[str, str]


def digest_of(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_digests(folder: Path) -> Digests:
    """The digests of the files in ``folder``, empty if there are none."""
    path = folder / DIGESTS
    return Digests(**json.loads(path.read_text())) if path.is_file() else Digests("", {})


def refresh(
    folder: Path, compiler: str, builds: Iterable[B], compile_file: Callable[[B], bytes | None]
) -> None:
    """Compile what has changed into ``folder``, and delete files that are no longer built.

    A build for which ``compile_file`` returns None has no file, but a digest."""
    folder.mkdir(exist_ok=True)
    known = read_digests(folder)
    current = known.modules if known.compiler == compiler else {}
    requested = {build.name: build for build in builds}
    digests = {name: digest_of(build.text) for name, build in sorted(requested.items())}
    changed = [requested[name] for name in requested if current.get(name) != digests[name]]
    with ThreadPoolExecutor(COMPILERS) as pool:
        for build, data in zip(changed, pool.map(compile_file, changed), strict=True):
            path = folder / f"{build.name}.zrt"
            path.unlink(missing_ok=True)
            if data is not None:
                path.write_bytes(data)
    for path in folder.glob("*.zrt"):
        if path.stem not in requested:
            path.unlink()
    document = asdict(Digests(compiler, digests))
    (folder / DIGESTS).write_text(json.dumps(document, indent=1) + "\n")
