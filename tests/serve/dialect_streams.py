"""Long answers that clients of other APIs ask for, and what a stream of one holds."""

from itertools import groupby
from typing import Any

NAMED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_last_n": 64}
"""What a process and a server of these tests do not leave to the same defaults."""
TOKENS = 460
SHARED = "Tell me of the quick brown fox, "
"""What all prompts of other APIs begin with, more than a page: they go to one replica."""
SAMPLED = {"model": "tiny", "seed": 3, "temperature": 0.9, **NAMED}
OTHER_DIALECTS: tuple[tuple[str, dict[str, object], bytes], ...] = (
    *(("/v1/messages",
       {**SAMPLED, "max_tokens": TOKENS, "messages": [{"role": "user", "content": text}]},
       b"event: message_stop")
      for text in (SHARED + "go", SHARED + "hello")),
    ("/v1/responses", {**SAMPLED, "input": SHARED + "go", "max_output_tokens": TOKENS},
     b"event: response.incomplete"),
    ("/api/generate",
     {"model": "tiny", "prompt": SHARED,
      "options": {"seed": 3, "num_predict": TOKENS, "temperature": 0.9, **NAMED}},
     b'"done":true'),
    ("/api/chat",
     {"model": "tiny", "messages": [{"role": "user", "content": SHARED}],
      "options": {"seed": 4, "num_predict": TOKENS, "temperature": 0.9, **NAMED}},
     b'"done":true'),
)  # fmt: skip
"""Long answers that other APIs are asked for, and what is in the last event of their streams."""
EVENTS = {
    "/v1/messages": (
        "message_start content_block_start content_block_delta content_block_stop message_delta"
        " message_stop"
    ),
    "/v1/responses": (
        "response.created response.in_progress response.output_item.added"
        " response.content_part.added response.output_text.delta response.output_text.done"
        " response.content_part.done response.output_item.done response.incomplete"
    ),
    "/api/generate": "False True",
    "/api/chat": "False True",
}
"""The kinds of events of a stream without a seam, each named once where it comes again and again.
Ollama's say whether they are the last."""


def whole_of(path: str, answer: dict[str, Any]) -> tuple[str, int]:
    """The text and the number of tokens of an answer of another API."""
    match path:
        case "/v1/messages":
            return answer["content"][0]["text"], answer["usage"]["output_tokens"]
        case "/v1/responses":
            (item,) = answer["output"]
            return item["content"][0]["text"], answer["usage"]["output_tokens"]
        case "/api/chat":
            return answer["message"]["content"], answer["eval_count"]
    return answer["response"], answer["eval_count"]


def streamed_of(path: str, events: list[dict[str, Any]]) -> tuple[str, int, str]:
    """The text and the number of tokens of a stream of another API, and its kinds of events."""
    kinds = [
        str(each.get("type", each.get("done"))) for each in events if each.get("type") != "ping"
    ]
    runs = " ".join(kind for kind, _ in groupby(kinds))
    if path.startswith("/api/"):
        texts = [whole_of(path, {"eval_count": 0, **each})[0] for each in events]
        return "".join(texts), events[-1]["eval_count"], runs
    deltas = [each["delta"] for each in events if "delta" in each]
    if path == "/v1/responses":
        assert [each["sequence_number"] for each in events] == [*range(len(events))]
        return "".join(deltas), events[-1]["response"]["usage"]["output_tokens"], runs
    text = "".join(delta.get("text", "") for delta in deltas)
    (usage,) = (each["usage"] for each in events if each["type"] == "message_delta")
    return text, usage["output_tokens"], runs
