"""Work beside the engine's thread: who waits for it, and until when."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from harness.serve.beside import WorkBeside


def test_work_that_is_done_in_time_holds_up_nobody() -> None:
    done: SimpleQueue[int] = SimpleQueue()
    beside = WorkBeside(done.put)
    beside.start(1, lambda: None)
    assert beside.settle(30) == []
    assert not beside.settled(1)
    assert done.empty()
    beside.close()


def test_more_work_of_a_late_request_is_waited_for_too() -> None:
    """It sits out steps until all of it is done, however often it is asked about meanwhile."""
    gates = [threading.Event(), threading.Event()]
    done: SimpleQueue[int] = SimpleQueue()
    beside = WorkBeside(done.put)
    try:
        beside.start(7, gates[0].wait)
        assert beside.settle(0) == [7]
        gates[0].set()
        assert done.get(timeout=30) == 7
        beside.start(7, gates[1].wait)
        assert beside.settle(0) == []
        assert not beside.settled(7)
        assert beside.late == {7}
        gates[1].set()
        assert done.get(timeout=30) == 7
        assert beside.settled(7)
        assert not beside.late
    finally:
        for gate in gates:
            gate.set()
        beside.close()
