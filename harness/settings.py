"""Resolves settings: the value of each, and which of four sources it comes from.

A setting ``max_tokens`` is the flag ``--max-tokens``, the environment variable
``ZINC_RT_MAX_TOKENS`` and the key ``max_tokens`` of the configuration file. The first of flag,
environment, file and default that has a value wins. Values are checked the same way wherever they
come from, and an error names the source."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel.user_folders import user_folder
from contract.errors import ConfigError
from contract.lazy_dataclass import dataclass
from harness.setting_kinds import ENV_PREFIX, NO_DEFAULT, Setting, path_of
from harness.settings_table import GROUP_OF, SETTINGS
from harness.toml_file import likeness, nearest_of, read_toml, unknown_key

__all__ = ["ENV_PREFIX", "SETTINGS", "Setting", "Settings", "add_flags", "resolve", "values_for"]
LIKENESS_MIN = 0.8
CONFIG_ENV = f"{ENV_PREFIX}CONFIG"


@dataclass(frozen=True, slots=True)
class Settings(Mapping[str, Any]):
    """Resolved values by name. ``sources`` says where each came from, fit to show a user; ``path``
    is the configuration file, which need not exist."""

    values_by_name: Mapping[str, Any]
    sources: Mapping[str, str]
    path: Path

    def __getitem__(self, name: str) -> Any:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def changed(self, name: str, text: str, source: str) -> Settings:
        """These settings with one whose value ``text`` comes from ``source``. Raises ConfigError
        for a value that is not accepted."""
        values = {**self.values_by_name, name: _checked(SETTINGS[name], text, source)}
        return Settings(values, {**self.sources, name: source}, self.path)


def add_flags(
    parser: argparse.ArgumentParser,
    names: Iterable[str],
    shown_defaults: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add ``--config`` and the flag of each named setting, in the group of its kind.

    ``shown_defaults`` replace the defaults that the help shows for some. ``resolve`` checks the
    values."""
    for name in names:
        setting = SETTINGS[name]
        group_of(parser, GROUP_OF[name]).add_argument(
            *setting.flags,
            dest=name,
            metavar=setting.kind.metavar,
            default=None,
            action="append" if setting.repeats else "store",
            help=setting.described(shown_defaults.get(name)),
        )
    try:
        default = str(default_config_path())
    except ConfigError:
        default = NO_DEFAULT
    where = f"[env {CONFIG_ENV}] [default: {default}]".replace("%", "%%")
    group_of(parser, "other").add_argument(
        "--config", metavar="FILE", default=None, help=f"configuration file {where}"
    )


def group_of(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """The group of options with this title, which is added when the parser has none."""
    for group in parser._action_groups:
        if group.title == title:
            return group
    return parser.add_argument_group(title)


def default_config_path() -> Path:
    """The configuration file that is read when none is named; it need not exist."""
    return user_folder("config") / "config.toml"


def resolve(
    args: argparse.Namespace,
    names: Iterable[str],
    env: Mapping[str, str] | None = None,
    *,
    flags: bool = True,
) -> Settings:
    """The value and origin of each named setting.

    ``args`` are parsed flags (absent attributes count as not given), or without ``flags`` the
    arguments of a Python call; ``env`` defaults to the process environment, where an empty
    variable counts as unset. Raises ConfigError on a value that is not accepted, an unreadable
    file, or a key in the file that is not a setting."""
    env = os.environ if env is None else env
    path, required = config_path(args, env)
    file_values = _read_file(path, required)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in names:
        setting = SETTINGS[name]
        given = getattr(args, name, None)
        if isinstance(given, list):
            given = ",".join(given)
        if given is not None:
            sources[name] = f"flag {setting.flag}" if flags else f"argument {name}"
            values[name] = _checked(setting, given, sources[name])
        elif env.get(setting.env):
            sources[name] = f"environment {setting.env}"
            values[name] = _checked(setting, env[setting.env], sources[name])
        elif name in file_values:
            sources[name] = f"file {path}:{name}"
            values[name] = _from_file(setting, file_values[name], path, sources[name])
        else:
            sources[name] = "default"
            values[name] = setting.default_value()
    found = Settings(values, sources, path)
    _refuse_unused(found)
    return found


def _refuse_unused(settings: Settings) -> None:
    """Raise ConfigError for a flag or argument that another setting leaves without effect."""
    tier = settings.get("tier", "auto")
    other_tier = f"with tier {tier}" if tier not in ("auto", "opencl") else ""
    for name, why in (
        ("opencl_mode", other_tier),
        ("opencl_device", other_tier),
        ("disk_cache_size", "" if settings.get("disk_cache", True) else "without a disk_cache"),
    ):
        if why and settings.sources.get(name, "").startswith(("flag", "argument")):
            raise ConfigError(f"{settings.sources[name]}: has no effect {why}; leave it out")


def misspelt_variables(env: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable of the environment that is named almost like a setting's, or
    like a flag that other programs use for it, and so has no effect."""
    named = {flag.lstrip("-"): one.env for one in SETTINGS.values() for flag in one.flags}
    known = {f"{ENV_PREFIX}{flag}".upper().replace("-", "_"): env for flag, env in named.items()}
    for name in sorted(env):
        if not name.upper().startswith(ENV_PREFIX) or known.get(name) == name or not env[name]:
            continue
        near = known.get(name.upper()) or known[nearest_of(name.upper(), known)]
        if name.upper() in known or likeness(name.upper(), near, ENV_PREFIX) > LIKENESS_MIN:
            yield f"the environment variable {name} has no effect; did you mean {near}?"


def values_for(record: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are fields of a dataclass, by the name of the field; those without a value
    are left out, so that the field keeps its default."""
    names = {field.name for field in fields(record)}
    given = {SETTINGS[name].field or name: value for name, value in settings.items()}
    return {name: value for name, value in given.items() if name in names and value is not None}


def config_path(
    args: argparse.Namespace, env: Mapping[str, str] | None = None
) -> tuple[Path, bool]:
    """The configuration file, and whether the user named it (so that it has to exist)."""
    env = os.environ if env is None else env
    named = getattr(args, "config", None)
    named = env.get(CONFIG_ENV) or None if named is None else named
    if named is None:
        return default_config_path(), False
    try:
        return path_of(named), True
    except (ValueError, RuntimeError):
        raise ConfigError(f"configuration file {named!r} is not a path") from None


def _read_file(path: Path, required: bool) -> dict[str, Any]:
    values = read_toml(path, "configuration file", may_be_absent=not required)
    unknown = sorted(set(values) - set(SETTINGS))
    if unknown:
        raise ConfigError("; ".join(f"{path}: {unknown_key(key, SETTINGS)}" for key in unknown))
    return values


def _from_file(setting: Setting, value: object, path: Path, source: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, setting.kind.toml_types):
        raise _refused(setting, value, source)
    parsed = _checked(setting, str(value), source)
    return path.parent / parsed if isinstance(parsed, Path) else parsed


def _checked(setting: Setting, text: str, source: str) -> Any:
    try:
        return setting.kind.parse(text)
    except (ValueError, RuntimeError):
        raise _refused(setting, text, source) from None


def _refused(setting: Setting, value: object, source: str) -> ConfigError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ConfigError(f"{source}: {shown} is not accepted; expected {setting.kind.accepts}")
