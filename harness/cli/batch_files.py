"""The files of answers of a batch: a whole line per answer, written when it is there."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from io import FileIO
from pathlib import Path

from contract.cached_files import replacing
from contract.errors import ConfigError, system_errors_as

BEGIN = b'{"id":"batch_req_'
"""How a line of answers begins."""


class AnswerFile:
    """A file of lines with a ``custom_id``, to which lines are added. What is written stays,
    however the program ends; when the file is opened again, a line that was cut is dropped, and
    those of refused requests count as not there.

    ``known``: the index of each id in the file of requests."""

    def __init__(self, path: Path, file: FileIO, known: Mapping[str, int]) -> None:
        """Raises ConfigError for other lines than answers to the requests."""
        self.path = path
        self._file = file
        self._known = known
        self._lines: dict[str, tuple[int, int]] = {}
        """Where the line of each id begins, and its bytes."""
        self._size = self._read()
        file.truncate(self._size)

    @property
    def answered(self) -> Iterable[str]:
        """The ids of the requests that are answered."""
        return self._lines.keys()

    def add(self, custom_id: str, line: bytes) -> None:
        """Write a line. Raises OSError; then the file has nothing of it."""
        view, at = memoryview(line), self._size
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._file.truncate(at)
            error.filename = str(self.path)
            raise
        self._lines[custom_id] = at, len(line)
        self._size += len(line)

    def arrange(self) -> None:
        """Put the newest line of each request in the order of the requests. A link and the
        permissions stay. Raises OSError; then the file is as before, and complete."""
        order = sorted(self._lines, key=self._known.__getitem__)
        in_order = order == sorted(self._lines, key=self._lines.__getitem__)
        if in_order and self._size == sum(size for _, size in self._lines.values()):
            return
        target = self.path.resolve()
        mode = target.stat().st_mode & 0o777
        with target.open("rb") as old, replacing(target, mode) as new:
            for custom_id in order:
                begin, size = self._lines[custom_id]
                old.seek(begin)
                new.write(old.read(size))

    def _read(self) -> int:
        """Note the lines that are there; the bytes of those that are whole."""
        size = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    # Of a block that a crash left unwritten the disk may have zeros.
                    begin = line.rstrip(b"\0")[: len(BEGIN)]
                    if not BEGIN.startswith(begin):
                        raise self._strange(number)
                    break
                custom_id, is_answer = self._read_line(line, number)
                if is_answer:
                    self._lines[custom_id] = size, len(line)
                size += len(line)
        return size

    def _read_line(self, line: bytes, number: int) -> tuple[str, bool]:
        """The id of a line, and whether it answers the request."""
        try:
            answer = json.loads(line)
            custom_id, status = answer["custom_id"], answer["response"]["status_code"]
            index = self._known.get(custom_id)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._strange(number) from None
        if index is None:
            raise ConfigError(
                f"{self.path}: line {number} answers {custom_id!r}, which is not asked now; "
                "name another file"
            )
        return custom_id, status == HTTPStatus.OK

    def _strange(self, number: int) -> ConfigError:
        return ConfigError(f"{self.path}: line {number} is no answer of a batch; name another file")


@contextmanager
def open_answers(
    flag: str, path: Path, known: Mapping[str, int], resume: bool
) -> Iterator[AnswerFile]:
    """The file of answers that ``flag`` names. Raises ConfigError for one that has lines without
    ``resume``, that another process writes, or that ``AnswerFile`` refuses."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{flag}: {path} is no file")
    with ExitStack() as owned:
        with system_errors_as(f"{flag}: {path} cannot be written"):
            file = owned.enter_context(FileIO(path, "ab"))
            # One that ended since the file was opened may have put another in its place, or none.
            if not (_locked(file) and _is_at(path, file)):
                raise ConfigError(f"{flag}: {path} is written by another process")
            if not resume and os.fstat(file.fileno()).st_size:
                raise ConfigError(
                    f"{flag}: {path} is there; --resume goes on with it, or name another file"
                )
            answers = AnswerFile(path, file, known)
        yield answers


def _is_at(path: Path, file: FileIO) -> bool:
    """Whether a file that is open is the one that a path names."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _locked(file: FileIO) -> bool:
    """Keep the file from other processes that lock it until it is closed, on disks with locks.
    False if one has it."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
