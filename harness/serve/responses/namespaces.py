"""Functions in namespaces, as Codex offers those of each MCP server. The model sees one joined
name; the API's calls name both."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from harness.serve.wire_tools import MAX_TOOLS

NAMESPACE = "namespace"
"""The type of such a tool, and the field of a function or call."""
LONGEST_NAME, DIGEST_DIGITS = 64, 12
"""Most characters of a function's name, and digits of the digest that replaces other names."""


def joined_name(namespace: str | None, name: str) -> str:
    """The name of a function for the model."""
    if namespace is None:
        return name
    joined = f"{namespace.rstrip('_')}__{name}"
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", joined)
    if plain == joined and len(joined) <= LONGEST_NAME:
        return joined
    digest = hashlib.sha256(joined.encode()).hexdigest()[:DIGEST_DIGITS]
    return f"{plain[: LONGEST_NAME - DIGEST_DIGITS - 1]}_{digest}"


def out_of_namespaces(value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """A body with the functions of its namespaces as tools, each with its ``namespace``. Entries
    that are no functions, and functions above the limit, are named in ``ignored``."""
    tools = value.get("tools")
    if not isinstance(tools, list):
        return value
    spaces = [_functions_of(tool) for tool in tools]
    room, own = MAX_TOOLS - spaces.count(None), list[Any]()
    for tool, functions in zip(tools, spaces, strict=True):
        own += [tool] if functions is None else []
        if functions == []:
            ignored.append(f"{str(tool.get('name'))[:64]} ({NAMESPACE})")
        for one in functions or ():
            kind = one.get("type") if isinstance(one, dict) else None
            if kind == "function" and room > 0:
                own.append(one | {NAMESPACE: tool["name"]})
                room -= 1
            else:
                name = one.get("name") if isinstance(one, dict) else None
                ignored.append(f"{tool['name'][:64]}.{str(name)[:64]} ({str(kind)[:64]})")
    return value | {"tools": own}


def _functions_of(tool: Any) -> list[Any] | None:
    """The tools of a namespace; None for any other tool."""
    if not isinstance(tool, dict) or tool.get("type") != NAMESPACE:
        return None
    named = isinstance(tool.get("name"), str) and isinstance(tool.get("tools"), list)
    return tool["tools"] if named else []
