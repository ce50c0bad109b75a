"""Chat templates that write calls as models of families do, for tests of what reads them."""

from __future__ import annotations

from harness.host.dialect.section_calls import DEEPSEEK_CALLS, FENCED_CALLS, KIMI_CALLS

LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    '{{ \'{"name": "\' + c.name + \'", "parameters": \' }}{{ c.arguments | tojson }}{{ "}" }}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}{{ tools or '' }}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]["
    "{% for t in m.tool_calls %}{{ t.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}{{ tools or '' }}"
)
NEW_MISTRAL = (
    "{% for m in messages %}{% if m.tool_calls %}{% for t in m.tool_calls %}[TOOL_CALLS]"
    "{{ t.function.name }}[ARGS]{{ t.function.arguments | tojson }}{% endfor %}"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}{{ tools or '' }}"
)
NEMOTRON = (
    "{% for m in messages %}{% if m.tool_calls %}<TOOLCALL>["
    "{% for t in m.tool_calls %}{{ t.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]"
    "</TOOLCALL>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}{{ tools or '' }}"
)
APERTUS = (
    "{% for m in messages %}<|{{ m.role }}_start|>{% if m.tool_calls %}<|tools_prefix|>["
    "{% for t in m.tool_calls %}{{ '{\"' + t.function.name + '\": ' }}"
    "{{ t.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]<|tools_suffix|>"
    "{% else %}{{ m.content }}{% endif %}<|{{ m.role }}_end|>{% endfor %}{{ tools or '' }}"
)
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% for t in m.tool_calls or [] %}"
    "<tool_call>{{ t.function.name }}{% for key, value in t.function.arguments.items()"
    " %}<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}"
    "</arg_value>{% endfor %}</tool_call>{% endfor %}{% endfor %}{{ tools or '' }}"
)
LFM2 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}<|tool_call_start|>["
    "{% for t in m.tool_calls %}{{ t.function.name }}("
    "{% for key, value in t.function.arguments.items() %}{{ key }}={{ value | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
    "<|tool_call_end|>{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{{ tools or '' }}"
)
DEEPSEEK = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}" + DEEPSEEK_CALLS.begin +
    "{% for t in m.tool_calls %}" + DEEPSEEK_CALLS.opens + "{{ t.function.name }}" +
    DEEPSEEK_CALLS.after + "{{ t.function.arguments | tojson }}" + DEEPSEEK_CALLS.closes +
    "{% endfor %}" + DEEPSEEK_CALLS.end + "{% endif %}{% endfor %}{{ tools or '' }}"
)  # fmt: skip
FENCED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}" + FENCED_CALLS.begin +
    "{% for t in m.tool_calls %}" + FENCED_CALLS.opens + "function" + FENCED_CALLS.before[1] +
    "{{ t.function.name }}\n```json\n{{ t.function.arguments | tojson }}\n```" +
    FENCED_CALLS.closes + "{{ '\n' if not loop.last }}{% endfor %}" + FENCED_CALLS.end +
    "{% endif %}{% endfor %}{{ tools or '' }}"
)  # fmt: skip
KIMI = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}" + KIMI_CALLS.begin +
    "{% for t in m.tool_calls %}" + KIMI_CALLS.opens + "functions.{{ t.function.name }}:"
    "{{ loop.index0 }}" + KIMI_CALLS.after + "{{ t.function.arguments | tojson }}" +
    KIMI_CALLS.closes + "{% endfor %}" + KIMI_CALLS.end + "{% endif %}{% endfor %}"
    "{{ tools or '' }}"
)  # fmt: skip
