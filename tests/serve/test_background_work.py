"""Work beside the engine's thread: who waits for it, and until when."""

import threading
from queue import SimpleQueue

from harness.host.background_work import BackgroundWork
from tests.patience import PATIENCE_SECONDS


def test_work_that_is_done_in_time_holds_up_nobody():
    done: SimpleQueue[int] = SimpleQueue()
    background = BackgroundWork(done.put)
    background.start(1, lambda: None)
    assert background.settle(PATIENCE_SECONDS) == []
    assert not background.settled(1)
    assert done.empty()
    background.close()


def test_more_work_of_a_late_request_is_waited_for_too():
    """It sits out steps until all of it is done, however often it is asked about meanwhile."""
    gates = [threading.Event(), threading.Event()]
    done: SimpleQueue[int] = SimpleQueue()
    background = BackgroundWork(done.put)
    try:
        background.start(7, gates[0].wait)
        assert background.settle(0) == [7]
        gates[0].set()
        assert done.get(timeout=PATIENCE_SECONDS) == 7
        background.start(7, gates[1].wait)
        assert background.settle(0) == []
        assert not background.settled(7)
        assert background.late == {7}
        gates[1].set()
        assert done.get(timeout=PATIENCE_SECONDS) == 7
        assert background.settled(7)
        assert not background.late
    finally:
        for gate in gates:
            gate.set()
        background.close()
