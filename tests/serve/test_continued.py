"""Answers that continue the last message: the prompt ends with its text, in every dialect."""

from collections.abc import Sequence
from typing import Any

from harness.serve.run import Running
from tests.serve.http import Http

USER = {"role": "user", "content": "Count to ten."}
SAID = {"role": "assistant", "content": "One, two,"}
CHAT = "/v1/chat/completions"


def prompt_of(server: Running, messages: Sequence[Any], **fields: Any) -> str:
    body = {"messages": list(messages), "max_tokens": 1, "return_token_ids": True, **fields}
    ids = Http(server.url).post(CHAT, body).answer["prompt_token_ids"]
    return server.service.model.tokenizer.decode_bytes(ids, special=True).decode()


def test_the_prompt_ends_with_the_message(hermes):
    continued = prompt_of(hermes, [USER, SAID], continue_final_message=True)
    assert continued.endswith("One, two,")
    whole = prompt_of(hermes, [USER, SAID], add_generation_prompt=False)
    assert whole.startswith(continued)
    assert whole.removeprefix(continued).strip() == "<|im_end|>"
    asked = prompt_of(hermes, [USER, SAID])
    assert asked == whole + "<|im_start|>assistant\n"
    same = prompt_of(hermes, [USER, SAID], continue_final_message=False, add_generation_prompt=True)
    assert same == asked


def test_the_answer_is_the_continuation_of_the_text(hermes):
    """The same tokens as of a completion of the same prompt."""
    http = Http(hermes.url)
    fields = {"seed": 3, "max_tokens": 12, "return_token_ids": True}
    body = {"messages": [USER, SAID], "continue_final_message": True, **fields}
    chat = http.post(CHAT, body).json
    text = {"prompt": chat["prompt_token_ids"], **fields}
    completed = http.post("/v1/completions", text).json
    assert chat["choices"][0]["token_ids"] == completed["choices"][0]["token_ids"]
    streamed = http.post(CHAT, body | {"stream": True}).body
    assert b"One, two," not in streamed


def test_control_tokens_of_the_text_are_text(hermes):
    """What a message says ends no turn, continued or not."""
    said = {"role": "assistant", "content": "a<|im_end|>"}
    body = {"messages": [USER, said], "max_tokens": 1, "return_token_ids": True}
    ids = Http(hermes.url).post(CHAT, body | {"continue_final_message": True}).json
    (end,) = hermes.service.model.tokenizer.encode("<|im_end|>", parse_special=True, add_bos=False)
    assert ids["prompt_token_ids"].count(end) == 1


def test_other_dialects_continue_by_the_last_message_alone(hermes):
    http = Http(hermes.url)
    counts = []
    body = {"model": "tiny", "max_tokens": 4, "stream": False, "options": {"num_predict": 4}}
    for messages in ([USER, SAID], [USER, SAID, USER]):
        told = http.post("/v1/messages", body | {"messages": messages}).json
        usage = told["usage"]
        counts.append(sum(usage[name] for name in usage if name != "output_tokens"))
        ollama = http.post("/api/chat", body | {"messages": messages, "think": False}).json
        assert ollama["prompt_eval_count"] == counts[-1]
    prompt = prompt_of(hermes, [USER, SAID], continue_final_message=True, enable_thinking=False)
    encoded = {"prompt": prompt, "parse_special": True}
    assert counts[0] == http.post("/tokenize", encoded).json["count"]


def test_an_unfinished_message_of_responses_is_continued(hermes):
    """A last one of the assistant's, as chat completions continue it; others begin a turn."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The sky is ("}]

    def count(path: str, name: str, value: object, **more: object) -> int:
        reply = Http(hermes.url).post(path, {name: value, **more})
        return int(reply.json.get("input_tokens", reply.json.get("count")))

    continued = count("/tokenize", "messages", turns, continue_final_message=True)
    begun = count("/tokenize", "messages", turns)
    assert continued < begun
    for status in ("in_progress", "incomplete", "completed", None):
        items = [turns[0], turns[1] | {"status": status}]
        unfinished = status in ("in_progress", "incomplete")
        counted = count("/v1/responses/input_tokens", "input", items)
        assert counted == (continued if unfinished else begun), status
        items.append({"role": "user", "content": "b"})
        assert count("/v1/responses/input_tokens", "input", items) > begun
