"""Settings: one table, four places, one precedence, and errors that name the place."""

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.dtypes import DEFAULT_KV
from contract.errors import ConfigError
from harness.settings import CONFIG_ENV, SETTINGS, Settings, add_flags, resolve
from tests.tables import table

ALL = list(SETTINGS)


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch) -> None:
    """The user's real configuration file plays no part."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config-home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


def resolved(*flags: str, env: dict[str, str] | None = None, names: list[str] = ALL) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser, names)
    return resolve(parser.parse_args(flags), names, env or {})


def config_file(folder: Path, text: str) -> Path:
    path = folder / "zinc.toml"
    path.write_text(text)
    return path


def test_defaults():
    settings = resolved()
    assert settings["temperature"] == 0.0
    assert settings["model"] is None
    assert settings["context"] is settings["memory_budget"] is None
    assert settings["kv_dtype"] == DEFAULT_KV.name
    assert set(settings.sources.values()) == {"default"}


def test_every_default_is_accepted_by_its_own_setting():
    """A default written out as text is a valid value that means the same."""
    for setting in SETTINGS.values():
        value = setting.default_value()
        if value is not None:
            written = setting.default if isinstance(setting.default, str) else str(value)
            assert setting.kind.parse(written) == value


def test_precedence_flag_environment_file_default(tmp_path):
    path = config_file(tmp_path, "max_tokens = 3\ntop_k = 3\nseed = 3")
    env = {CONFIG_ENV: str(path), "ZINC_RT_MAX_TOKENS": "2", "ZINC_RT_TOP_K": "2"}
    settings = resolved("--max-tokens", "1", env=env)
    assert (settings["max_tokens"], settings.sources["max_tokens"]) == (1, "flag --max-tokens")
    assert (settings["top_k"], settings.sources["top_k"]) == (2, "environment ZINC_RT_TOP_K")
    assert (settings["seed"], settings.sources["seed"]) == (3, f"file {path}:seed")
    assert (settings["tier"], settings.sources["tier"]) == ("auto", "default")


def test_config_flag_beats_its_environment_twin(tmp_path):
    path = config_file(tmp_path, "seed = 5")
    assert resolved("--config", str(path), env={CONFIG_ENV: "/nowhere"})["seed"] == 5


def test_user_config_file_is_found(tmp_path):
    folder = tmp_path / "config-home" / "zinc-rt"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("seed = 6")
    assert resolved()["seed"] == 6


def test_empty_environment_variable_counts_as_unset():
    assert resolved(env={"ZINC_RT_SEED": ""}).sources["seed"] == "default"


def test_only_named_settings_are_read():
    settings = resolved("--seed", "1", env={"ZINC_RT_TIER": "toaster"}, names=["seed"])
    assert dict(settings) == {"seed": 1}
    assert len(settings) == 1


@pytest.mark.parametrize("text", ["4096", "4k", "4K"])
def test_sizes(text):
    assert resolved("--context", text)["context"] == 4096


def test_paths_expand_and_file_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    assert resolved("--cache-dir", "~/x")["cache_dir"] == Path("/home/user/x")
    path = config_file(tmp_path, 'cache_dir = "models"')
    assert resolved("--config", str(path))["cache_dir"] == tmp_path / "models"
    assert resolved()["cache_dir"] == tmp_path / "cache-home" / "zinc-rt"


BAD_TEXT = [
    ("max_tokens", "0"), ("max_tokens", "ten"), ("max_tokens", "1.5"), ("max_tokens", "1_000"),
    ("max_tokens", "9" * 5000), ("seed", "-1"), ("seed", str(2**64)), ("temperature", "nan"),
    ("temperature", "inf"), ("temperature", "-0.1"), ("temperature", "warm"), ("top_p", "1.01"),
    ("tier", "toaster"), ("tier", "CPU"), ("kv_dtype", "q8"), ("context", "32KB"),
    ("context", "-4K"), ("context", "15"), ("context", "4 K"), ("thinking", "yes"),
    ("cache_dir", "a\0b"), ("cache_dir", "~no-such-user-here/x"), ("repeat_penalty", "0"),
    ("cors", "chat.example.org"),
    ("cors", "https://chat.example.org/page"),
    ("cors", "https://"),
    ("allowed_hosts", "https://chat.example.org"),
    ("allowed_hosts", "chat.example.org:8080"),
    ("allowed_hosts", "chat.example.org,*"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), BAD_TEXT)
def test_bad_value_names_flag_or_variable_value_and_what_is_accepted(name, text):
    setting = SETTINGS[name]
    sources = [(f"flag {setting.flag}", [f"{setting.flag}={text}"], {}),
               (f"environment {setting.env}", [], {setting.env: text})]  # fmt: skip
    for source, flags, env in sources:
        with pytest.raises(ConfigError) as caught:
            resolved(*flags, env=env)
        message = str(caught.value)
        assert message.startswith(f"{source}: {text!r}"[:60])
        assert message.endswith(f"expected {setting.kind.accepts}")
        assert len(message) < 400
        assert "\n" not in message


@pytest.mark.parametrize(
    "line",
    ["max_tokens = 1.5", "max_tokens = true", "temperature = false", "temperature = nan",
     "tier = 3", "system = 1", "context = 4096.0", "seed = [1]", "cache_dir = {}", "seed = -1",
     "top_p = 2024-01-01"],
)  # fmt: skip
def test_bad_value_in_the_file_names_file_and_key(tmp_path, line):
    path = config_file(tmp_path, line)
    key = line.split()[0]
    with pytest.raises(ConfigError, match=f"zinc.toml:{key}: .*expected"):
        resolved("--config", str(path))


@pytest.mark.parametrize(
    ("name", "text"), table(__file__, "test_settings")["names_that_a_request_may_have_are_accepted"]
)
def test_names_that_a_request_may_have_are_accepted(name, text):
    flag = f"--{name.replace('_', '-')}"
    assert resolved(flag, text)[name] == tuple(part.strip() for part in text.split(","))


def test_toml_types_a_person_would_write(tmp_path):
    text = 'temperature = 1\ntop_p = 0.9\ncontext = "32K"\nchunk = 64\nsystem = "Hi"\nseed = 7'
    settings = resolved("--config", str(config_file(tmp_path, text)))
    assert settings["temperature"] == 1.0
    assert settings["top_p"] == 0.9
    assert (settings["context"], settings["chunk"]) == (32768, 64)
    assert (settings["system"], settings["seed"]) == ("Hi", 7)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("max-tokens", "max_tokens"), ("temprature", "temperature"), ("cachedir", "cache_dir"),
     ("zzz", "")],
)  # fmt: skip
def test_unknown_key_names_the_nearest(tmp_path, key, nearest):
    path = config_file(tmp_path, f"{key} = 1")
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; the nearest .* '{nearest}"):
        resolved("--config", str(path))


def test_all_unknown_keys_are_named_in_one_line(tmp_path):
    path = config_file(tmp_path, "bb = 1\n[aa]\nx = 1")
    with pytest.raises(ConfigError, match=r"'aa'.*'bb'"):
        resolved("--config", str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"seed = ", "not valid TOML"), (b"tier = cpu", "a text needs quotes"),
     (b"\xff", "byte 0 is not UTF-8"), (b"x" * (1 << 21), "longer"),
     (b"a = " + b"[" * 100_000, "not a table|not valid"), (b"seed=" + b"9" * 9999, "not a table")],
    ids=["syntax", "quotes", "encoding", "huge", "deep", "digits"],
)  # fmt: skip
def test_unreadable_file_is_named(tmp_path, content, message):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"bad.toml: .*({message})"):
        resolved("--config", str(path))


@pytest.mark.parametrize("path", ["/no/such/file.toml", "/", "a\0b", "~no-such-user-here/x"])
def test_named_file_must_be_there(path):
    with pytest.raises(ConfigError, match=r"no such configuration file|cannot read|not a path"):
        resolved("--config", path)


def test_help_shows_environment_twin_and_default(capsys):
    parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter)
    add_flags(parser, ALL)
    parser.print_help()
    shown = capsys.readouterr().out
    for setting in SETTINGS.values():
        assert setting.flag in shown
        assert f"[env {setting.env}]" in shown
    assert "[default: 0.95]" in shown
    assert "the same prompt gives the same text" in shown


@given(st.sampled_from(ALL), st.text(max_size=30))
def test_any_text_is_a_value_or_a_config_error(name, text):
    """No text makes a setting fail in another way."""
    try:
        value = resolve(argparse.Namespace(**{name: text}), [name], {})[name]
    except ConfigError:
        return
    assert value is not None
