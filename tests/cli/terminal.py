"""A pseudo terminal: what a user types and sees."""

import contextlib
import os
import pty
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cli.conftest import command, environment
from tests.patience import PATIENCE_SECONDS


class Terminal:
    """A command in a pseudo terminal."""

    def __init__(self, *words: object, hold: Path | None = None) -> None:
        self.seen = ""
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command(*words, hold=hold),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(TERM="dumb"),
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, count: int = 1) -> None:
        """Until ``text`` was seen ``count`` times."""
        while self.seen.count(text) < count:
            self.wait_for_more()

    def wait_behind(self, text: str) -> None:
        """Until anything was seen behind ``text``, perhaps together with it."""
        self.wait_for(text)
        while self.seen.endswith(text):
            self.wait_for_more()

    def wait_for_more(self) -> None:
        """Until anything more was seen."""
        ready, _, _ = select.select([self._master], [], [], PATIENCE_SECONDS)
        assert ready, self.seen
        self.seen += os.read(self._master, 4096).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextlib.contextmanager
def terminal(*words: object, hold: Path | None = None) -> Iterator[Terminal]:
    """A command in a pseudo terminal, whose engine ``hold`` holds. A test that fails, or hangs,
    shows what was seen."""
    opened = Terminal(*words, hold=hold)
    try:
        yield opened
    except BaseException:
        print("the terminal showed:", opened.seen, sep="\n")
        raise
    finally:
        opened.close()
