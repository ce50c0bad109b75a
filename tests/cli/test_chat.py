"""``zinc-rt chat``: turns from a pipe and at a terminal."""

import os
import signal
from pathlib import Path

from contract.types import SamplingParams
from harness.host.options import SessionOptions
from harness.host.session import Session
from tests.cli.conftest import zinc_process
from tests.cli.terminal import terminal
from tests.patience import PATIENCE_SECONDS


def expected_answers(model: Path, turns: list[str], max_tokens: int) -> list[str]:
    """Each answer computed from the whole history, from nothing."""
    history, answers = "", []
    for turn in turns:
        history += f"<|im_start|>user\n{turn}<|im_end|>\n"
        with Session.open(model, SessionOptions(tier="cpu")) as session:
            opened = f"{history}<|im_start|>assistant\n"
            tokens = session.model.tokenizer.encode(opened, parse_special=True)
            generation = session.generate(tokens, SamplingParams(), max_tokens)
            list(generation)
        answers.append(generation.text)
        history += f"<|im_start|>assistant\n{generation.text}<|im_end|>\n"
    return answers


def lines_of(answers: list[str]) -> str:
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in answers)


def test_piped_lines_are_turns_with_history(tiny_model):
    words = ("chat", "--model", tiny_model, "--max-tokens", 5)
    result = zinc_process(*words, stdin=b"hello\n\nand then?\n")
    assert result.code == 0
    assert result.out == lines_of(expected_answers(tiny_model, ["hello", "and then?"], 5))
    assert result.err.count("prompt tokens") == 2


def test_a_prompt_can_open_the_conversation(zinc, tiny_model):
    words = ("run", "hello", "--chat", "--model", tiny_model, "--max-tokens", 5)
    result = zinc(*words, stdin=b"and then?\n")
    assert result.out == lines_of(expected_answers(tiny_model, ["hello", "and then?"], 5))


def test_reset_and_exit(zinc, tiny_model):
    words = ("chat", "--model", tiny_model, "--max-tokens", 5)
    result = zinc(*words, stdin=b"hello\n/reset\nhello\n/exit\nunread\n")
    once = lines_of(expected_answers(tiny_model, ["hello"], 5))
    assert (result.code, result.out) == (0, once * 2)


def test_system_prompt_starts_again(zinc, tiny_model):
    words = ("chat", "--model", tiny_model, "--max-tokens", 5)
    by_command = zinc(*words, stdin=b"hello\n/system Be brief.\nhello\n")
    by_flag = zinc(*words, "--system", "Be brief.", stdin=b"hello\n")
    assert by_command.out.endswith(by_flag.out)
    assert by_command.out != by_flag.out * 2


def test_bad_bytes_in_a_pipe(zinc, tiny_model):
    words = ("chat", "--model", tiny_model, "--max-tokens", 2)
    result = zinc(*words, stdin=b"hi\nx\xff\n")
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("error: ")
    assert "line at byte 3: byte 1" in result.err


def test_a_model_without_template_cannot_chat(zinc, variant):
    path = variant(lambda metadata, tensors: metadata.pop("tokenizer.chat_template"))
    result = zinc("chat", "--model", path, stdin=b"hi\n")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "--raw" in result.err


def test_at_a_terminal(tiny_model, hold):
    """Ctrl-C stops an answer and not the program, Ctrl-D leaves; commands are explained."""
    words = ("chat", "--model", tiny_model, "--max-tokens", 900)
    with terminal(*words, hold=hold) as user:
        user.wait_for(">>> ")
        user.type("/help\n")
        user.wait_for("/system TEXT")
        user.wait_for(">>> ", 2)
        user.type("hello\n")
        user.wait_behind("hello\r\n")
        os.killpg(user.process.pid, signal.SIGINT)
        user.wait_for("interrupted]")
        user.wait_for(">>> ", 3)
        user.type("x" * 2000 + "\n")
        user.wait_for("error: prompt")
        user.wait_for("/reset starts")
        user.wait_for(">>> ", 4)
        user.type("\x04")
        assert user.process.wait(PATIENCE_SECONDS) == 0
