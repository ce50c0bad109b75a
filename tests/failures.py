"""A plugin of pytest: a run that is cut off before its summary has named what failed."""

import pytest


class FailuresAtOnce:
    """Writes a line for each failure when it is reported."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Behind the letter that stands for it."""
        if report.failed:
            self._terminal.write_line(f"\nfailed: {report.when} of {report.nodeid}")


def register(config: pytest.Config) -> None:
    """Makes the plugin one of this run, where it has a terminal: processes of xdist have none."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal), "failures at once")
