"""Items of a conversation that other servers answered with, in this server's words."""

from __future__ import annotations

import json
from typing import Any

from harness.serve.hosted import HOSTED, without_hosted_tools

FREE_FORM = ("custom", "local_shell", "shell", "apply_patch")
"""Tools of the client whose input is no JSON object, which no call can be held to here."""
CUSTOM = {"custom_tool_call": "function_call", "custom_tool_call_output": "function_call_output"}
CALLS_BY_SERVER = (*HOSTED, "local_shell_call", "shell_call", "apply_patch_call", "compaction")
"""How the types of items begin that a server made for itself."""


def readable_items(value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """A body of ``/v1/responses`` with the tools and items that this server knows; the others are
    named in ``ignored``."""
    value = without_hosted_tools(value, ignored, (*HOSTED, *FREE_FORM))
    items = value.get("input")
    if not isinstance(items, list):
        return value
    own = []
    for index, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind.startswith(CALLS_BY_SERVER):
            ignored.append(f"input[{index}] ({kind[:64]})")
        elif isinstance(kind, str) and kind in CUSTOM:
            own.append(_function_item(item, CUSTOM[kind]))
        else:
            own.append(item)
    return value | {"input": own}


def _function_item(item: dict[str, Any], kind: str) -> dict[str, Any]:
    """A call of a tool with free input, or what it gave, as one of a function."""
    fields = {name: given for name, given in item.items() if name != "input"} | {"type": kind}
    if kind == "function_call":
        fields["arguments"] = json.dumps({"input": item.get("input")})
    return fields
