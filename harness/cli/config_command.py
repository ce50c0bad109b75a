"""``zinc-rt config``: shows every setting and its source; writes a configuration file to edit."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from pathlib import Path
from typing import Any

from contract.cached_files import replacing
from contract.errors import ConfigError, system_errors_as
from harness.cli.parser import add_json_flag
from harness.console import note, printable, table
from harness.setting_kinds import ENV_PREFIX, Setting
from harness.settings import CONFIG_ENV, Settings, add_flags, config_path, group_of, resolve
from harness.settings_table import GROUPS, SETTINGS
from harness.toml_file import unknown_key

WIDTH = 96
EXAMPLES = f"""\
examples:
  zinc-rt config init                      the file that every command reads
  zinc-rt config init --config ./my.toml   another file, which --config also reads
  zinc-rt config show                      every value, and where it comes from
  zinc-rt config show context kv_dtype     these only

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
    text = "show every setting and where it comes from, or write a file to edit"
    parser = subparsers.add_parser("config", help=text, description=text, epilog=EXAMPLES)
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    text = "write a file with every setting, its meaning and its default, as comments"
    init = verbs.add_parser("init", help=text, description=text)
    group_of(init, "output").add_argument(
        "--config", metavar="FILE", help="the file to write [default: the one that is read]"
    )
    init.set_defaults(func=write_example)
    text = "show the value of every setting, and whether a flag, the environment, the file or the "
    text += "default gives it"
    show = verbs.add_parser("show", help=text, description=text)
    show.add_argument(
        "names", nargs="*", metavar="NAME", help="the settings to show, such as max_tokens"
    )
    add_json_flag(show)
    add_flags(show, SETTINGS)
    show.set_defaults(func=show_settings)


def write_example(args: argparse.Namespace) -> int:
    """Write the file and print its path; an existing file stays as it is."""
    path, _ = config_path(args)
    with system_errors_as(f"{path}: cannot write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            problem = f"{path} exists already; edit it, or name another with --config"
            raise ConfigError(problem)
        with replacing(path) as file:
            file.write(example().encode())
    print(path)
    return 0


def show_settings(args: argparse.Namespace) -> int:
    """Print the settings, or those that are named."""
    unknown = [name for name in args.names if _name_of(name) not in SETTINGS]
    if unknown:
        raise ConfigError(unknown_key(unknown[0], SETTINGS))
    settings = resolve(args, SETTINGS)
    names = [_name_of(name) for name in args.names] or list(SETTINGS)
    rows = [(name, value_text(SETTINGS[name], settings), settings.sources[name]) for name in names]
    if args.json:
        facts = {name: {"value": value, "from": source} for name, value, source in rows}
        print(json.dumps(facts, indent=2))
        return 0
    of_file = f"file {settings.path}:"
    shown = (
        (name, "file" if source.startswith(of_file) else source, printable(value))
        for name, value, source in rows
    )
    print(table([("SETTING", "FROM", "VALUE"), *shown]))
    there = "" if settings.path.exists() else " (not there; zinc-rt config init writes it)"
    note(f"the configuration file is {settings.path}{there}")
    note("a command may have another default, which its --help-all shows")
    return 0


def value_text(setting: Setting, settings: Settings) -> str:
    """The value of a setting as a flag would give it; a default as the help shows it."""
    value = settings[setting.name]
    if settings.sources[setting.name] == "default":
        return setting.default_text() or "none"
    if isinstance(value, bool):
        return setting.kind.metavar.strip("{}").split(",")[value]
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _name_of(word: str) -> str:
    """The name of a setting that is written as a flag or a variable."""
    return word.lower().removeprefix(ENV_PREFIX.lower()).lstrip("-").replace("-", "_")


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
