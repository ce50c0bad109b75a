"""Messages between two of our own processes: pickles on a socket that nobody else can open."""

from __future__ import annotations

import pickle
import select
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

    def send_soon(self, message: object, seconds: float) -> bool:
        """Send a small message once the socket has room, unless that takes longer than ``seconds``.
        Returns whether it was sent. Raises ChannelEnded."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._sending.acquire(timeout=seconds):
            return False
        try:
            room = select.poll()
            room.register(self._connection, select.POLLOUT)
            if not room.poll(1000 * seconds):
                return False
            self._connection.sendall(HEAD.pack(len(data)) + data)
        except (OSError, ValueError):  # ValueError: the socket is closed.
            raise ChannelEnded from None
        finally:
            self._sending.release()
        return True

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
