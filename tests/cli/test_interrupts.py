"""Ctrl-C in the first and the last milliseconds of a command."""

import signal

import pytest

from tests.cli.conftest import SOURCES, Result, script_process

INTERRUPTING = """
import os, signal, sys

def interrupt(event, arguments):
    if event == "import" and arguments[0] == os.environ.get("INTERRUPT_AT"):
        del os.environ["INTERRUPT_AT"]
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(interrupt)
"""
"""Sends SIGINT when Python loads a module for the first time."""
AS_SCRIPT = "from harness.console_script import entry; sys.exit(entry())"
AS_MODULE = """
import runpy
sys.orig_argv[1:] = ["-m", "zinc_rt", *sys.argv[1:]]
sys.argv[0] = "-m"
runpy._run_module_as_main("zinc_rt")
"""
"""What Python does for ``-m zinc_rt``."""


@pytest.mark.parametrize(
    ("started", "module"),
    [
        (AS_SCRIPT, "harness.cli.main"),
        (AS_SCRIPT, "accel.user_folders"),
        (AS_SCRIPT, "harness.cli.findings"),
        (AS_MODULE, "contract"),
        (AS_MODULE, "numpy"),
    ],
    ids=lambda value: "" if "\n" in value or " " in value else value,
)
def test_ctrl_c_while_python_loads_is_silent(started, module):
    """As in the first milliseconds of any command."""
    named = {"INTERRUPT_AT": module, "PYTHONPATH": SOURCES}
    done = script_process(INTERRUPTING + started, "check", **named)
    assert (done.out, done.err) == ("", "")
    assert done.code in (-signal.SIGINT, 130)


def test_ctrl_c_of_a_program_that_imports_the_package_is_its_own():
    """Only ``python -m zinc_rt`` changes what Ctrl-C does."""
    script = f"{INTERRUPTING}\ntry:\n import zinc_rt\nexcept KeyboardInterrupt: print('mine')"
    for name in ("script.py", "-m"):
        given = f"import sys; sys.argv[0] = {name!r}\n{script}"
        done = script_process(given, "zinc_rt", INTERRUPT_AT="numpy", PYTHONPATH=SOURCES)
        assert (done.out, done.code) == ("mine\n", 0), done.err


def test_ctrl_c_outside_of_the_command_is_silent():
    """In the first and the last lines of the program, where no command handles it."""
    for at in ("prepare_process", "open_closed_streams"):
        given = f"import harness.cli.main as m, signal; m.{at} = lambda: signal.raise_signal(2)"
        done = script_process(f"import sys\n{given}\n{AS_SCRIPT}", "--version")
        assert done == Result(130, "", "")


BECOMES = """
import signal, sys
import harness.cli.main as main

def command(words):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise {error} from None

main._run = command
from harness.console_script import entry
sys.exit(entry())
"""


@pytest.mark.parametrize(
    ("error", "code", "begins"),
    [
        ("ImportError('numpy failed to import')", 130, ""),
        ("ValueError('a model')", 1, "error: unexpected ValueError: a model;"),
    ],
)
def test_ctrl_c_that_a_library_turns_into_a_failed_import(error, code, begins):
    """As numpy does. Any other error after Ctrl-C is an error."""
    done = script_process(BECOMES.format(error=error), "check")
    assert done.code == code
    assert done.err[: len(begins) or 1] == begins


def test_ctrl_c_before_the_first_line_of_the_script_is_silent():
    """The script that pip writes does more between its import and its call."""
    given = "from harness.console_script import entry; import signal; signal.raise_signal(2)"
    done = script_process(f"{given}; entry()", "--version")
    assert done == Result(-signal.SIGINT, "", "")


def test_ctrl_c_after_the_command_ends_the_process_at_once():
    """A KeyboardInterrupt while Python shuts down would show a traceback."""
    given = "from harness.console_script import entry; entry(); import signal\n"
    done = script_process(f"{given}signal.raise_signal(2)", "--version")
    assert (done.code, done.err) == (-signal.SIGINT, "")
