"""A run that is cut off has named what failed."""

from types import SimpleNamespace
from unittest.mock import Mock, call

from tests.failures import FailuresAtOnce


def test_a_failure_is_named_when_it_is_reported():
    terminal = Mock()
    plugin = FailuresAtOnce(terminal)
    for failed in (False, True):
        report = SimpleNamespace(failed=failed, when="call", nodeid="tests/a.py::test_b")
        plugin.pytest_runtest_logreport(report)
    assert terminal.mock_calls == [call.write_line("\nfailed: call of tests/a.py::test_b")]
