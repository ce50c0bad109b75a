"""A server whose standard error nobody reads: it starts, answers and ends all the same."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import termios
import threading
from pathlib import Path

import pytest

from harness import unblocked
from harness.unblocked import UnblockedStream
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.http import Http
from tests.serve.test_engine_process import BODY, COMPLETIONS
from tests.serve.test_process import server_command, server_environment, url_of

LINES = 300


def fill(pipe: int) -> None:
    """Write until there is no room."""
    os.set_blocking(pipe, False)
    try:
        while True:
            os.write(pipe, b"0" * 100)
    except BlockingIOError:
        os.set_blocking(pipe, True)


def read(pipe: int) -> bytes:
    """What is there."""
    os.set_blocking(pipe, False)
    found = b""
    try:
        while part := os.read(pipe, 1 << 16):
            found += part
    except BlockingIOError:
        pass
    return found


@pytest.mark.parametrize("more", [(), ("--engine-process", "on")])
def test_a_server_works_though_nobody_reads_its_log(
    tiny_model_path: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Who reads again is told how much is lost."""
    reading, writing = os.pipe()
    fill(writing)
    line = server_command(tiny_model_path, "--port", "0", "--context", "256", *more)
    with subprocess.Popen(
        line, env=server_environment(tmp_path), stderr=writing, stdout=subprocess.DEVNULL
    ) as server:
        try:
            os.close(writing)
            wait_until(lambda: url_of(server) is not None)
            http = Http(str(url_of(server)))
            assert http.post(COMPLETIONS, BODY).status == 200
            for _ in range(LINES):
                http.get("/health")
            # A client has its answer before the line is written: the last one may find room.
            told = bytearray(read(reading))
            assert http.post(COMPLETIONS, BODY).status == 200

            def logged() -> bool:
                told.extend(read(reading))
                return b"POST /v1/completions" in told

            wait_until(logged)
            assert b"lines were lost: nobody read]\n" in told
            fill_again = os.open(f"/proc/self/fd/{reading}", os.O_WRONLY)
            fill(fill_again)
            os.close(fill_again)
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_SECONDS) == 0
        finally:
            server.kill()
            os.close(reading)


def test_lines_are_whole_and_lost_ones_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unblocked, "ROOM_SECONDS", 0.01)
    reading, writing = os.pipe()
    stream = UnblockedStream(writing)
    print("a line, and", "more", file=stream)
    print("unfinished", end="", file=stream)
    assert read(reading) == b"a line, and more\n"
    stream.flush()
    assert read(reading) == b"unfinished"
    assert (stream.fileno(), stream.isatty(), stream.writable()) == (writing, False, True)
    fill(writing)
    for number in range(3):
        print(number, file=stream, flush=True)
    read(reading)
    print("\udcff\u2003", file=stream)
    assert read(reading) == b"[3 lines were lost: nobody read]\n\\udcff\xe2\x80\x83\n"
    print("x" * 100_000, file=stream)
    assert set(read(reading)) == set(b"x")
    print("after", file=stream)
    assert read(reading) == b"\n[1 lines were lost: nobody read]\nafter\n"
    os.close(reading)
    print("to nobody", file=stream)
    os.close(writing)


@pytest.mark.parametrize("width", [37, 100, 701])
def test_nobody_waits_for_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Which may have room for a part of a line, and is as it was for who else has it."""
    monkeypatch.setattr(unblocked, "ROOM_SECONDS", 0.01)
    controlling, terminal = pty.openpty()
    modes = termios.tcgetattr(terminal)
    stream = UnblockedStream(terminal)

    def log() -> None:
        for _ in range(2000):
            print("y" * width, file=stream)

    logging = threading.Thread(target=log, daemon=True)
    logging.start()
    logging.join(PATIENCE_SECONDS)
    assert not logging.is_alive()
    assert os.get_blocking(terminal)
    assert termios.tcgetattr(terminal) == modes
    wait_until(lambda: bool(read(controlling)))
    told = bytearray()

    def is_after() -> bool:
        """The system may take its time to make room of what was read."""
        print("after", file=stream, flush=True)
        told.extend(read(controlling))
        return b"\r\nafter\r\n" in told

    wait_until(is_after)
    before = told[: told.index(b"\r\nafter\r\n")].split(b"\r\n")
    assert b"lines were lost" in before[-1]
    os.close(controlling)
    os.close(terminal)
