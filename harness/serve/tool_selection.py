"""Selects the tools that the model is offered. Drops tools that a server would run itself, and
tools that ``tool_choice`` does not allow."""

from __future__ import annotations

from typing import Any

from harness.serve.errors import invalid_value

HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp"),
    *("namespace", "tool_search", "web_fetch", "code_execution", "memory"),
)
"""Prefixes of the types of tools that a server would run itself."""
FREE_FORM = ("custom", "local_shell", "shell", "apply_patch")
"""Types of client tools whose input is free text, which this server cannot constrain."""
NO_FUNCTIONS = (*HOSTED, *FREE_FORM)
CHOICES = ("auto", "none")
ALLOWED = "allowed_tools"


def offered_tools(value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """An OpenAI body with only the tools that the model is offered. Raises ApiError."""
    return allowed_tools(without_hosted_tools(value, ignored, NO_FUNCTIONS))


def allowed_tools(value: dict[str, Any]) -> dict[str, Any]:
    """A body in which a ``tool_choice`` of ``allowed_tools`` is replaced by the allowed tools and
    its mode. Raises ApiError."""
    choice, tools = value.get("tool_choice"), value.get("tools")
    if not isinstance(choice, dict) or choice.get("type") != ALLOWED:
        return value
    form = choice.get(ALLOWED, choice)
    listed = form.get("tools") if isinstance(form, dict) else None
    if not isinstance(listed, list) or form.get("mode") not in ("auto", "required"):
        raise invalid_value(
            "tool_choice", "tool_choice of allowed_tools needs tools, and a mode: auto or required"
        )
    names = [_name_of(tool) for tool in listed]
    known = tools if isinstance(tools, list) else []
    for name in names:
        if name is None or name not in map(_name_of, known):
            raise invalid_value(
                "tool_choice",
                f"tool_choice allows {str(name)[:64]!r}, which is not among the tools",
            )
    own = [tool for tool in known if _name_of(tool) in names]
    return value | {"tools": own, "tool_choice": form["mode"]}


def _name_of(tool: Any) -> str | None:
    """The name of a function in either of OpenAI's forms of a tool."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def without_hosted_tools(
    value: dict[str, Any], ignored: list[str], hosted: tuple[str, ...] = HOSTED
) -> dict[str, Any]:
    """A body with only the tools that the client runs; the names of others go to ``ignored``. If no
    tool is left, ``tool_choice`` auto and none are removed too."""
    tools = value.get("tools")
    if not isinstance(tools, list):
        return value
    own = without_kinds("tools", tools, hosted, ignored)
    if len(own) == len(tools):
        return value
    rest = {name: given for name, given in value.items() if name != "tools"}
    if own:
        return rest | {"tools": own}
    if rest.get("tool_choice") in CHOICES:
        del rest["tool_choice"]
    return rest


def without_kinds(
    field: str, items: list[Any], kinds: tuple[str, ...], ignored: list[str]
) -> list[Any]:
    """The items of a field whose types have none of these prefixes; the names of others go to
    ``ignored``."""
    for index, item in enumerate(items):
        if kind_of(item).startswith(kinds):
            ignored.append(f"{field}[{index}] ({kind_of(item)[:64]})")
    return [item for item in items if not kind_of(item).startswith(kinds)]


def kind_of(item: Any) -> str:
    """The ``type`` of a tool or item; empty if there is none."""
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else ""
