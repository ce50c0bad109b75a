"""Messages between two of our own processes: pickles on a socket that nobody else can open."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from io import BufferedReader
from typing import Any, cast

HEAD = struct.Struct("<Q")
BUFFER_BYTES = 1 << 20


class ChannelEnded(Exception):
    """The other process closed its end, or is gone."""


class Channel:
    """One end of a connected pair of sockets. Any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._reader = cast("BufferedReader", connection.makefile("rb", BUFFER_BYTES))
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message. Raises ChannelEnded, and what pickling raises."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            try:
                self._connection.sendall(HEAD.pack(len(data)) + data)
            except OSError:
                raise ChannelEnded from None

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
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._connection.close()
