"""The folders of the user are those of every other program."""

import platformdirs
import pytest

from accel.user_folders import PROGRAM, user_folder


@pytest.mark.parametrize("home", ["/home/somebody", "relative", ""])
@pytest.mark.parametrize("named", [None, "/elsewhere", "relative", "", " /blank"])
def test_folders_are_those_of_platformdirs(monkeypatch, home, named):
    """An empty or relative variable counts as none."""
    monkeypatch.setenv("HOME", home)
    for kind in ("cache", "config", "state"):
        variable = f"XDG_{kind.upper()}_HOME"
        monkeypatch.delenv(variable, raising=False)
        if named is not None:
            monkeypatch.setenv(variable, named)
        expected = getattr(platformdirs, f"user_{kind}_path")(PROGRAM)
        assert user_folder(kind) == expected, (kind, home, named)
