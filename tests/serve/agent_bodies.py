"""Bodies of coding agents, turn by turn, with neutral content: the fields are those that Codex
0.171.0, Claude Code 2.1.197 and OpenCode 1.18.33 send."""

from typing import Any

Body = dict[str, Any]
TURNS = 30
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command."}},
    "required": ["command"],
    "additionalProperties": False,
}
STRICTER = {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMA}
DOCS = {"namespace": "mcp__docs", "name": "search"}
"""A call of an MCP server's tool."""
REMINDER = "<system-reminder>\nToday is a day.\n</system-reminder>\n"


def said(turn: int) -> str:
    """What the tool gave in a turn."""
    return f"file {turn}\nline {turn * 7}"


def codex(turn: int) -> Body:
    """``POST /v1/responses``: developer messages, calls and their outputs as items, encrypted
    reasoning asked for, an MCP server's tools, tools that only OpenAI runs."""

    def message(role: str, text: str, number: int) -> Body:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "id": f"msg_{number}", "role": role, "content": content}

    items = [
        message("developer", "You are a coding agent.", 0),
        message("developer", "<skills_instructions>\nNone.\n</skills_instructions>", 1),
        message("user", "<environment_context>\n  <cwd>/w</cwd>\n</environment_context>", 2),
        message("user", "Look at the files.", 3),
    ]
    for number in range(turn):
        call = f"call_{number}"
        arguments = f'{{"command": "show {number}"}}'
        items += [
            {"type": "reasoning", "id": f"rs_{number}", "summary": [], "encrypted_content": None},
            {
                "type": "function_call", "id": f"fc_{number}", "call_id": call,
                "arguments": arguments, **({"name": "exec_command"} if number % 5 else DOCS),
            },
            {"type": "function_call_output", "call_id": call, "output": said(number)},
        ]  # fmt: skip
    function = {"type": "function", "name": "exec_command", "description": "Runs a command."}
    search = {"type": "function", "name": "search", "strict": False, "parameters": SCHEMA}
    return {
        "model": "tiny", "input": items,
        "tools": [
            {**function, "strict": False, "parameters": SCHEMA},
            {"type": "namespace", "name": "mcp__docs", "description": "x", "tools": [search]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
        "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "key", "client_metadata": {"session_id": "s"}, "max_output_tokens": 2,
    }  # fmt: skip


def claude_code(turn: int) -> Body:
    """``POST /v1/messages?beta=true``: blocks marked for a cache, a system turn after the first
    question, adaptive thinking, edits of the context, and in front of all a digest of the body."""
    mark = {"cache_control": {"type": "ephemeral"}}
    question = [{"type": "text", "text": REMINDER}, {"type": "text", "text": "Look.", **mark}]
    messages: list[Body] = [
        {"role": "user", "content": question},
        {"role": "system", "content": "Agents you may ask: none."},
    ]
    for number in range(turn):
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "Bash"}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": said(number)}
        reasoning = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
        arguments = {"command": f"show {number}"}
        messages += [
            {"role": "assistant", "content": [reasoning, {**call, "input": arguments}]},
            {"role": "user", "content": [{**result, "is_error": number % 7 == 3}]},
        ]
    tool = {"name": "Bash", "description": "Runs a command.", "input_schema": STRICTER}
    return {
        "model": "tiny", "messages": messages,
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn:05x};",
            },
            {"type": "text", "text": "You are an agent.", **mark},
        ],
        "tools": [tool, {**tool, "name": "WebSearch"}],
        "metadata": {"user_id": '{"device_id":"d"}'}, "max_tokens": 2,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, "stream": True,
    }  # fmt: skip


def opencode(turn: int) -> Body:
    """``POST /v1/chat/completions``: one system message, calls without content, usage asked for."""
    messages: list[Body] = [
        {"role": "system", "content": "You are opencode."},
        {"role": "user", "content": '"Look."\n'},
    ]
    for number in range(turn):
        call = f"call_{number}"
        function = {"name": "bash", "arguments": f'{{"command":"show {number}"}}'}
        messages += [
            {
                "role": "assistant",
                "content": "" if number % 2 else None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": call, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call, "content": said(number)},
        ]
    function = {"name": "bash", "description": "Runs a command.", "parameters": STRICTER}
    return {
        "model": "tiny", "max_tokens": 2, "messages": messages,
        "tools": [{"type": "function", "function": function}], "tool_choice": "auto",
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
