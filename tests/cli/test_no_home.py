"""A user without a home folder, as containers have them: help works, the rest says what to set."""

import pwd
from typing import NoReturn

import pytest


def nobody(user: int) -> NoReturn:
    raise KeyError(user)


@pytest.fixture(autouse=True)
def no_home(monkeypatch) -> None:
    for name in ("HOME", "CACHE", "CONFIG", "STATE"):
        monkeypatch.delenv("HOME" if name == "HOME" else f"XDG_{name}_HOME", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


@pytest.mark.parametrize("words", [("--help",), ("run", "--help-all"), ("serve", "--help")])
def test_help_works(zinc, words):
    helped = zinc(*words)
    assert (helped.code, helped.err) == (0, "")
    assert "usage: zinc-rt" in helped.out


@pytest.mark.parametrize(
    "words", [("run", "hi"), ("check",), ("serve",), ("model", "list"), ("ps",), ("config", "init")]
)
def test_everything_else_says_what_to_set(zinc, words):
    refused = zinc(*words)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("error: ")
    assert refused.err.count("\n") == 1
    assert "no home folder; set the environment variable HOME" in refused.err


def test_a_home_that_is_no_folder_has_no_configuration(zinc, tiny_model, monkeypatch):
    """Such as /dev/null, as accounts of services have it; a file that is named must be there."""
    monkeypatch.setenv("HOME", "/dev/null")
    done = zinc("logits", "--tokens", "1", "--model", tiny_model, "--tier", "cpu")
    assert done.code == 0, done.err
    named = zinc("logits", "--tokens", "1", "--config", "/dev/null/a.toml", "--model", tiny_model)
    assert (named.code, "/dev/null/a.toml: no such" in named.err) == (2, True)
