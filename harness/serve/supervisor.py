"""Notices to the supervisor that started the server, by systemd's ``Type=notify`` protocol."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

VARIABLE = "NOTIFY_SOCKET"


def tell(state: str) -> None:
    """Send ``READY=1`` or ``STOPPING=1`` to the supervisor, if there is one; see sd_notify(3)."""
    address = os.environ.get(VARIABLE, "")
    if address[:1] not in ("/", "@"):
        return
    # An abstract socket's name begins with a zero byte.
    name = f"\0{address[1:]}" if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.sendto(state.encode(), name)
