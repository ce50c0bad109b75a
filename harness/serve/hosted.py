"""Tools that other servers run themselves; this server offers none of them to a model."""

from __future__ import annotations

from typing import Any

HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp"),
    *("namespace", "tool_search", "web_fetch", "code_execution", "memory"),
)
"""How the types of such tools begin."""
CHOICES = ("auto", "none")


def without_hosted_tools(
    value: dict[str, Any], ignored: list[str], hosted: tuple[str, ...] = HOSTED
) -> dict[str, Any]:
    """A body whose tools are those that the client runs; the others are named in ``ignored``. A
    choice among no tools goes with them."""
    tools = value.get("tools")
    if not isinstance(tools, list):
        return value
    own = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(hosted):
            ignored.append(f"tools[{index}] ({kind[:64]})")
        else:
            own.append(tool)
    if len(own) == len(tools):
        return value
    rest = {name: given for name, given in value.items() if name != "tools"}
    if own:
        return rest | {"tools": own}
    if rest.get("tool_choice") in CHOICES:
        del rest["tool_choice"]
    return rest
