"""Looks at the folders and files that settings name, before anything is downloaded or loaded."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from contract.errors import ConfigError
from harness.named_adapters import NamedAdapter
from harness.setting_kinds import DIR
from harness.settings import Settings
from harness.settings_table import SETTINGS

READ_FOLDERS = ("cache_dir",)
"""Folders that may be read alone."""
WRITTEN_FILES = ("ledger",)


def check_paths(settings: Settings, written: Collection[str] = WRITTEN_FILES) -> None:
    """Raises ConfigError, which names the setting and what to do, where a folder or file that it
    names is of the wrong kind, or cannot be read or written as the setting needs; files of settings
    in ``written`` are going to be written, or made."""
    for name, value in settings.items():
        source = settings.sources[name]
        if source == "default":
            continue
        if isinstance(value, Path) and SETTINGS[name].kind is DIR:
            check_folder(source, value, written=name not in READ_FOLDERS)
        elif isinstance(value, Path) and name in written:
            _refuse(source, value, _written_problem(value), "name another file")
        elif isinstance(value, Path):
            _refuse(source, value, _read_problem(value), "name a file that is there")
        elif isinstance(value, tuple):
            for one in value:
                if isinstance(one, NamedAdapter):
                    _refuse(source, one.path, _read_problem(one.path), "name a GGUF file")


def check_folder(source: str, folder: Path, *, written: bool) -> None:
    """Raises ConfigError, which names the ``source`` of a folder, where it cannot be one, or with
    ``written`` nothing may be written to it."""
    problem = _folder_problem(folder, written=written)
    _refuse(source, folder, problem, "name a folder that may be written, or a new one")


def _refuse(source: str, path: Path, problem: str, remedy: str) -> None:
    if problem:
        raise ConfigError(f"{source}: {path}: {problem}; {remedy}")


def _folder_problem(folder: Path, *, written: bool) -> str:
    """Why a folder cannot be used, nor made; empty where it can."""
    nearest = folder.absolute()
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    shown = "it" if nearest == folder.absolute() else str(nearest)
    if not os.path.exists(nearest):
        return f"{shown} is a link to nothing"
    if not os.path.isdir(nearest):
        return f"{shown} is no folder"
    if written and not os.access(nearest, os.W_OK | os.X_OK):
        return f"nothing may be written to {shown}"
    return ""


def _written_problem(path: Path) -> str:
    """Why a file cannot be written, nor made; empty where it can."""
    found = Path(os.path.realpath(path))
    if not os.path.lexists(found):
        return _folder_problem(found.parent, written=True)
    if not os.path.isfile(found):
        return "it is a folder" if os.path.isdir(found) else "it is no file"
    return "" if os.access(found, os.W_OK) else "it may not be written"


def _read_problem(path: Path) -> str:
    """Why a file cannot be read; empty where it can."""
    if os.path.isdir(path):
        return "it is a folder"
    if not os.path.exists(path):
        return "it is not there"
    return "" if os.access(path, os.R_OK) else "it may not be read"
