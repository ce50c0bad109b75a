"""Every setting of the runtime: one table, four places a value may come from.

A setting ``max_tokens`` is the flag ``--max-tokens``, the environment variable
``ZINC_RT_MAX_TOKENS`` and the key ``max_tokens`` of the configuration file. The first of flag,
environment, file and default that names a value wins. Values are checked the same way wherever
they come from, and an error names the place.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from contract.dtypes import DEFAULT_KV, KV_DTYPES
from contract.errors import ConfigError
from contract.lazy_dataclass import dataclass
from harness.setting_kinds import (
    ENV_PREFIX,
    INT32_MAX,
    PATH,
    TEXT,
    UINT64_MAX,
    Setting,
    choice,
    integer,
    number,
    path_of,
    size,
    tokens,
)
from harness.toml_file import read_toml, unknown_key

__all__ = ["ENV_PREFIX", "SETTINGS", "Setting", "Settings", "add_flags", "resolve"]
CONFIG_ENV = f"{ENV_PREFIX}CONFIG"
TIERS = ("auto", "cpu", "native", "opencl", "vulkan", "cuda", "metal", "t1", "t2", "intel")


def _default_cache_dir() -> Path:
    return platformdirs.user_cache_path("zinc-rt")


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "model",
            TEXT,
            None,
            "GGUF file, catalog id (see `zinc-rt model list`), or hf.co/ORG/REPO[:QUANT]",
            "the model chosen with `zinc-rt model use`, else smollm2-135m-instruct",
        ),
        Setting("tier", choice(*TIERS), "auto", "device tier that runs the model"),
        Setting("max_tokens", integer(1, INT32_MAX), 512, "most tokens to generate"),
        Setting(
            "temperature",
            number(0, 100),
            0.0,
            "0 always picks the likeliest token, so the same prompt gives the same text whatever "
            "the seed; above 0 samples",
        ),
        Setting("top_k", integer(0, INT32_MAX), 40, "sample among the K likeliest; 0 is off"),
        Setting("top_p", number(0, 1), 0.95, "sample among the likeliest of this mass; 1 is off"),
        Setting("min_p", number(0, 1), 0.05, "drop tokens below this share of the best; 0 is off"),
        Setting("repeat_penalty", number(0.01, 100), 1.0, "penalty on recent tokens; 1 is off"),
        Setting("repeat_last_n", integer(0, INT32_MAX), 64, "how many tokens count as recent"),
        Setting("seed", integer(0, UINT64_MAX), 0, "key of the sampler's random numbers"),
        Setting(
            "context",
            tokens(16, INT32_MAX),
            None,
            "longest prompt plus answer",
            "the model's own, or what fits the memory",
        ),
        Setting(
            "slots",
            integer(1, 1 << 12),
            None,
            "sequences that run at once, of the whole context each",
            "4 for a server, else 1",
        ),
        Setting(
            "memory_budget",
            size(1 << 20),
            None,
            "most memory to use, of the device or, where the device shares it, of the machine",
            "what is available, less a margin",
        ),
        Setting(
            "prefix_cache",
            size(0),
            None,
            "most of that memory that may keep what was computed for prompts which are gone, for "
            "those that begin alike; 0 keeps and shares nothing",
            "all that no sequence needs",
        ),
        Setting(
            "host_cache",
            size(0),
            0,
            "memory of the host, beside that, for what the prefix cache has no room for",
        ),
        Setting(
            "state_cache",
            size(0),
            None,
            "memory, of the same budget, for what recurrent layers remember where pages end, from "
            "which prompts that begin alike go on",
            "one state for each slot of several",
        ),
        Setting(
            "kv_dtype",
            choice(*sorted(dtype.name for dtype in KV_DTYPES)),
            DEFAULT_KV.name,
            "how keys and values are stored: i12 takes three quarters of f16 and loses nothing "
            "more, q8_0 about half of it, f32 twice as much",
        ),
        Setting(
            "chunk",
            tokens(1, 1 << 20),
            None,
            "most prompt tokens prefilled in one step",
            "what the tier reads fastest with, and 256 beside sequences that decode",
        ),
        Setting(
            "draft",
            integer(0, 63),
            11,
            "most tokens guessed ahead where the text repeats itself; the answer is the same, a "
            "step gives several tokens of it. 0 guesses nothing",
        ),
        Setting(
            "threads",
            integer(1, 4096),
            None,
            "processor threads",
            "as many as this process may use",
        ),
        Setting(
            "opencl_mode",
            choice("auto", "persistent", "launch"),
            "auto",
            "a step as one kernel (persistent) or a kernel per op; auto probes the device",
        ),
        Setting(
            "device",
            TEXT,
            "",
            "part of a device's name, of the tier that runs; for cuda also a number, and several "
            "devices for one model: 0,1",
            "the first",
        ),
        Setting("opencl_device", TEXT, "", "part of an OpenCL device's name", "the first device"),
        Setting("cache_dir", PATH, _default_cache_dir, "folder that holds pulled models"),
        Setting("host", TEXT, "127.0.0.1", "address to listen on; others than loopback need keys"),
        Setting("port", integer(0, 65535), 8080, "port to listen on; 0 takes a free one"),
        Setting(
            "tenants",
            PATH,
            None,
            "file of tenants and the digests of their API keys (see `zinc-rt tenants`)",
            "one local tenant, without a key",
        ),
        Setting(
            "ledger",
            PATH,
            lambda: platformdirs.user_state_path("zinc-rt") / "ledger.sqlite",
            "SQLite file that counts what every tenant was given",
        ),
        Setting(
            "queue_depth",
            integer(1, 4096),
            256,
            "requests that may wait for a slot; more are refused",
        ),
        Setting(
            "ray",
            integer(0, 64),
            0,
            "replicas under Ray Serve that answer instead of this process; a stream goes on where "
            "one of them dies",
            "none",
        ),
        Setting(
            "beside",
            TEXT,
            "",
            "models, separated by commas, that requests may name too; each is loaded when one "
            "does, in place of another nobody uses where there is no room",
            "none",
        ),
        Setting(
            "alias",
            TEXT,
            "",
            "another name that requests may call the model by; * is every name. May be repeated",
            "none",
            repeats=True,
        ),
        Setting(
            "allowed_hosts",
            TEXT,
            "",
            "names, separated by commas, that the server answers to beside addresses, localhost "
            "and this machine's name",
            "none",
        ),
        Setting(
            "unknown_fields",
            choice("ignore", "reject"),
            "ignore",
            "requests with a field that the server does not know: the field is ignored, and named "
            "in the answer, or the request is refused. Misspelt fields are always refused",
        ),
        Setting(
            "cors",
            TEXT,
            "",
            "origin whose pages may ask this server, such as https://chat.example.org; * is every "
            "one. May be repeated",
            "none",
            repeats=True,
        ),
        Setting(
            "record",
            PATH,
            None,
            "folder for traces of all that the tier is told (python -m harness.replay); they hold "
            "every prompt and answer",
            "nothing is recorded",
        ),
        Setting(
            "receipts",
            PATH,
            None,
            "folder for signed receipts of all answers, which hold prompts and answers, and for "
            "the key that signs them (docs/receipts.md)",
            "no receipts are made",
        ),
        Setting(
            "drain_seconds",
            number(0, 3600),
            30.0,
            "how long running answers may take to end when the server is asked to",
        ),
        Setting("system", TEXT, None, "system prompt", "what the model's chat template says"),
        Setting("thinking", choice("auto", "on", "off"), "auto", "let the model think aloud first"),
    )
}


@dataclass(frozen=True, slots=True)
class Settings(Mapping[str, Any]):
    """Resolved values by name; ``sources`` says where each came from, fit to show a user."""

    values_by_name: Mapping[str, Any]
    sources: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


def add_flags(
    parser: argparse.ArgumentParser,
    names: Iterable[str],
    shown_defaults: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add ``--config`` and the flag of each named setting; ``shown_defaults`` replace what the help
    says of some. Values are checked by ``resolve``."""
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--config",
        metavar="FILE",
        default=None,
        help=f"configuration file [env {CONFIG_ENV}] [default: {default_config_path()}]".replace(
            "%", "%%"
        ),
    )
    for name in names:
        setting = SETTINGS[name]
        group.add_argument(
            setting.flag,
            dest=name,
            metavar=setting.kind.metavar,
            default=None,
            action="append" if setting.repeats else "store",
            help=setting.described(shown_defaults.get(name)),
        )


def default_config_path() -> Path:
    """Where the configuration file is looked for when nobody names one."""
    return platformdirs.user_config_path("zinc-rt") / "config.toml"


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
    file, or a key in the file that is not a setting.
    """
    env = os.environ if env is None else env
    path, required = _config_path(args, env)
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
    return Settings(values, sources)


def _config_path(args: argparse.Namespace, env: Mapping[str, str]) -> tuple[Path, bool]:
    """The configuration file, and whether the user named it (so that it has to exist)."""
    named = getattr(args, "config", None) or env.get(CONFIG_ENV)
    if not named:
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
