"""Files of tenants."""

import json
from collections.abc import Mapping
from pathlib import Path

from harness.serve.keys import key_digest


def write_tenants(folder: Path, keys: Mapping[str, str], **settings: Mapping[str, object]) -> Path:
    """Write a file of tenants, with the ids 1, 2 and so on, into a folder; returns its path.

    ``keys`` are those of the tenants by name, ``settings`` what else the file says of some of
    them."""
    path = folder / "tenants.toml"
    sections = []
    for number, (name, key) in enumerate(keys.items(), 1):
        values = {"id": number, "keys": [key_digest(key)], **settings.get(name, {})}
        lines = [f"{field} = {json.dumps(value)}" for field, value in values.items()]
        sections.append("\n".join([f"[tenant.{name}]", *lines, ""]))
    path.write_text("\n".join(sections))
    return path
