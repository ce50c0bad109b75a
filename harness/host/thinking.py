"""The variables that tell a chat template whether to think, and how much."""

from __future__ import annotations

from typing import Any

from contract.errors import RequestError
from reference.model.chat_template import ChatTemplate

LEVELS = ("low", "medium", "high")
LOWEST_EFFORT = LEVELS[0]


def thinking_arguments(
    template: ChatTemplate, name: str, enable: bool | None, level: str | None = None
) -> dict[str, Any]:
    """The arguments of ``ChatTemplate.render`` for the model called ``name``.

    For a model that always thinks but has levels, ``enable`` False means the lowest level. Raises
    RequestError for what the template does not support."""
    levelled = template.has_reasoning_effort
    if level is not None:
        if not levelled:
            raise RequestError("thinking", f"{name} has no level {level}; give on or off")
        return {"reasoning_effort": level}
    if levelled and not template.has_thinking_toggle:
        return {"reasoning_effort": LOWEST_EFFORT} if enable is False else {}
    if enable and not template.has_thinking_toggle:
        raise RequestError("thinking", f"{name} has no switch for it")
    return {} if enable is None else {"enable_thinking": enable}
