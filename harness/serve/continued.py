"""Answers that continue the last message of a conversation instead of beginning a turn."""

from __future__ import annotations

from harness.serve.errors import ApiError
from harness.serve.wire import AssistantMessage, ChatRequest
from reference.model.chat_template import RenderedChat

FIELD = "continue_final_message"


def continued_text(body: ChatRequest) -> str | None:
    """The text that the answer continues; None where it begins a turn. Raises ApiError."""
    if not body.continue_final_message:
        return None
    last = body.messages[-1]
    if body.add_generation_prompt:
        raise _refused("and add_generation_prompt contradict each other", "invalid_value")
    if not isinstance(last, AssistantMessage) or last.tool_calls or last.refusal is not None:
        raise _refused("needs a text of the assistant's as the last message", "invalid_value")
    content = last.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    if not text.strip():
        raise _refused("needs a last message that is not empty", "invalid_value")
    return text


def cut_after(rendered: RenderedChat, text: str) -> RenderedChat:
    """A conversation that is cut after ``text``, the text of its last message. Raises ApiError
    where the template writes more behind that message, or changes its text."""
    for written in (text, text.strip()):
        at = rendered.text.rfind(written)
        end = at + len(written)
        rest = len(rendered.text) - end
        by_template = sum(max(0, b - max(a, end)) for a, b in rendered.template_spans)
        if at >= 0 and by_template == rest:
            spans = tuple((a, min(b, end)) for a, b in rendered.template_spans if a < end)
            return RenderedChat(rendered.text[:end], spans)
    raise _refused("cannot be followed: the template rewrites the last message", "unsupported")


def _refused(problem: str, code: str) -> ApiError:
    return ApiError(400, f"{FIELD} {problem}", param=FIELD, code=code)
