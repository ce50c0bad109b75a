"""Answers of a server, replayed by the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli.main import main
from tests.serve.http import Http

CHAT = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8,
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
}
COMPLETION = {"prompt": "abc", "max_tokens": 8, "seed": 5, "temperature": 0.7, "logprobs": 1}
Verify = Callable[[object, object], tuple[int, str, str]]


@pytest.fixture
def verify(
    tmp_path: Path,
    tiny_model_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Verify:
    """``verify(request, response)``: exit code and what was printed."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))

    def run(request: object, response: object) -> tuple[int, str, str]:
        words = ["verify"]
        for name, value in (("request", request), ("response", response)):
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps(value))
            words.append(str(path))
        words += ["--model", str(tiny_model_path), "--tier", "cpu", "--context", "128"]
        code = main([*words, "--slots", "2"])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
def test_an_answer_is_replayed(http: Http, verify: Verify, path: str, body: dict[str, Any]) -> None:
    """By an engine of other sizes; where the request names no seed, from the one that was drawn."""
    answer = http.post(path, body).json
    assert verify(body, answer)[:2] == (0, "identical\n")


def test_a_changed_answer_is_found(http: Http, verify: Verify) -> None:
    """Negative control: a character, a log-probability, the seed, the model."""
    answer = http.post("/v1/completions", COMPLETION).json
    choice = answer["choices"][0]
    text = {**choice, "text": choice["text"][:-1] + "#"}
    assert verify(COMPLETION, {**answer, "choices": [text]})[:2][0] == 1
    logprobs = choice["logprobs"]
    values = [*logprobs["token_logprobs"][:-1], logprobs["token_logprobs"][-1] * (1 + 2**-20)]
    changed = {**choice, "logprobs": {**logprobs, "token_logprobs": values}}
    code, out, _ = verify(COMPLETION, {**answer, "choices": [changed]})
    assert (code, "choices[0].logprobs.token_logprobs[7]" in out) == (1, True)
    assert verify({**COMPLETION, "seed": 6}, answer)[0] == 1
    code, out, _ = verify(COMPLETION, {**answer, "system_fingerprint": "exact-0"})
    assert (code, "system_fingerprint" in out) == (1, True)


def test_what_cannot_be_verified_is_an_error(http: Http, verify: Verify) -> None:
    answer = http.post("/v1/completions", COMPLETION).json
    for request, response, says in (
        ([], answer, "no JSON object"),
        ({**COMPLETION, "top_q": 1}, answer, "top_q"),
        (COMPLETION, {**answer, "choices": []}, "no choices"),
        ({"prompt": "abc"}, {**answer, "x_zinc": None}, "names a seed"),
    ):
        code, _, error = verify(request, response)
        assert (code, says in error) == (2, True), error
