"""Commands that install an optional part of the distribution, from the source of this copy."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

DISTRIBUTION = "zinc-rt"
SOURCE_TREE = Path(__file__).resolve().parent.parent


def install_command(extra: str) -> str:
    """A shell command that installs an extra into the environment of this process."""
    return f"{pip_command()} {' '.join(map(shlex.quote, requirements(extra)))}"


def pip_command() -> str:
    """The command that installs into the environment of this process."""
    # These modules are slow to load, and few processes get here.
    import shutil
    from importlib.util import find_spec

    pip = shutil.which("pip")
    if pip is not None and os.path.dirname(pip) == os.path.dirname(sys.executable):
        return "pip install"
    if find_spec("pip") is not None:
        return f"{shlex.quote(sys.executable)} -m pip install"
    return f"uv pip install --python {shlex.quote(sys.executable)}"


def requirements(extra: str) -> list[str]:
    """Requirement for pip: this copy's folder or wheel with the extra, or, where neither exists
    any more, the packages of the extra."""
    source = _source()
    if source is None:
        return _packages(extra)
    if source.is_dir():
        return [f"{'.' if source == Path.cwd() else source}[{extra}]"]
    return [f"{DISTRIBUTION}[{extra}] @ {source.as_uri()}"]


def _source() -> Path | None:
    """The folder or the wheel that this copy was installed from, or runs in; None if unknown."""
    if (SOURCE_TREE / "pyproject.toml").is_file():
        return SOURCE_TREE
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    parts = urlsplit(json.loads(text)["url"]) if text else None
    if parts is None or parts.scheme != "file":
        return None
    path = Path(url2pathname(parts.path))
    return path if path.exists() else None


def _packages(extra: str) -> list[str]:
    """The packages that the installed metadata name for an extra."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        lines = []
    split = [line.partition(";") for line in lines]
    found = [name.strip() for name, _, marker in split if f'extra == "{extra}"' in marker]
    return found or [f"{DISTRIBUTION}[{extra}]"]
