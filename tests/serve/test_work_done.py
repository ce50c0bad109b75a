"""Who does what late work leads to."""

import threading

from harness.host.driver import EngineDriver


class IdleEngine:
    """Has nothing to do."""

    idle = True


def test_the_thread_that_computes_steps(monkeypatch) -> None:
    """Not the one that computed a mask: it would change the engine in the middle of a step."""
    asked: list[tuple[int, threading.Thread]] = []
    driver = EngineDriver(lambda observer: IdleEngine())  # type: ignore[arg-type, return-value]

    def settled(request_id: int) -> bool:
        asked.append((request_id, threading.current_thread()))
        return False

    monkeypatch.setattr(driver._background, "settled", settled)
    elsewhere = threading.Thread(target=driver._work_done, args=(3,))
    elsewhere.start()
    elsewhere.join()
    assert asked == []
    assert driver.advance()
    assert asked == [(3, threading.current_thread())]
