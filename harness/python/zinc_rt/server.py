"""The server of ``zinc-rt serve`` in this process."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from contract.context_manager import ContextManager
from contract.errors import ConfigError
from zinc_rt.arguments import SERVER_NAMES, ServerSettings, settings_of, signature_of


class Server(ContextManager):
    """A server in this process, which answers at ``url`` until it is closed. A context manager."""

    def __init__(self, running: Any, owned: ExitStack, drain_seconds: float) -> None:
        self._running = running
        self._owned = owned
        self._drain_seconds = drain_seconds
        self.url: str = running.url
        """URL at which it listens, without a path."""

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def wait(self) -> None:
        """Serve until SIGTERM or Ctrl-C, as ``zinc-rt serve`` does, and close. Only for the main
        thread. Raises KeyboardInterrupt after Ctrl-C."""
        from harness.serve.signals import Signals

        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("wait: only the main thread receives signals; use close")
        with self:
            with Signals() as signals:
                signals.hold()
                interrupted = signals.serve_until_stopped(self._running, self._drain_seconds)
            if interrupted:
                signal.raise_signal(signal.SIGINT)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones end for up to ``drain_seconds``, and stop. A second
        call does nothing."""
        self._running.drain(drain_seconds)
        self._owned.close()


def serve(model: str | Path | None = None, **settings: Unpack[ServerSettings]) -> Server:
    """A server that answers from now on, in threads of its own.

    The arguments are the settings of ``zinc-rt serve``; those left out come from the environment,
    the configuration file or their defaults. ``port`` 0 takes a free one. Raises TypeError,
    ConfigError and what ``LLM`` raises.

    >>> import urllib.request
    >>> with serve("model.gguf", tier="cpu", port=0) as server:
    ...     urllib.request.urlopen(server.url + "/ready").status
    200"""
    from harness.cli.serve_command import need_server_extra, options_of

    given = settings_of(model, settings, SERVER_NAMES, "serve")
    need_server_extra()
    from harness.serve.run import running

    with ExitStack() as owned:
        server = owned.enter_context(running(options_of(given)))
        return Server(server, owned.pop_all(), given["drain_seconds"])


serve.__signature__ = signature_of(serve, ServerSettings)  # type: ignore[attr-defined]
