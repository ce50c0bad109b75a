"""Modules that are imported late."""

import inspect

import pytest

from tests.late_module import LateModule


def test_it_is_imported_when_it_is_used():
    """Not when pytest looks for fixtures in a file that names it."""
    late = LateModule("no_such_module")
    assert inspect.unwrap(late) is late
    assert not hasattr(late, "_mock_name")
    with pytest.raises(ModuleNotFoundError):
        _ = late.name
    assert LateModule("inspect").unwrap is inspect.unwrap
