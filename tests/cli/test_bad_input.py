"""Every class of bad input: one line, exit code 2, no traceback unless asked for."""

import errno
import os
import shlex
import socket
import threading
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cli.main import main
from reference.model import chat_template
from reference.model.chat_template import TemplateLimits
from tests.changed_models import Change
from tests.cli.conftest import Result, zinc_process

TEMPLATE = "tokenizer.chat_template"
OUTPUT_NORM = "output_norm.weight"
QUERY = "blk.1.attn_q.weight"
REFUSED = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text())["refused"]


def refused(result: Result, *words: str) -> str:
    """Checks the shape of a refusal and that it holds ``words``; gives the line."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err
    return result.err


def set_metadata(key: str, value: Any) -> Change:
    return lambda metadata, tensors: metadata.update({key: value})


def reshape(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    kind, shape, data = tensors[QUERY]
    tensors[QUERY] = (kind, (shape[0] // 2, shape[1]), data[: shape[0] // 2])


def break_scale(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The scale of row 2, block 1 becomes NaN."""
    data = tensors[QUERY][2]
    data[2, 34:36] = np.array([np.nan], np.float16).view(np.uint8)


def overflow(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    data = tensors[OUTPUT_NORM][2].reshape(-1).view(np.float32)
    data[:] = 3e38


def test_nonexistent_model(zinc):
    refused(zinc("run", "hi", "--model", "no/such.gguf"), "no/such.gguf", "zinc-rt model list")


def test_folder_as_model(zinc, tmp_path):
    refused(zinc("run", "hi", "--model", tmp_path), "is a folder; there is no GGUF file in it")
    (tmp_path / "model.safetensors").touch()
    refused(zinc("run", "hi", "--model", tmp_path), "is a folder; its model is not GGUF; convert")
    (tmp_path / "m.gguf").touch()
    refused(zinc("run", "hi", "--model", tmp_path), f"name the GGUF file in it: {tmp_path}/m.gguf")


@pytest.mark.parametrize("kept", [0, 10, 3000, -100])
def test_truncated_file(zinc, tiny_model, tmp_path, kept):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_model.read_bytes()[:kept])
    refused(zinc("run", "hi", "--model", path), str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_metadata("general.architecture", "gpt5"), ("gpt5",)),
        (set_metadata("general.architecture", "clip"), ("mmproj", "language model")),
        (set_metadata("general.type", "mmproj"), ("mmproj", "language model")),
        (set_metadata("general.type", "imatrix"), ("importance matrix", "of the model")),
        (set_metadata("general.type", "adapter"), ("is an adapter", "--lora")),
        (lambda metadata, tensors: tensors.pop(QUERY), (QUERY, "is missing")),
        (reshape, (QUERY, "[128, 256]", "[256, 256]")),
        (break_scale, (QUERY, "row 2 block 1", "NaN")),
        (overflow, ("logits at position", "NaN or infinity")),
        (set_metadata("tokenizer.ggml.model", "martian"), ("tokenizer.ggml.model", "martian")),
        (set_metadata("tokenizer.ggml.pre", "martian"), ("tokenizer.ggml.pre", "martian")),
        (set_metadata("llama.context_length", 0), ("llama.context_length",)),
        (set_metadata(TEMPLATE, "{{ raise_exception('no') }}"), ("chat template", "no")),
        (set_metadata(TEMPLATE, "{% if %}"), ("chat template",)),
        (
            set_metadata(TEMPLATE, "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
            ("chat template",),
        ),
        (
            set_metadata(
                TEMPLATE,
                "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            ),
            ("chat template",),
        ),
    ],
)
def test_damaged_model(zinc, variant, change, words, monkeypatch):
    limits = TemplateLimits(cpu_seconds=0.5)
    monkeypatch.setattr(chat_template, "TemplateLimits", lambda: limits)
    result = zinc("run", "hi", "--model", variant(change), "--json")
    refused(result, *words)


def test_overflow_is_an_error_of_logits_too(zinc, variant):
    path = variant(overflow)
    refused(zinc("logits", "--prompt", "hi", "--model", path), "position 0")


def test_prompt_longer_than_the_context(zinc, tiny_model):
    result = zinc("run", "--raw", "xyz " * 20, "--model", tiny_model, "--context", 16)
    refused(result, "80 tokens", "16", "larger context")
    ids = ",".join(["7"] * 17)
    result = zinc("logits", "--tokens", ids, "--model", tiny_model, "--context", 16)
    refused(result, "17 tokens", "16")


def test_context_longer_than_the_models(zinc, tiny_model):
    for words in (("run", "hi", "--model"), ("inspect",), ("graph", "--model")):
        refused(zinc(*words, tiny_model, "--context", "2K"), "2048", "give at most that")


def test_file_that_is_not_utf8(zinc, tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9 au lait")
    refused(zinc("run", "-f", path), str(path), "byte 3")


def test_pipe_and_argument_that_are_not_utf8(zinc, tiny_model):
    result = zinc("run", "--model", tiny_model, stdin=b"ab\xff")
    refused(result, "standard input", "byte 2")
    words = ("run", "--model", str(tiny_model), os.fsdecode(b"a\xff"))
    refused(zinc_process(*words), "argument", "byte 1")


def test_missing_prompt_file(zinc, tmp_path):
    refused(zinc("run", "-f", tmp_path / "none.txt"), "none.txt", "No such file")


def test_empty_prompt(zinc, tmp_path, tiny_model):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    refused(zinc("run", ""), "prompt", "empty")
    refused(zinc("run", "-f", empty), "prompt", "empty")
    refused(zinc("run", "--model", tiny_model, stdin=b""), "prompt", "empty", "zinc-rt chat")
    refused(zinc("logits", "--prompt", "", "--model", tiny_model), "prompt", "empty")


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_is_typed_is_refused(zinc, tiny_model, line, said):
    words = (str(tiny_model) if word == "MODEL" else word for word in shlex.split(line))
    refused(zinc(*words), said)


def test_a_port_that_is_taken(zinc, tiny_model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = zinc(
            "serve",
            tiny_model,
            "--port",
            address.partition(":")[2],
            "--ledger",
            tmp_path / "ledger",
        )
    said = f"error: cannot listen on {address}: Address already in use, see zinc-rt ps; choose"
    assert result.code == 2
    assert said in result.err


def test_token_id_outside_the_vocabulary(zinc, tiny_model):
    refused(zinc("logits", "--tokens", "1,320", "--model", tiny_model), "319")
    refused(zinc("logits", "--tokens", "9" * 5000), "token id")


def test_output_that_cannot_be_written(zinc, tiny_model):
    for words in (("logits", "--tokens", "1"), ("graph",)):
        result = zinc(*words, "--model", tiny_model, "--out", "/no/such/folder/file")
        refused(result, "--out", "/no/such/folder/file")


def test_debug_shows_the_traceback(zinc, monkeypatch):
    words = ("run", "hi", "--model", "none.gguf")
    for result in (zinc(*words, "--debug"), zinc("--debug", *words)):
        assert result.code == 2
        assert result.err.startswith("Traceback")
        assert result.err.splitlines()[-1].startswith("error: ")
    monkeypatch.setenv("ZINC_RT_DEBUG", "1")
    assert zinc(*words).err.startswith("Traceback")


def test_a_fault_of_the_program_is_one_line(zinc, monkeypatch):
    """Named, with control characters escaped, and exit code 1: it is not the input's fault."""

    def broken() -> None:
        raise RuntimeError("boom\n\x1b[2J")

    monkeypatch.setattr("harness.tiers.probe", broken)
    result = zinc("devices")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "error: unexpected RuntimeError: boom\\n\\x1b[2J; run again with --debug for a traceback\n"
    )
    assert "Traceback" in zinc("devices", "--debug").err


@pytest.mark.parametrize(
    ("text", "said"), [("", ""), ("Unable to allocate", " (Unable to allocate)")]
)
def test_memory_that_the_system_refuses_is_no_fault(zinc, monkeypatch, text, said):
    """Python and numpy raise MemoryError under a limit of the process."""

    def refused() -> None:
        raise MemoryError(text)

    monkeypatch.setattr("harness.tiers.probe", refused)
    result = zinc("devices")
    advice = "end other programs, or raise this process's limit (ulimit -v)"
    assert (result.code, result.err) == (1, f"error: out of memory{said}; {advice}\n")


@pytest.mark.parametrize("serves", [False, True])
def test_threads_that_the_system_refuses_are_no_fault(zinc, monkeypatch, serves):
    """The words are those of Python; no system has so much address space for a stack."""

    def refused(*_: object) -> None:
        before = threading.stack_size(1 << 50)
        try:
            threading.Thread(target=print).start()
        finally:
            threading.stack_size(before)

    monkeypatch.setattr("harness.cli.main._parse" if serves else "harness.tiers.probe", refused)
    result = zinc("serve" if serves else "devices")
    fewer = ", or lower --queue-depth" if serves else ""
    remedy = f"raise the limit of threads (ulimit -u, or the container's pids.max){fewer}"
    assert (result.code, result.out) == (1, "")
    assert result.err == f"error: can't start new thread; {remedy}\n"


def test_a_file_that_the_system_refuses_is_no_fault(zinc, monkeypatch):
    """Such as a cache folder of another user, wherever it is looked into."""

    def refused() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/var/cache/models")

    monkeypatch.setattr("harness.tiers.probe", refused)
    result = zinc("devices")
    advice = "change its permissions, or name another one"
    assert (result.code, result.out) == (1, "")
    assert result.err == f"error: /var/cache/models: Permission denied; {advice}\n"


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSPC])
def test_the_number_of_an_open_file_is_no_name(zinc, monkeypatch, error):
    """A user who reads "name another one" looks for a file called 7."""

    def refused() -> None:
        raise OSError(error, os.strerror(error), 7)

    monkeypatch.setattr("harness.tiers.probe", refused)
    result = zinc("devices")
    assert result.code == 1
    assert "7: " not in result.err
    assert os.strerror(error) in result.err


def test_ctrl_c_anywhere_is_130(zinc, monkeypatch, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.tiers.probe", interrupted)
    assert main(["devices"]) == 130
    assert capsys.readouterr().err == ""
