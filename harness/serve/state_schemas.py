"""The types of the answers about a server's state, for the OpenAPI document."""

from __future__ import annotations

from msgspec import Struct


class Status(Struct):
    """The state of a server."""

    status: str


class Health(Status, omit_defaults=True):
    """How a server is, and the model that answers; a server with keys tells the status alone."""

    model: str = ""
    active: int = 0
    queued: int = 0
    context: dict[str, int] = {}
    memory: dict[str, int] = {}
    disk_cache: dict[str, int | str] = {}


class Version(Struct):
    """The version of the server and the function that its model computes."""

    version: str
    fingerprint: str
