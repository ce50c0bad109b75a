"""Small models and wheels for the catalog tests; nothing leaves this machine."""

import hashlib
import random
import zipfile
from pathlib import Path
from typing import Any

from harness.catalog import CatalogEntry, ModelFile, WheelMember

DISTRIBUTION = "tiny-model"
VERSION = "1.0"
MEMBER = "tiny_model/tiny.gguf"


def random_bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def wheel_entry(content: bytes, **changes: Any) -> CatalogEntry:
    """An entry of the catalog for ``content`` inside the tiny wheel, with fields changed."""
    file = ModelFile(
        changes.pop("source", WheelMember(DISTRIBUTION, VERSION, MEMBER)),
        changes.pop("size", len(content)),
        changes.pop("sha256", hashlib.sha256(content).hexdigest()),
    )
    fields = {
        "id": "tiny", "folder": "tiny", "files": (file,), "name": "Tiny", "architecture": "llama",
        "parameters": "1K", "quant": "F32", "licence": "Apache-2.0", "cache_bytes_per_token": 64,
    }  # fmt: skip
    return CatalogEntry(**{**fields, **changes})


def build_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel pip accepts, holding ``members`` besides its metadata."""
    info = f"tiny_model-{VERSION}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tiny_model-{VERSION}-py3-none-any.whl"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        for name, text in texts.items():
            archive.writestr(name, text)
    return path


def offline_pip(folder: Path) -> dict[str, str]:
    """Environment that makes the real pip see only the wheels in ``folder``."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}


class Recorder:
    """A Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, int | None, str]] = []
        self.counts: list[int] = []
        self.open = False

    def start(self, label: str, total: int | None, unit: str) -> None:
        self.jobs.append((label, total, unit))
        self.counts.append(0)
        self.open = True

    def advance(self, n: int) -> None:
        assert self.open
        self.counts[-1] += n

    def close(self) -> None:
        self.open = False


def visible_files(cache_dir: Path) -> list[Path]:
    """The files under models/ that a user of the cache would see."""
    return [path for path in (cache_dir / "models").rglob("*") if path.is_file()]
