"""``zinc-rt config``: writes a configuration file in which every setting is a comment."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from harness.setting_kinds import Setting
from harness.settings import CONFIG_ENV, config_path, group_of
from harness.settings_table import GROUPS

WIDTH = 96
EXAMPLES = f"""\
examples:
  zinc-rt config init                      the file that every command reads
  zinc-rt config init --config ./my.toml   another file, which --config also reads

A flag wins over its environment variable, that wins over the file, and that
wins over the default.
{CONFIG_ENV} names another file, too.
"""
HEAD = """\
# Settings of zinc-rt. Remove the # before a line and change its value.
# A flag (--max-tokens 100) or an environment variable (ZINC_RT_MAX_TOKENS=100) wins over this file.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``config`` command; its parser sets ``func(args) -> exit code``."""
    text = "write a configuration file to edit"
    parser = subparsers.add_parser("config", help=text, description=text, epilog=EXAMPLES)
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    text = "write a file with every setting, its meaning and its default, as comments"
    init = verbs.add_parser("init", help=text, description=text)
    group_of(init, "output").add_argument(
        "--config", metavar="FILE", help="the file to write [default: the one that is read]"
    )
    init.set_defaults(func=write_example)


def write_example(args: argparse.Namespace) -> int:
    """Write the file and print its path; an existing file stays as it is."""
    path, _ = config_path(args)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(example())
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already; edit it, or name another with --config"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from None
    print(path)
    return 0


def example() -> str:
    """The text of the file: valid TOML that changes nothing."""
    parts = [HEAD]
    for group, settings in GROUPS.items():
        parts.append(f"# {group}\n")
        parts += map(_lines, settings)
    return "\n".join(parts)


def _lines(setting: Setting) -> str:
    wrapped = textwrap.wrap(setting.help, WIDTH, initial_indent="# ", subsequent_indent="# ")
    text = setting.default
    value = text if isinstance(text, str) else setting.default_value()
    shown = "" if setting.shown_default is None else f"   # default: {setting.shown_default}"
    return "\n".join([*wrapped, f"# {setting.name} = {_toml(value)}{shown}", ""])


def _toml(value: object) -> str:
    if isinstance(value, int | float):
        return str(value)
    text = "" if value is None else str(value)
    return f"'{text}'" if isinstance(value, Path) else f'"{text}"'
