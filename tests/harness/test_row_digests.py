"""Digests of rows that one thread adds while others read them."""

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.digest import MAX_WAITING_ROWS, RowDigests
from tests.patience import PATIENCE_SECONDS


def rows(first: int, count: int) -> NDArray[np.float32]:
    return np.arange(first, first + count, dtype=np.float32)[:, None]


def test_a_reader_of_the_first_rows_disturbs_no_later_ones():
    """An answer that a stop string ends is read while the engine, which is ahead, adds rows."""
    hashed = threading.Event()

    def digest(row: NDArray[np.float32]) -> str:
        if row[0] == 0:
            hashed.wait(PATIENCE_SECONDS)
        return str(int(row[0]))

    digests = RowDigests(digest)
    digests(0, rows(0, MAX_WAITING_ROWS))
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.extend(digests.first(MAX_WAITING_ROWS)))
    reader.start()
    writer = threading.Thread(target=digests, args=(16, rows(MAX_WAITING_ROWS, 2)))
    writer.start()
    hashed.set()
    reader.join()
    writer.join()
    expected = [str(number) for number in range(MAX_WAITING_ROWS + 2)]
    assert read == expected[:MAX_WAITING_ROWS]
    assert digests.first(100) == expected


@pytest.mark.parametrize("readers", [1, 3])
def test_any_number_of_threads_read_while_rows_are_added(readers):
    digests, total = RowDigests(lambda row: str(int(row[0]))), 3000
    wrong: list[list[str]] = []
    expected = [str(number) for number in range(total)]

    def read() -> None:
        while len(found := digests.since(0)) < total:
            if found != expected[: len(found)]:
                wrong.append(found)
                return

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for first in range(0, total, 3):
        digests(first, rows(first, 3))
    for thread in threads:
        thread.join()
    assert wrong == []
    assert digests.first(total) == expected
