"""The folders of the user in which the program stores files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import platformdirs

from contract.errors import ConfigError

PROGRAM = "zinc-rt"


def user_folder(kind: Literal["cache", "config", "runtime", "state"]) -> Path:
    """The folder of this kind; it need not exist. Raises ConfigError where the user has no home."""
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
