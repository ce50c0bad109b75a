"""Sockets of the server: their options, and sending and receiving without losing the interpreter
lock."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys

from contract.errors import ConfigError


def socket_options(send_bytes: int, unread_seconds: int) -> list[tuple[int, int, int]]:
    """Options of every connection: the size of the kernel's send buffer, and on Linux the time
    until a vanished client's connection ends."""
    options = [(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)]
    user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    if user_timeout is not None:
        options.append((socket.IPPROTO_TCP, user_timeout, unread_seconds * 1000))
    return options


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the first address of ``host``."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        # ``error.strerror`` contains the address; the errno of an unknown name is negative.
        number = error.errno or -1
        problem = os.strerror(number) if number > 0 else error.strerror
        taken = ", see zinc-rt ps" if number == errno.EADDRINUSE else ""
        raise ConfigError(
            f"cannot listen on {host}:{port}: {problem}{taken}; choose another --host or --port"
        ) from None


def allow_descriptors(count: int) -> None:
    """Let this process open ``count`` files and connections at once, or as many as it may."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if resource.RLIM_INFINITY != soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)

_LIBRARY = ctypes.PyDLL(None)
_send, _recv, _write = _LIBRARY.send, _LIBRARY.recv, _LIBRARY.write
for _function in (_send, _recv):
    _function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
    _function.restype = ctypes.c_ssize_t


_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)


def write_byte(descriptor: int) -> None:
    """Write one byte to a pipe that has room, without releasing Python's interpreter lock."""
    _write(descriptor, b"x", 1)


def send_what_fits(connection: socket.socket, data: bytes) -> int:
    """Send the first bytes of ``data`` that the kernel accepts, and return their number; 0 also for
    a closed connection, which the next send reports.

    ``socket.send`` releases Python's interpreter lock. A computing thread then takes it for some
    milliseconds, at every send of a step. This call keeps the lock, since it never waits."""
    # No other thread can close the descriptor meanwhile: that takes the interpreter lock.
    sent: int = _send(connection.fileno(), data, len(data), FLAGS)
    return sent if sent > 0 else 0


def received(connection: socket.socket, limit: int) -> bytes:
    """Up to ``limit`` available bytes, without releasing Python's interpreter lock. Empty if there
    are none, at the end of the stream and after an error."""
    data = ctypes.create_string_buffer(limit)
    return ctypes.string_at(data, max(0, int(_recv(connection.fileno(), data, limit, FLAGS))))


def has_arrived(connection: socket.socket) -> bool:
    """Whether there are bytes to be received."""
    byte, flags = ctypes.create_string_buffer(1), FLAGS | socket.MSG_PEEK
    return int(_recv(connection.fileno(), byte, 1, flags)) > 0
