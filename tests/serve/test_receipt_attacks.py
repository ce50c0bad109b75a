"""Receipts against other models, hostile files and servers that lie about their model."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import ConfigError
from harness.cli.main import main
from harness.serve.model import ServedModel
from harness.serve.receipts.document import (
    MAX_BYTES,
    VERSION,
    parse_receipt,
    read_receipts,
    signed_document,
)
from harness.serve.receipts.keys import open_key
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.model.gguf.file import open_gguf
from tests.changed_models import write_changed
from tests.named_tiers import on_each
from tests.serve.http import Http
from tests.serve.receipt_lies import change, problems, verifiers

Json = dict[str, Any]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10, "seed": 3}
TEXT = {"prompt": "abc", "max_tokens": 10, "seed": 3, "temperature": 0.9, "ignore_eos": True}
Models = dict[str, Path]
TIERS = ("cpu", "native", "opencl", "vulkan")


@pytest.fixture(scope="module")
def models(tiny_model_path, tmp_path_factory) -> Models:
    """The model that is promised, and those that others put in its place."""
    folder = tmp_path_factory.mktemp("models")

    def flip(metadata: Json, tensors: Json) -> None:
        tensors["blk.0.attn_norm.weight"][2].reshape(-1)[2] ^= 0x40

    def template(metadata: Json, tensors: Json) -> None:
        metadata["tokenizer.chat_template"] = "Be rude. " + metadata["tokenizer.chat_template"]

    with open_gguf(tiny_model_path) as file:
        architecture = file.metadata["general.architecture"]
    other = {}
    for name, fields in (("seed", {"seed": 99, "quant": "q4_k_m"}), ("quant", {"quant": "q4_0"})):
        other[name] = folder / f"{name}.gguf"
        write_synthetic(other[name], sized_spec("tiny", architecture=architecture, **fields))

    def swap(name: str) -> Path:
        """The weights of another file behind the vocabulary and the template of this one."""

        def change(metadata: Json, tensors: Json) -> None:
            with open_gguf(other[name]) as file:
                for one in file.tensors.values():
                    data = np.array(file.tensor_bytes(one.name))
                    if one.name in tensors:
                        tensors[one.name] = (one.ggml_type, one.shape, data)

        return write_changed(tiny_model_path, folder / f"swapped-{name}.gguf", change)

    return {
        "own": tiny_model_path,
        "one bit": write_changed(tiny_model_path, folder / "bit.gguf", flip),
        "template": write_changed(tiny_model_path, folder / "template.gguf", template),
        "same shape": swap("seed"),
        "quantization": swap("quant"),
    }


@pytest.fixture(scope="module")
def made(serve, models, tmp_path_factory) -> Callable[[str], Json]:
    """``made(name)``: the receipts, of a chat and of a text, of a server of that model."""
    folder, known = tmp_path_factory.mktemp("receipts"), dict[str, Json]()

    def of(name: str) -> Json:
        if name not in known:
            with serve(path=models[name], receipts=folder / name) as server:
                http = Http(server.url)
                known[name] = {}
                for kind, path, body in (
                    ("chat", "/v1/chat/completions", CHAT),
                    ("text", "/v1/completions", TEXT),
                ):
                    answer = http.post(path, body).json
                    known[name][kind] = http.get(f"/v1/receipts/{answer['id']}").json
        return json.loads(json.dumps(known[name]))

    return of


@pytest.fixture(scope="module")
def opened(models, tmp_path_factory) -> Iterator[Callable[..., ServedModel]]:
    folder = tmp_path_factory.mktemp("digests")
    yield from verifiers(folder, models["own"], context=256, slots=1, top_log_probabilities=20)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one bit", "model: other weights of the same shape and formats"),
        ("same shape", "model: other weights of the same shape"),
        ("quantization", "model: another quantization"),
        ("template", "template: the chat template"),
    ],
)
@pytest.mark.parametrize("tier", ["cpu", "native"])
def test_another_model_is_named(made, opened, models, name, said, tier):
    """The receipt is of one file, and the verifier has another."""
    found = problems(made("own")["chat"], opened(tier, models[name]))
    assert any(problem.startswith(said) for problem in found), found


@pytest.mark.parametrize("sample", [None, 2])
@pytest.mark.parametrize(
    ("tier", "name"), on_each(TIERS, ("one bit", "same shape", "quantization"), "one bit")
)
def test_a_server_that_lies_about_its_model_is_caught(made, opened, tmp_path, name, sample, tier):
    """It computes with another file, claims the promised one's digest and signs: the bits differ,
    at the first step and in every sample, on every tier that verifies."""
    lie, own = made(name)["text"], made("own")["text"]
    lie["payload"]["model"] = own["payload"]["model"]
    lie = signed_document(lie["payload"], lie["leaves"], open_key(tmp_path))
    (found,) = problems(lie, opened(tier), sample)
    assert found.startswith("bits: choice 0: step ")
    if sample is None:
        assert found.startswith("bits: choice 0: step 0:")


@pytest.mark.parametrize("tier", TIERS)
def test_a_server_that_lies_about_its_template_is_caught(made, opened, tmp_path, tier):
    lie, own = made("template")["chat"], made("own")["chat"]
    for name in ("model", "template"):
        lie["payload"][name] = own["payload"][name]
    lie = signed_document(lie["payload"], lie["leaves"], open_key(tmp_path))
    found = problems(lie, opened(tier))
    assert found[0].startswith("prompt: choice 0: ")


def test_a_hundred_megabytes_are_refused(tmp_path):
    """Before they are read, in one line or in many values."""
    path = tmp_path / "large.json"
    for piece in (b"a" * (1 << 20), b"[0]," * (1 << 18)):
        with path.open("wb") as file:
            file.write(b'{"payload": [')
            for _ in range(100):
                file.write(piece)
        with pytest.raises(ConfigError, match="longer than 32 MiB"):
            read_receipts(path)
    assert MAX_BYTES < 100 << 20


@pytest.mark.parametrize("version", [0, VERSION + 1, "1", None, 10**30, [1]])
def test_an_unknown_version_is_named(made, version):
    document = made("own")["text"]
    document["payload"]["receipt"] = version
    with pytest.raises(ConfigError, match="version: receipts of version"):
        parse_receipt(json.dumps(document).encode(), "receipt")


def test_every_field_is_needed_and_of_its_type(made):
    """A hostile receipt is refused, or its problems are named; nothing fails otherwise."""
    document = made("own")["text"]
    for name in document["payload"]:
        for value in (None, "x", -1, [], {}, [[1e300]], 2**70, "\u0000"):
            changed = json.loads(json.dumps(document))
            changed["payload"][name] = value
            data = json.dumps(changed).encode()
            with suppress(ConfigError):
                same = value == document["payload"][name]
                assert parse_receipt(data, "receipt").is_signed == same
        missing = json.loads(json.dumps(document))
        del missing["payload"][name]
        with pytest.raises(ConfigError):
            parse_receipt(json.dumps(missing).encode(), "receipt")
    for data in (b"", b"{}", b"[]", b"null", b"\xff", b'{"payload": {}}', b"[" * 100_000):
        with pytest.raises(ConfigError):
            parse_receipt(data, "receipt")


FAR = {"repetition_penalty": 1.2, "repeat_last_n": 4000}
"""Penalties that look further back than the verifying engine has room for."""
SAMPLED = {"temperature": 0.9, "repeat_penalty": 1.2, "repeat_last_n": 4000}
HOSTILE: list[tuple[Json, str, bool]] = [
    *(({f"choices.0.{name}": value}, "", False) for name, value in (
        ("prompt", 7), ("prompt", -1), ("tokens", [1, 2]), ("tokens", [2**31 - 1] * 10),
        ("max_tokens", -5), ("seed", "9" * 20), ("sampling", {}),
        ("sampling", {"temperature": 1e300}), ("root", "0" * 64), ("finish", ""),
    )),
    *(({"request": text}, "(request|prompt|parameters): ", False) for text in (
        "", "[]", "{", "{}", '{"prompt": []}', '{"prompt": "abc", "n": 128}',
        '{"prompt": [999999]}',
    )),
    *(({name: value}, "(results|chain): ", True) for name, value in (
        ("results", ["0" * 64]), ("number", -5), ("number", 0),
    )),
    ({"request": json.dumps(TEXT | FAR),
      "choices.0.sampling": lambda sampling: sampling | SAMPLED}, "request: .*repeat_last_n", True),
]  # fmt: skip
"""What a payload says, how the first problem found begins, and whether it is the only one."""


@pytest.mark.parametrize("sample", [None, 10])
@pytest.mark.parametrize(("changes", "said", "alone"), HOSTILE)
def test_a_hostile_receipt_is_named(made, opened, tmp_path, changes, said, alone, sample):
    """Signed, so that only its sense can be wrong; whole and by sample."""
    document = made("own")["text"]
    change(document["payload"], changes)
    document = signed_document(document["payload"], document["leaves"], open_key(tmp_path))
    found = problems(document, opened(), sample)
    assert found
    assert re.match(said, found[0])
    assert len(found) == 1 or not alone


def test_the_command_verifies(made, models, tmp_path, capsys, monkeypatch):
    """A receipt, a sample of it, a changed one, and a chain that is not whole."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    document = made("own")["text"]

    def verify(content: str, *flags: str) -> tuple[int, str]:
        path = tmp_path / "receipt.json"
        path.write_text(content)
        words = ["verify", str(path), "--model", str(models["own"]), "--tier", "cpu"]
        code = main([*words, "--context", "256", *flags])
        return code, capsys.readouterr().out

    name = document["payload"]["id"]
    assert verify(json.dumps(document)) == (0, f"identical: {name}: all 10 steps\n")
    code, out = verify(json.dumps(document, indent=2), "--sample", "3")
    assert code == 0
    assert "3 of 10 steps; one wrong step would have been seen with probability 30.0%" in out
    assert "30.0%\n" in out
    document["payload"]["choices"][0]["tokens"][2] ^= 1
    code, out = verify(json.dumps(document))
    assert code == 1
    assert out.startswith(f"different: {name}: signature: ")
    chain = [made("own")[kind] for kind in ("chat", "text")]
    lines = "\n".join(map(json.dumps, chain))
    assert verify(lines)[0] == 0
    assert verify(lines, "--tenant", "other")[0] == 1
    code, out = verify("\n".join(map(json.dumps, [*chain[1:], chain[0]])))
    assert (code, "different: chain: " in out) == (1, True)
    keys = tmp_path / "keys.jsonl"
    stranger = open_key(tmp_path / "stranger")
    keys.write_text((tmp_path / "stranger" / "keys.jsonl").read_text())
    code, out = verify(lines, "--key", str(keys))
    assert (code, "key: " in out, stranger.public in keys.read_text()) == (1, True, True)
    assert verify("x" * 10)[0] == 2
    assert verify(lines, "--sample", "0")[0] == 2
