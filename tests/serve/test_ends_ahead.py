"""Answers that end while the engine is steps ahead of them: whatever is told of them is of their
own tokens alone."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.host.event_queue import Offer, TimedEvent
from harness.host.stream_driver import EventStream
from harness.serve.receipts.document import Receipt, parse_receipt
from harness.serve.run import Running
from reference.engine import Engine
from tests.families_table import FAMILIES
from tests.held_steps import hold_steps
from tests.patience import wait_until
from tests.serve.http import Http, posted
from tests.serve.streams import data_of, lines_of

COMPLETIONS, USAGE = "/v1/completions", "/v1/tenants/local/usage"
GENERATED = re.compile(rb"^zinc_rt:generation_tokens_total\S+ (\S+)$", re.M)
PROMPT = [1, 2, 3, 4]
CHOICES = 3
BODY = {
    "prompt": PROMPT, "max_tokens": 20, "n": CHOICES, "seed": 5, "ignore_eos": True, "logprobs": 2,
    "logits_digest": True, "experts": True, "return_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixture(serve, synthetic_model, tmp_path_factory) -> Iterator[Running]:
    path: Path = synthetic_model(**FAMILIES["qwen3moe"], quant="q4_k_m")
    receipts = tmp_path_factory.mktemp("receipts") / "folder"
    with serve(path=path, experts=True, receipts=receipts, draft=3) as running:
        yield running


@pytest.fixture(scope="module")
def whole(mixture) -> dict[str, Any]:
    """An answer that nothing ends early."""
    answer: dict[str, Any] = Http(mixture.url).post(COMPLETIONS, BODY).json
    return answer


def late_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers take nothing before the engine has computed all it was asked for."""
    take = EventStream.take

    def late(stream: EventStream, timeout: float, offer: Offer | None = None) -> list[TimedEvent]:
        wait_until(lambda: stream._driver.call(lambda engine: engine.idle))
        return take(stream, timeout)

    monkeypatch.setattr(EventStream, "take", late)


def receipt_of(http: Http, notes: dict[str, Any]) -> Receipt:
    return parse_receipt(http.get(f"/v1/receipts/{notes['receipt']['id']}").body, "the receipt")


def counted(http: Http) -> tuple[int, int]:
    """Tokens of answers in the stored ledger, which the metrics have, too, and in the engine's."""
    usage = http.get(USAGE).json
    stored = usage["total"]["completion_tokens"]
    (generated,) = GENERATED.findall(http.get("/metrics").body) or (0,)
    assert stored == float(generated)
    return stored, usage["since_start"]["tokens_generated"]


def logs_of(choices: Sequence[dict[str, Any]]) -> list[list[float]]:
    """The log-probabilities of the tokens of every choice, of an answer or of the parts of one."""
    logs: list[list[float]] = [[] for _ in range(CHOICES)]
    for choice in choices:
        logs[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    return logs


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends_by", ["stop", "stop_token_ids"])
def test_an_answer_has_what_is_its_own(mixture, whole, monkeypatch, ends_by, stream, late):
    """Receipts, digests, experts, log-probabilities and counts, of three choices of which one at
    least ends early."""
    http = Http(mixture.url)
    if late:
        late_readers(monkeypatch)
    text, ids = whole["choices"][1]["text"], whole["choices"][1]["token_ids"]
    stop = text[6:8] if ends_by == "stop" else [ids[7]]
    before = counted(http)
    asked = {**BODY, ends_by: stop, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
        chunks = data_of(lines_of(http.post(COMPLETIONS, asked).body))
        answer, choices = chunks[-1], [one for chunk in chunks for one in chunk["choices"]]
    else:
        answer = http.post(COMPLETIONS, asked).json
        choices = answer["choices"]
    notes = answer["x_zinc"]
    ended, full = receipt_of(http, notes), receipt_of(http, whole["x_zinc"])
    lengths = [len(choice.tokens) for choice in ended.payload.choices]
    assert min(lengths) < BODY["max_tokens"]
    rows = zip(ended.payload.choices, full.payload.choices, lengths, strict=True)
    assert all(list(cut.tokens) == list(own.tokens[:count]) for cut, own, count in rows)
    leaves = zip(ended.leaves, full.leaves, lengths, strict=True)
    assert all(list(cut) == list(own[:count]) for cut, own, count in leaves)
    experts = zip(notes["experts"], whole["x_zinc"]["experts"], lengths, strict=True)
    assert all(cut == own[: len(PROMPT) + count - 1] for cut, own, count in experts)
    logs = zip(logs_of(choices), logs_of(whole["choices"]), lengths, strict=True)
    assert all(cut == own[: len(cut)] and count - len(cut) in (0, 1) for cut, own, count in logs)
    digests = zip(notes["logits_sha256"], whole["x_zinc"]["logits_sha256"], lengths, strict=True)
    assert all((cut == own) == (count == BODY["max_tokens"]) for cut, own, count in digests)
    assert answer["usage"]["completion_tokens"] == sum(lengths)
    after = counted(http)
    assert [now - then for now, then in zip(after, before, strict=True)] == [sum(lengths)] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_ends_abandons_no_step(mixture, whole, stream, monkeypatch):
    """The next prompt may continue the answer."""
    leaving: list[int] = []
    monkeypatch.setattr(Engine, "will_cancel", lambda self, ids: leaving.extend(ids))
    stop = whole["choices"][0]["text"][6:8]
    asked = {**BODY, "n": 1, "stop": stop, "stream": stream}
    assert b'"finish_reason":"stop"' in Http(mixture.url).post(COMPLETIONS, asked).body
    assert not leaving


def test_a_client_that_leaves_is_charged_for_what_its_answer_had(mixture, monkeypatch):
    """In the engine's ledger as in the stored one, though the engine was ahead."""
    http = Http(mixture.url)
    before, left = counted(http), http.get(USAGE).json["total"]["abandoned"]
    held = hold_steps(monkeypatch, 9)
    with http.connected() as connection:
        connection.sendall(posted(COMPLETIONS, {**BODY, "max_tokens": 200, "stream": True}))
        while b"\ndata:" not in connection.recv(65536):
            pass
    wait_until(lambda: http.get(USAGE).json["total"]["abandoned"] > left)
    after = counted(http)
    held.allow()
    stored, computed = (now - then for now, then in zip(after, before, strict=True))
    assert stored == computed > 0
