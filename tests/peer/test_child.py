"""Whatever native code does in a child process is one red test that says what happened."""

import os
import signal
import sys

import pytest

from tests.peer.child import REMEDY, Child


@pytest.fixture
def child():
    opened = Child("the peer")
    yield opened
    opened.close()


def kill_itself(by: int) -> None:
    os.kill(os.getpid(), by)


@pytest.mark.parametrize("name", ["SIGILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGKILL"])
def test_a_death_by_signal_names_the_signal_and_the_next_call_works(child, name):
    before = child.call(os.getpid)
    with pytest.raises(pytest.fail.Exception, match=f"the peer was ended by {name}.*kill_itself"):
        child.call(kill_itself, int(signal.Signals[name]))
    assert child.call(os.getpid) not in (before, os.getpid())


def test_an_illegal_instruction_says_what_to_do(child):
    with pytest.raises(pytest.fail.Exception) as failed:
        child.call(kill_itself, int(signal.SIGILL))
    assert REMEDY in str(failed.value)


def test_an_abort_and_an_exit_are_named(child):
    with pytest.raises(pytest.fail.Exception, match="was ended by SIGABRT"):
        child.call(os.abort)
    with pytest.raises(pytest.fail.Exception, match="ended with exit code 3"):
        child.call(os._exit, 3)


def test_an_exception_fails_with_its_traceback_and_leaves_the_child_alive(child):
    before = child.call(os.getpid)
    with pytest.raises(pytest.fail.Exception, match="ZeroDivisionError"):
        child.call(divmod, 1, 0)
    assert child.call(os.getpid) == before


def test_an_interrupted_call_leaves_no_answer_behind(child, monkeypatch):
    child.call(os.getpid)

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(child._pipe, "recv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        child.call(divmod, 7, 2)
    assert child.call(divmod, 9, 4) == (2, 1)


@pytest.mark.peer
def test_the_peer_is_not_loaded_here(peer, synthetic_model):
    """Native code built for another processor could not kill this process."""
    path = synthetic_model(architecture="qwen3")
    assert peer.encode(path, ["a"], parse_special=False, add_bos=False) == [[ord("a")]]
    assert "llama_cpp" not in sys.modules
