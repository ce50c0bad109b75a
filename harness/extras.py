"""Turns the failed import of an optional library into an error that says how to install it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from accel.wheel_parts import missing_part
from contract.errors import ConfigError
from contract.extras import install_command

SERVER, PEER, BENCH, RAY, RECEIPTS = "server", "peer", "bench", "ray", "receipts"
EXTRA_OF: Mapping[str, str] = {
    **dict.fromkeys(("llguidance", "msgspec", "prometheus_client", "tomlkit", "waitress"), SERVER),
    "matplotlib": BENCH,
    "ray": RAY,
    "cryptography": RECEIPTS,
    "llama_cpp": PEER,
}
"""The extra that brings a module."""


def missing_module(error: ModuleNotFoundError) -> str | None:
    """What to install for the module that was not found; None for one that no extra brings and no
    wheel leaves out."""
    part = missing_part(error.name or "")
    if part is not None:
        return "; ".join(part)
    name = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(name)
    return None if extra is None else f"{name} is not installed; run {install_command(extra)}"


@contextmanager
def optional_libraries(prefix: str = "") -> Iterator[None]:
    """Imports in this block raise ConfigError where the library of an extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        problem = missing_module(error)
        if problem is None:
            raise
        raise ConfigError(prefix + problem) from None
