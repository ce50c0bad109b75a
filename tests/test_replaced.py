"""What a module of tests leaves replaced is seen."""

import sys
from types import ModuleType

import pytest

from tests.replaced import Originals

TEXT = """
def function(): return 1
class Thing:
    calls = 0
    def method(self): return 2
    @property
    def name(self): return "thing"
TABLE = {"one": function}
LIMIT = 3
counted = {}
"""


@pytest.fixture
def module(monkeypatch) -> ModuleType:
    """A module that no other test has."""
    module = ModuleType("of_a_test.small")
    exec(TEXT.replace("class", f"__name__ = {module.__name__!r}\nclass", 1), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def originals(module) -> Originals:
    """What the module is like now."""
    originals = Originals(("of_a_test",))
    originals.note()
    assert not originals.newly_replaced()
    return originals


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("function = lambda: 3", "function"),
        ("Thing.method = lambda self: 3", "Thing.method"),
        ("Thing.name = 'another'", "Thing.name"),
        ("del Thing.name", "Thing.name"),
        ("Thing = None", "Thing"),
        ("TABLE['one'] = print", "TABLE"),
        ("TABLE['two'] = print", "TABLE"),
        ("del TABLE['one']", "TABLE"),
        ("LIMIT = 4", "LIMIT"),
    ],
)
def test_what_is_replaced_has_its_name(module, originals, statement, name):
    """A class that is replaced has none of the methods that it had."""
    exec(statement, vars(module))
    replaced = originals.newly_replaced()
    assert f"of_a_test.small.{name}" in replaced
    assert all(one.startswith(f"of_a_test.small.{name}") for one in replaced)
    assert not originals.newly_replaced()


def test_what_a_module_counts_may_change(module, originals):
    """Caches, and what is imported later."""
    exec("counted['calls'] = Thing.calls = 1\ndef later(): return 4", vars(module))
    assert not originals.newly_replaced()


def test_what_is_put_back_is_not_replaced(module, originals):
    """In whatever way it is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "function", print)
        patch.setitem(module.TABLE, "one", print)
        assert len(originals.newly_replaced()) == 2
    assert not originals.newly_replaced()
