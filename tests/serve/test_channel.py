"""Sending at once what the kernel takes: every byte goes out once and in order, by either way."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waitress.channel import HTTPChannel

from harness.serve.listen import _Channel


class Kernel:
    """A socket that takes so many bytes a time; None is one that fails."""

    def __init__(self, takes: list[int | None]) -> None:
        self.takes = takes
        self.sent = b""

    def send(self, data: bytes) -> int:
        count = self.takes.pop(0) if self.takes else 0
        if count is None:
            raise BlockingIOError
        self.sent += data[:count]
        return min(count, len(data))


def channel(kernel: Kernel, **state: object) -> _Channel:
    """A connection on it."""
    made: _Channel = _Channel.__new__(_Channel)
    made.outbuf_lock = threading.Condition()
    made.socket, made.connected, made.will_close, made.total_outbufs_len = kernel, True, False, 0
    for name, value in state.items():
        setattr(made, name, value)
    return made


@given(
    st.lists(st.binary(min_size=1, max_size=9), max_size=12),
    st.lists(st.none() | st.integers(0, 12), max_size=12),
)
def test_every_byte_is_sent_once_and_in_order(parts: list[bytes], takes: list[int | None]) -> None:
    """Once something waits in the buffers, all that follows does."""
    kernel, buffered = Kernel(takes), []

    def slow(self: _Channel, data: bytes) -> int:
        buffered.append(data)
        self.total_outbufs_len += len(data)
        return len(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HTTPChannel, "write_soon", slow)
        one = channel(kernel)
        assert [one.write_soon(part) for part in parts] == list(map(len, parts))
    assert kernel.sent + b"".join(buffered) == b"".join(parts)


@pytest.mark.parametrize("state", [{"connected": False}, {"will_close": True}])
def test_nothing_is_sent_on_a_connection_that_ends(
    state: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffered: list[bytes] = []
    monkeypatch.setattr(
        HTTPChannel, "write_soon", lambda self, data: buffered.append(data) or len(data)
    )
    kernel = Kernel([100])
    channel(kernel, **state).write_soon(b"token")
    assert (kernel.sent, buffered) == (b"", [b"token"])
