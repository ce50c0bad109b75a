"""Chat templates of our own with the constructs of families' real ones: macros, namespaces, parts
of contents, switches for reasoning, and calls as these models write them."""

from __future__ import annotations

CALL = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
HERMES_TURN = (
    "{% for t in m.tool_calls or [] %}{% set c = t.function %}"
    "{{ '\n' if not loop.first or text }}<tool_call>\n" + CALL + "\n</tool_call>{% endfor %}"
)
QWEN_VL = (
    "{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{% if part.type == 'image' or 'image_url' in part %}<|image_pad|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% set system = messages[0] if messages[0].role == 'system' %}"
    "{% if tools or system %}<|im_start|>system\n{% if system %}{{ shown(system.content) }}"
    "{% endif %}{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ shown(m.content) }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n{% set text = shown(m.content) %}"
    "{{ text }}" + HERMES_TURN + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ERNIE = (
    "{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% endif %}{% if tools %}\n{{ tools | tojson }}{% endif %}<|im_end|>\n\n"
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}"
    "<|im_start|>assistant\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n{% endif %}{% if text %}<response>\n{{ text }}\n</response>\n{% endif %}"
    + HERMES_TURN + "<|im_end|>\n\n{% elif m.role == 'tool' %}<|im_start|>tool\n<tool_output>"
    "{{ text }}</tool_output><|im_end|>\n\n{% elif m.role == 'user' %}<|im_start|>user\n"
    "{{ text }}<|im_end|>\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)  # fmt: skip
LING = (
    "{% set ns = namespace(think='off') %}{% if enable_thinking %}{% set ns.think = 'on' %}"
    "{% endif %}<role>SYSTEM</role>{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "\n{% endif %}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "detailed thinking {{ ns.think }}<|role_end|>{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'user' %}<role>HUMAN</role>{{ text }}<|role_end|>"
    "{% elif m.role == 'assistant' %}<role>ASSISTANT</role>{{ text or '' }}" + HERMES_TURN +
    "<|role_end|>{% elif m.role == 'tool' %}<role>OBSERVATION</role>\n<tool_response>\n{{ text }}\n"
    "</tool_response><|role_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}{# <think> </think> #}"
)  # fmt: skip
EXAONE = (
    "{% set heads = {'user': '<|user|>\n', 'assistant': '<|assistant|>\n',"
    " 'system': '<|system|>\n', 'tool': '<|tool|>\n'} %}"
    "{% if tools and messages[0].role != 'system' %}{{ heads['system'] }}{{ tools | tojson }}"
    "<|endofturn|>\n{% endif %}{% for m in messages %}{{ heads[m.role] }}"
    "{% if m.role == 'assistant' and not m.reasoning_content %}<think>\n\n</think>\n\n{% endif %}"
    "{% if m.role == 'tool' %}<tool_result>{{ m.content }}</tool_result>{% else %}"
    "{{ m.content or '' }}{% endif %}{% if m.role == 'system' and tools %}\n{{ tools | tojson }}"
    "{% endif %}{% for t in m.tool_calls or [] %}{% set c = t.function %}{{ '\n' if m.content or "
    "not loop.first }}<tool_call>" + CALL + "</tool_call>{% endfor %}<|endofturn|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ heads['assistant'] }}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
FALCON = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}{{ tools | tojson(indent=2) }}\nWrite <tool_call>\n[\n"
    '  {"name": "f", "arguments": {}}\n]\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}{% if m.role != 'system' or not tools %}<|im_start|>"
    "{{ 'assistant' if m.role == 'tool' else m.role }}\n{{ m.content or '' }}"
    "{% if m.tool_calls %}<tool_call>\n{{ m.tool_calls | tojson(indent=2) }}\n</tool_call>"
    "{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HUNYUAN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}<tool_calls>["
    "{% for t in m.tool_calls %}{% set c = t.function %}" + CALL + "{{ ', ' if not loop.last }}"
    "{% endfor %}]</tool_calls>{% else %}<answer>\n{{ m.content }}\n</answer>{% endif %}<|eos|>"
    "{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response><|extra_0|>"
    "{% else %}{{ m.content }}{% if tools and loop.first %}\n{{ strftime_now('%Y-%m-%d') }}\n"
    "{{ tools | tojson }}{% endif %}<|extra_0|>{% endif %}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
)
LLAMA4 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}<|header_start|>system<|header_end|>\n\n"
    "{{ messages[0].content if messages[0].content is string else messages[0].content[0].text }}"
    "<|eot|>{% set messages = messages[1:] %}{% endif %}"
    "{% if tools %}<|header_start|>user<|header_end|>\n\n"
    'Write {"name": function, "parameters": object}.\n{% for t in tools %}'
    "{{ t | tojson(indent=4) }}\n\n{% endfor %}{{ messages[0].content | trim }}<|eot|>"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|header_start|>ipython<|header_end|>\n\n{{ m.content | tojson }}<|eot|>"
    "{% elif 'tool_calls' in m %}<|header_start|>assistant<|header_end|>\n\n{% if m.content %}"
    "<|python_start|>{{ m.content }}<|python_end|>{% endif %}"
    "{% for t in m.tool_calls %}{{ '{\"name\": \"' + t.function.name + '\", ' }}"
    "{{ '\"parameters\": ' }}{{ t.function.arguments | tojson }}}{% endfor %}<|eot|>"
    "{% else %}<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content }}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n"
    "{% endif %}"
)
PYTHON_CALL = (
    "{% set c = t.function %}{{ c.name }}({% for key, value in c.arguments.items() %}"
    "{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
)
LLAMA4_PYTHON = (
    "{{ bos_token }}{% for m in messages %}<|header_start|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|header_end|>\n\n{{ m.content or '' }}"
    "{% if loop.first and tools %}\nWrite [func_name1(param1=value1, param2=value2)].\n"
    "{{ tools | tojson(indent=4) }}{% endif %}{% if m.tool_calls %}[{% for t in m.tool_calls %}"
    + PYTHON_CALL + "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)  # fmt: skip
OLMO = (
    "{% for m in messages %}<|im_start|>{{ 'environment' if m.role == 'tool' else m.role }}\n"
    "{{ m.content or '' }}{% if loop.first and tools %} <functions>{{ tools | tojson }}</functions>"
    "{% endif %}{% if m.get('tool_calls', none) is not none %}<function_calls>"
    "{% for t in m.tool_calls %}" + PYTHON_CALL + "{{ '\n' if not loop.last }}{% endfor %}"
    "</function_calls>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER_SYNTAX = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for t in m.tool_calls or [] %}<tool_call>\n!{{ t.function.name }} "
    "{{ t.function.arguments | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{{ tools or '' }}"
)
"""Calls in tags that stand for another syntax elsewhere."""
