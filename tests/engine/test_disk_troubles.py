"""A disk that is full, forbidden, broken, slow or gone changes no answer and stops no engine."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from contract.arithmetic import PAGE_TOKENS
from reference.memory.disk import cache as cache_module
from reference.memory.disk import entry as entry_module
from reference.memory.disk import folder as folder_module
from tests.engine.disk_engines import PROMPT, WHOLE, Life, files, life, lived, request


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_takes_nothing_is_told_once(dense, folder, number, monkeypatch):
    """Full, read-only, forbidden or broken."""
    with life(dense, None) as cold:
        expected = cold.ask()
    monkeypatch.setattr(folder_module, "_write_all", _after_the_secret(refusing(number)))
    with life(dense, folder) as first:
        assert first.ask() == expected
        assert first.ask(PROMPT[::-1]) != expected
        first.flush()
        assert first.counts.written == 0
        assert first.counts.dropped
        assert os.strerror(number) in first.counts.problem
    (line,) = first.lines
    assert os.strerror(number) in line
    assert str(folder) in line
    assert not list(folder.rglob("*.partial"))


def _after_the_secret(refuse: Callable[..., Any]) -> Callable[[int, bytes], None]:
    write = folder_module._write_all

    def write_or_refuse(handle: int, part: bytes) -> None:
        (write if len(part) == folder_module.SECRET_BYTES else refuse)(handle, part)

    return write_or_refuse


def test_a_disk_that_is_full_for_a_while_is_used_again(dense, folder, monkeypatch):
    with life(dense, folder) as first:
        with monkeypatch.context() as patch:
            patch.setattr(folder_module, "_write_all", refusing(errno.ENOSPC))
            expected = first.ask()
            first.flush()
            assert not first.counts.written
        for turn in range(8):
            first.ask(PROMPT[turn:])
            first.flush()
        assert first.counts.written
        assert first.counts.problem == ""
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert len(first.lines) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_disk_that_gives_nothing_is_told_once(dense, folder, number, monkeypatch):
    expected = lived(dense, folder)
    monkeypatch.setattr(cache_module, "read_entry", refusing(number))
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == 0
    (line,) = second.lines
    assert os.strerror(number) in line


def test_a_folder_that_cannot_be_made_is_told_once(dense, tmp_path):
    (tmp_path / "file").write_text("this is no folder")
    with life(dense, None) as cold:
        expected = cold.ask()
    with life(dense, tmp_path / "file") as first:
        assert first.ask() == expected
        assert first.counts.problem
    (line,) = first.lines
    assert "goes on without it" in line


def test_a_folder_that_cannot_be_made_at_first_is_used_later(dense, folder, monkeypatch):
    """A disk that was full, or not there, when the server began. The next one finds what was
    stored."""
    with monkeypatch.context() as patch, ExitStack() as owned:
        patch.setattr(folder_module, "secret_in", refusing(errno.ENOSPC))
        first = owned.enter_context(life(dense, folder))
        first.ask()
        first.flush()
        assert first.counts.dropped
        assert not list(folder.rglob("*.page"))
        patch.undo()
        for turn in range(8):
            expected = first.ask(PROMPT[turn:])
            first.flush()
        assert first.counts.written
        assert first.counts.problem == ""
        assert first.counts.used_bytes
        owned.close()
        assert len(first.lines) == 1
    with life(dense, folder) as second:
        assert second.ask(PROMPT[turn:]) == expected
        assert second.from_disk


def test_a_folder_that_another_process_made_is_left_to_it(dense, folder, monkeypatch):
    """Its secret gives pages other names; what is found there is none of this process's."""
    with monkeypatch.context() as patch, ExitStack() as owned:
        patch.setattr(folder_module, "secret_in", refusing(errno.ENOSPC))
        first = owned.enter_context(life(dense, folder))
        patch.undo()
        lived(dense, folder)
        before = files(folder)
        for turn in range(4):
            first.ask(PROMPT[turn:])
        first.flush()
        assert first.counts.dropped
        assert "another process" in first.counts.problem
        owned.close()
        assert files(folder) == before


def test_a_disk_that_recovers_and_fails_again_is_told_each_time(dense, folder, monkeypatch):
    """However many writes failed, one is tried a minute after the last."""
    now = [0.0]
    with life(dense, folder, clock=lambda: now[0]) as first:
        for outage in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(folder_module, "_write_all", refusing(errno.ENOSPC))
                for turn in range(1, 9):
                    ask(first, turn + 10 * outage)
                assert len(first.lines) == 1 + 2 * outage
            now[0] += 59.0
            ask(first, 9 + 10 * outage)
            assert first.counts.problem, "the next one is tried after 100 others"
            now[0] += 1.0
            ask(first, 30 + outage)
            assert first.counts.problem == ""
    assert ["written again" in line for line in first.lines] == [False, True] * 2


def ask(first: Life, turn: int) -> None:
    """A prompt that nobody asked before, and until it is written."""
    first.ask(PROMPT[turn:])
    first.flush()


def test_a_folder_that_vanishes_is_made_again(dense, folder):
    """With the same secret, so pages keep their names."""
    with life(dense, folder) as first:
        ask(first, 0)
        for turn in range(1, 4):
            shutil.rmtree(folder)
            ask(first, turn)
        expected = first.ask(PROMPT[turn:])
        assert first.counts.dropped == 0
        assert first.counts.used_bytes
    (line,) = first.lines
    assert f"{folder} was removed" in line
    with life(dense, folder) as second:
        assert second.ask(PROMPT[turn:]) == expected
        assert second.from_disk


def test_the_folder_of_a_disk_that_is_not_mounted_is_not_made_on_another(
    dense, folder, monkeypatch
):
    with life(dense, folder) as first:
        ask(first, 0)
        kept = folder.rename(folder.with_name("kept"))
        assert first.engine.disk is not None
        opened = first.engine.disk._folder
        assert opened is not None
        assert not opened.is_elsewhere
        monkeypatch.setattr(opened, "_device", -1)
        ask(first, 1)
        assert not folder.exists()
        assert first.counts.dropped
        kept.rename(folder)
        for turn in range(2, 6):
            ask(first, turn)
        assert first.counts.problem == ""
    (line,) = first.lines
    assert "file system is gone" in line


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What the disk waits for; it is opened at the end of the test, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


def test_a_disk_that_hangs_while_it_is_read_delays_nobody(dense, folder, gate, monkeypatch):
    """What nothing is read of for the time of patience, here none, is computed."""
    expected = lived(dense, folder)
    read = entry_module.read_entry

    def hang(*parts: Any) -> Any:
        gate.wait()
        return read(*parts)

    monkeypatch.setattr(cache_module, "read_entry", hang)
    with life(dense, folder, patience=-1.0) as second:
        assert second.ask() == expected
        assert second.from_disk == 0
        assert second.ask(PROMPT[:40]) == second.ask(PROMPT[:40])
        assert len(second.lines) == 1
        gate.set()


def test_a_disk_that_hangs_while_it_is_written_delays_nobody(dense, folder, gate, monkeypatch):
    """What has no room in the queue is not written, unless it is still in memory when there is
    room again."""
    with life(dense, None) as cold:
        expected = [cold.ask(PROMPT[turn:]) for turn in range(3)]
    write = folder_module.CacheFolder.write

    def hang(*parts: Any) -> bool:
        gate.wait()
        return write(*parts)

    monkeypatch.setattr(folder_module.CacheFolder, "write", hang)
    with life(dense, folder, queue_bytes=1, pages=14, slots=1) as first:
        assert [first.ask(PROMPT[turn:]) for turn in range(3)] == expected
        assert first.counts.written == 0
        gate.set()
        first.flush()
        assert first.ask(PROMPT[5:]) != expected
    assert first.counts.dropped, "what was evicted while the disk hung"
    assert first.counts.written
    with life(dense, folder) as second:
        assert [second.ask(PROMPT[turn:]) for turn in range(3)] == expected


def test_the_end_waits_no_longer_than_it_may(dense, folder, gate, monkeypatch):
    monkeypatch.setattr(folder_module.CacheFolder, "write", lambda *parts: gate.wait())
    with life(dense, folder, flush_seconds=0.0) as first:
        first.ask()
    pages = first.counts.dropped
    assert pages
    assert [line.partition(" lacks ")[2].split()[0] for line in first.lines] == [f"{pages}"]


@pytest.mark.parametrize("queue_bytes", [1, 1 << 30])
def test_the_end_says_what_it_had_no_time_for(dense, folder, gate, monkeypatch, queue_bytes):
    """Also of pages for which the queue had no room; and nothing where all was written."""
    with monkeypatch.context() as patch:
        patch.setattr(folder_module.CacheFolder, "write", lambda *parts: gate.wait())
        with life(dense, folder, flush_seconds=0.0, queue_bytes=queue_bytes) as first:
            first.ask()
        (line,) = first.lines
        assert f"lacks {WHOLE // PAGE_TOKENS} pages" in line
        gate.set()
    with life(dense, folder) as second:
        second.ask()
    assert second.lines == []


def test_what_waits_at_the_end_is_written(dense, folder, gate, monkeypatch):
    """Also where the queue has no room for it before."""
    write = folder_module.CacheFolder.write

    def hang(*parts: Any) -> bool:
        gate.wait()
        return write(*parts)

    monkeypatch.setattr(folder_module.CacheFolder, "write", hang)
    with life(dense, folder, queue_bytes=1) as first:
        expected = first.ask()
        assert first.counts.written == 0
        gate.set()
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == WHOLE


def test_a_step_that_fails_leaves_nothing_on_disk(dense, folder, monkeypatch):
    """Its pages may hold anything: here a third of the prompt was computed with wrong bits."""
    with life(dense, None) as cold:
        expected = cold.ask()
    with life(dense, folder, tier="late") as first:
        runner = first.engine.runner
        collect, failing = runner.collect, [True]

        def fail_once(submission: Any) -> Any:
            result = collect(submission)
            if failing.pop() if failing else False:
                for name in ("state.kv[0]", "state.kv[1]"):
                    runner.buffer(name)[...] ^= 0x11
                raise RuntimeError("the device failed")
            return result

        monkeypatch.setattr(runner, "collect", fail_once)
        with pytest.raises(RuntimeError, match="the device failed"):
            first.ask()
        monkeypatch.undo()
        first.flush()
        assert first.counts.written == 0
        list(first.engine.run())
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == WHOLE


@pytest.mark.parametrize("given_back", [False, True])
def test_a_step_in_flight_that_fails_at_the_end_leaves_nothing_on_disk(
    dense, folder, given_back, monkeypatch
):
    """What was read of steps before it was written; of the rest nobody knows what it is. The error
    is reported once, however often the end fails."""
    with life(dense, folder, tier="late", steps_ahead=2) as first:
        first.engine.submit(request(1))
        # The first steps may only wait until the folder was looked at.
        while first.engine.progress(1) < WHOLE:
            first.engine.step()
        first.engine.cancel(1)
        first.flush()
        before = len(files(folder))
        monkeypatch.setattr(first.engine.runner, "collect", refusing(errno.EIO))
        if given_back:
            first.engine.abandon()
    (line,) = first.lines
    assert os.strerror(errno.EIO) in line
    assert str(folder) in line
    assert len(files(folder)) == before < WHOLE // 16
    with life(dense, None) as cold:
        expected = cold.ask()
    with life(dense, folder) as second:
        assert second.ask() == expected
        assert second.from_disk == before * 16
