"""The examples of properties depend on the properties alone."""

from importlib import import_module

from hypothesis import given, settings
from hypothesis import strategies as st

VALUES = st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()


def drawn() -> list[object]:
    """The examples of a property, in their order."""
    values: list[object] = []

    @settings(max_examples=500)
    @given(VALUES)
    def hold(value: object) -> None:
        values.append(value)

    hold()
    return values


def test_loaded_modules_change_no_example(tmp_path, monkeypatch):
    """A run that finds more tests, or ran another before, loads more. The long profile draws
    others each time."""
    before = drawn()
    constants = *range(70_000, 70_400), *(i / 7 for i in range(400)), "a text", b"bytes"
    (tmp_path / "loaded_meanwhile.py").write_text(f"CONSTANTS = {constants}")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("loaded_meanwhile")
    assert (drawn() == before) is settings().derandomize
