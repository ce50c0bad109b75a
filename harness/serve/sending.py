"""Sending what the kernel takes at once, without letting another thread in between.

A socket's own ``send`` lets go of the interpreter. Whoever computes takes it then and keeps it for
some milliseconds, at every send of a step. This one keeps it: it never waits for anything.
"""

from __future__ import annotations

import ctypes
import socket

FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)

_send = ctypes.PyDLL(None).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


def send_what_fits(connection: socket.socket, data: bytes) -> int:
    """How many of the first bytes of ``data`` the kernel took. None where the connection is no
    more, too: the send of the rest reports it."""
    # A descriptor cannot be closed and be another's in between: that takes the interpreter.
    return max(0, int(_send(connection.fileno(), data, len(data), FLAGS)))
