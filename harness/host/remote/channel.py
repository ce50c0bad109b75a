"""Messages between two of our own processes: pickles on a socket that nobody else can open."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections import deque
from io import BufferedReader
from typing import Any, cast

HEAD = struct.Struct("<Q")
BUFFER_BYTES = 1 << 20
MOST_UNSENT = 256 << 20
"""Bytes that wait for room before messages that are not needed are refused."""


class ChannelEnded(Exception):
    """The other process closed its end, or is gone."""


class ChannelFull(Exception):
    """The other process does not read."""


class Channel:
    """One end of a connected pair of sockets. Any thread may send, one thread receives. What the
    socket has no room for is sent by a thread of the channel, so that a process that hangs holds
    nobody here up; with ``waits`` the sender waits for it, so that it is never far ahead."""

    def __init__(self, connection: socket.socket, *, waits: bool = False) -> None:
        self._connection = connection
        self._waits = waits
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._reader = cast("BufferedReader", connection.makefile("rb", BUFFER_BYTES))
        self._changed = threading.Condition()
        self._unsent: deque[memoryview] = deque()
        self._closed = False
        threading.Thread(target=self._send_rest, name="channel", daemon=True).start()

    def send(self, message: object, needed: bool = True) -> None:
        """Send a message. Raises ChannelEnded, what pickling raises, and ChannelFull if it is not
        ``needed``."""
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        data = memoryview(HEAD.pack(len(pickled)) + pickled)
        with self._changed:
            if not (self._closed or self._unsent):
                data = data[self._sent_at_once(data) :]
            elif not needed and sum(map(len, self._unsent)) > MOST_UNSENT:
                raise ChannelFull
            if data and not self._closed:
                self._unsent.append(data)
                self._changed.notify_all()
                if self._waits:
                    self._changed.wait_for(lambda: self._closed or not self._unsent)
            if self._closed:
                raise ChannelEnded

    def _sent_at_once(self, data: memoryview) -> int:
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            raise ChannelEnded from None

    def _send_rest(self) -> None:
        """Send what there was no room for, until the channel is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._unsent)
                if self._closed:
                    return
                data = self._unsent[0]
            try:
                self._connection.sendall(data)
            except OSError:
                self._end_sending()
            else:
                with self._changed:
                    self._unsent.popleft()
                    self._changed.notify_all()

    def _end_sending(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def receive(self) -> Any:
        """The next message. Raises ChannelEnded, and what unpickling raises."""
        (size,) = HEAD.unpack(self._read(HEAD.size))
        return pickle.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        try:
            data = self._reader.read(size)
        except OSError:
            data = b""
        if len(data) < size:
            self._reader.close()
            raise ChannelEnded
        return data

    def close(self) -> None:
        """End both directions, so that a thread that receives here or there wakes."""
        self._end_sending()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._connection.close()
