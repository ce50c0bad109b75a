"""The address at which others reach a server that listens on every address."""

from __future__ import annotations

import ipaddress
import socket

ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that exist nowhere: choosing the way to them sends nothing."""


def reachable_host(host: str) -> str:
    """The host of a link to a server that listens on ``host``: for 0.0.0.0 and :: the address that
    this machine uses towards others, loopback where it has none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        address = ipaddress.ip_address(_own_address(address.version == 6))
    return f"[{address}]" if address.version == 6 else str(address)


def _own_address(six: bool) -> str:
    family = socket.AF_INET6 if six else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ELSEWHERE[family], 9))
            found: str = probe.getsockname()[0]
            return found
    except OSError:
        return "::1" if six else "127.0.0.1"
