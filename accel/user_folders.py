"""The folders of the user in which the program stores files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from contract.errors import ConfigError

PROGRAM = "zinc-rt"
XDG_DEFAULTS = {"cache": ".cache", "config": ".config", "state": ".local/state"}
"""The folders of a home on Linux, unless XDG_CACHE_HOME and so on name others."""


def user_folder(kind: Literal["cache", "config", "runtime", "state"]) -> Path:
    """The folder of this kind; it need not exist. Raises ConfigError if the user has no home."""
    if sys.platform == "linux" and kind in XDG_DEFAULTS:
        named = Path(os.environ.get(f"XDG_{kind.upper()}_HOME", ""))
        home = Path(os.environ.get("HOME", ""))
        if named.is_absolute() or home.is_absolute():
            return (named if named.is_absolute() else home / XDG_DEFAULTS[kind]) / PROGRAM
    # Imported here, because every start needs a folder and this takes as long as ten modules.
    import platformdirs

    find = {
        "cache": platformdirs.user_cache_path,
        "config": platformdirs.user_config_path,
        "runtime": platformdirs.user_runtime_path,
        "state": platformdirs.user_state_path,
    }[kind]
    try:
        return find(PROGRAM)
    except RuntimeError as error:
        raise ConfigError(
            f"there is no folder for {kind} files, because this user has no home folder; set the "
            f"environment variable HOME or XDG_{kind.upper()}_HOME to an absolute path"
        ) from error
