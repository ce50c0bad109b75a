"""``zinc-rt ps`` and ``zinc-rt stop``: list and stop this user's running servers."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError, ZincError
from harness.cli.parser import add_json_flag, add_switch, real_number
from harness.console import note, table
from harness.settings import group_of

if TYPE_CHECKING:
    from harness.serve.presence import Presence

POLL_SECONDS = 0.1
SPARE_SECONDS = 10.0
"""Seconds a server gets to end in addition to the time its answers may take."""
EXAMPLES = """\
examples:
  zinc-rt stop                your only server; asks on a terminal
  zinc-rt stop 8080           the one with that port, address or process number
  zinc-rt stop 8080 --now     cut its running answers
"""


class StillRunning(ZincError):
    """A server did not end in time."""

    exit_code = 1


def add_parser(subparsers: Any) -> None:
    """Add the ``ps`` and ``stop`` commands; their parsers set ``func(args) -> exit code``."""
    text = "list your running servers"
    parser = subparsers.add_parser("ps", help=text, description=text)
    add_json_flag(parser)
    parser.set_defaults(func=list_servers)
    text = "stop one of your servers, after its running answers"
    parser = subparsers.add_parser("stop", help=text, description=text, epilog=EXAMPLES)
    parser.add_argument(
        "server", nargs="?", metavar="SERVER", help="its address, port or process number"
    )
    group = group_of(parser, "server")
    add_switch(group, "--now", help="cut its running answers")
    add_switch(group, "-y", "--yes", help="do not ask, also where no SERVER is named")
    group.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long to wait [default: the server's --drain-seconds and 10 more]",
    )
    parser.set_defaults(func=stop)


def list_servers(args: argparse.Namespace) -> int:
    """Print one row per server."""
    from harness.serve.presence import present

    servers = present()
    if args.json:
        print(json.dumps([asdict(server) for server in servers], indent=1))
        return 0
    rows = [("ADDRESS", "MODEL", "TIER", "BUSY", "WAITING", "UP", "PROCESS", "STATE")]
    for server in servers:
        state = "draining" if server.draining else "ready"
        busy = f"{server.running} of {server.slots}"
        up = _duration(server.uptime_seconds)
        rows.append(
            (
                *(server.url, server.model, server.tier, busy, str(server.waiting), up),
                *(str(server.pid), state),
            )
        )
    print(table(rows))
    return 0


def stop(args: argparse.Namespace) -> int:
    """Ask a server to end and wait until it has."""
    from harness.serve.presence import present

    server = _chosen(args.server, present())
    if args.server is None and not args.yes and sys.stdin.isatty() and not _agreed(server):
        note(f"{server.url} goes on")
        return 1
    import psutil

    try:
        process = psutil.Process(server.pid)
        process.send_signal(signal.SIGINT if args.now else signal.SIGTERM)
        limit = SPARE_SECONDS if args.now else server.drain_seconds + SPARE_SECONDS
        _wait(server, limit if args.timeout is None else args.timeout)
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied:
        raise ConfigError(f"process {server.pid} may not be signalled; is it yours?") from None
    note(f"{server.url} has ended")
    return 0


def _agreed(server: Presence) -> bool:
    """Ask at the terminal whether this server is to be stopped."""
    busy = f"{server.running} running and {server.waiting} waiting requests"
    print(
        f"stop {server.url} ({server.model}, {busy})? [y/N] ", end="", file=sys.stderr, flush=True
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _chosen(named: str | None, servers: Sequence[Presence]) -> Presence:
    if not servers:
        raise ConfigError("no server of this user is running")
    fitting = [server for server in servers if named is None or _fits(named, server)]
    if len(fitting) == 1:
        return fitting[0]
    urls = ", ".join(server.url for server in servers)
    if not fitting:
        raise ConfigError(f"no server at {named!r}; there is {urls}")
    raise ConfigError(f"which of them? name one: {urls}")


def _fits(named: str, server: Presence) -> bool:
    address = server.url.partition("://")[2]
    requested = named.partition("://")[2].rstrip("/") or named
    return requested in (address, address.rpartition(":")[2], str(server.pid))


def _wait(server: Presence, seconds: float) -> None:
    """Wait until the server has ended, printing how many answers are left when that changes. Raises
    StillRunning."""
    from harness.serve.presence import present

    deadline = time.monotonic() + seconds
    reported = None
    while server.alive:
        latest = next((one for one in present() if one.pid == server.pid), server)
        left = (latest.running, latest.waiting)
        if latest.draining and left != reported:
            note(f"{server.url}: {left[0]} running, {left[1]} waiting")
            reported = left
        if time.monotonic() >= deadline:
            raise StillRunning(
                f"{server.url} still runs after {seconds:.0f} s; wait on, or cut its answers with "
                f"`zinc-rt stop {server.pid} --now`, or end it in any case with `kill -9 "
                f"{server.pid}`, which loses nothing that was counted"
            )
        time.sleep(POLL_SECONDS)


def _seconds(text: str) -> float:
    value = real_number(text)
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return value


def _duration(seconds: float) -> str:
    minutes, hours, days = (int(seconds // size) for size in (60, 3600, 86_400))
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"
