"""Let a model call a function, and give it the result. Needs a model whose template has tools."""

import json
import os

from zinc_rt import LLM, SamplingParams

MODEL = os.environ.get("ZINC_RT_MODEL", "qwen3-0.6b")
CITIES = {"type": "string", "enum": ["Berlin", "Paris", "Oslo"]}
PARAMETERS = {"type": "object", "properties": {"city": CITIES}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Today's weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def weather(city: str) -> str:
    """What the model asks for."""
    return f"12 degrees and rain in {city}"


with LLM(MODEL, progress=False) as llm:
    messages = [{"role": "user", "content": "Do I need an umbrella in Oslo?"}]
    limit = SamplingParams(max_tokens=128)
    # "required" is enforced by a grammar: the answer is a call that obeys the parameters.
    (answer,) = llm.chat(messages, limit, tools=TOOLS, tool_choice="required", thinking=False)
    messages.append(answer.completion.message)
    for call in answer.completion.message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        result = weather(**arguments)
        print("call:", json.dumps(arguments), "->", result)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    (answer,) = llm.chat(messages, limit, tools=TOOLS, tool_choice="none", thinking=False)
    print("answer:", answer.text)
