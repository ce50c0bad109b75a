"""An error of the system is told in words, without ``[Errno 2]`` and its path a second time."""

import ast
from collections.abc import Iterator

import pytest

from tests.structure.source_tree import relative, trees

ROOMS = ("harness/", "reference/model/", "accel/native/")


def raw_words(source: ast.Module) -> Iterator[int]:
    """The lines that put an OSError as it is into a message."""
    for handler in ast.walk(source):
        if not isinstance(handler, ast.ExceptHandler) or handler.type is None:
            continue
        if "OSError" not in ast.unparse(handler.type):
            continue
        for node in ast.walk(handler):
            if not isinstance(node, ast.FormattedValue) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id == handler.name:
                yield node.lineno


def test_messages_have_the_words_of_the_system():
    found = {
        f"{relative(path)}:{line}"
        for path, source in trees().items()
        if relative(path).startswith(ROOMS)
        for line in raw_words(source)
    }
    assert found == set()


@pytest.mark.parametrize(
    ("caught", "shown", "count"),
    [
        ("OSError", "{error}", 1),
        ("(OSError, ValueError)", "{error}", 1),
        ("OSError", "{error.strerror}", 0),
        ("ValueError", "{error}", 0),
    ],
)
def test_a_raw_one_would_be_found(caught, shown, count):
    text = f"try:\n    x()\nexcept {caught} as error:\n    raise Y(f'no: {shown}')\n"
    assert len(list(raw_words(ast.parse(text)))) == count
