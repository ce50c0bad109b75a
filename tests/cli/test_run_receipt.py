"""``run --receipt``: the receipt of a run is that of a server for the same request."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("cpu_is_quick")


@pytest.fixture
def user(tmp_path, monkeypatch) -> Path:
    """A user whose files are all in one folder."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("--raw", "hello"),
        ("--raw", "<|im_end|> is text", "--temperature", "0.9", "--seed", str(2**64 - 1)),
        ("hello", "--temperature", "1.1", "--repeat-penalty", "1.3"),
        ("hello", "--system", "Be kind.", "--stop", "e", "--stop", "a", "--max-tokens", "60"),
        ("hello", "--kv-dtype", "f16", "--draft", "7"),
        ("hello", "--json-schema", '{"enum": [1, 23]}', "--draft", "3"),
        ("--raw", "hello", "--grammar", 'root ::= "a"+', "--temperature", "2"),
    ],
)
def test_a_run_is_verified(zinc, tiny_model_path, user, words):
    """Whole, by sample, with the key that signed it; and a changed one is not."""
    file, model = user / "receipt.json", ("--model", tiny_model_path, "--tier", "cpu")
    result = zinc("run", *words, "--receipt", file, *model, *_limit(words))
    assert result.code == 0, result.err
    plain = zinc("run", *words, *model, *_limit(words))
    assert plain.out == result.out
    keys = user / "keys.jsonl"
    keys.write_text(zinc("receipts", "key").out)
    for flags in ((), ("--sample", "5"), ("--key", keys)):
        verified = zinc("verify", file, *flags, *model)
        assert verified.code == 0, verified.out + verified.err
        assert verified.out.startswith("identical: run-")
    document = json.loads(file.read_text())
    document["payload"]["choices"][0]["tokens"][0] ^= 1
    file.write_text(json.dumps(document))
    verified = zinc("verify", file, *model)
    assert (verified.code, "signature: " in verified.out) == (1, True)


def _limit(words: tuple[str, ...]) -> tuple[str, ...]:
    return () if "--max-tokens" in words else ("--max-tokens", "20")


def test_flags_that_do_not_fit(zinc, tiny_model_path, user):
    for words in (
        ("run", "--chat", "--receipt", user / "r.json", "--model", tiny_model_path),
        ("verify", user / "a.json", user / "b.json", "--sample", "3"),
        ("verify", user / "a.json", user / "b.json", "--key", user / "k"),
        ("verify", user / "missing.json", "--model", tiny_model_path),
    ):
        result = zinc(*words)
        assert result.code == 2
        assert result.err.count("\n") == 1
