"""What a model may be called, and what it samples with where a request names nothing."""

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.types import SamplingParams
from harness.catalog import ENTRIES, entries, entry_of_file
from harness.cli.main import build_parser
from harness.cli.serve_command import NAMES, options_of
from harness.cli.sessions import model_name
from harness.sampling_defaults import GGUF_KEYS, SamplingDefaults, sampling_defaults
from harness.settings import resolve
from tests.harness.catalog_tools import wheel_entry
from tests.serve.conftest import CONTEXT
from tests.serve.http import Http

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 6, "seed": 1}


@pytest.fixture
def catalogued(tiny_model_path, tmp_path, monkeypatch) -> Path:
    """A file of the catalog, under the name that it has there."""
    path = tmp_path / "tiny.gguf"
    shutil.copy(tiny_model_path, path)
    entry = wheel_entry(path.read_bytes(), id="tiny-of-the-catalog", sampling=(("top_k", 7),))
    monkeypatch.setitem(entries.ENTRIES, entry.id, entry)
    return path


def test_a_file_whose_name_is_no_utf_8(serve, tiny_model_path, tmp_path):
    """Its bytes are escaped in every text; the server starts, and answers to that name."""
    path = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.gguf"))
    path.symlink_to(tiny_model_path)
    assert (model_name(str(path), path), model_name(None, path)) == ("caf\\xe9", "caf\\xe9")
    with serve(path=path, tier="null") as server:
        http = Http(server.url)
        asked = {**ASKED, "model": "caf\\xe9"}
        assert http.post(CHAT, asked).status == 200
        for page in ("/v1/models", "/props", "/api/tags", "/metrics"):
            assert http.get(page).status == 200
        assert "caf\\xe9.gguf" in http.get("/v1/models").json["data"][0]["x_zinc"]["aliases"]
        server.models.activate("other", path)


def test_one_model_has_several_names(serve, catalogued, tmp_path):
    """Its own, the file's stem, the catalog's and any alias; no other, and one answer for all."""
    path = catalogued.rename(tmp_path / "tiny.gguf")
    with serve(path=path, sampling={}, aliases=("gpt-4o", "org/model")) as server:
        http = Http(server.url)
        texts = set()
        for name in ("tiny", "tiny.gguf", "tiny-of-the-catalog", "gpt-4o", "org/model"):
            reply = http.post(CHAT, {**ASKED, "model": name})
            assert reply.status == 200
            assert reply.json["model"] == "tiny"
            texts.add(reply.json["choices"][0]["message"]["content"])
            assert http.get(f"/v1/models/{name}").json["id"] == "tiny"
        assert len(texts) == 1
        assert http.post(CHAT, {**ASKED, "model": "gpt-4"}).error["code"] == "model_not_found"
        assert http.get("/v1/models/gpt-4").status == 404
        (card,) = http.get("/v1/models").json["data"]
        others = ["gpt-4o", "org/model", "tiny-of-the-catalog", "tiny.gguf"]
        assert card["x_zinc"]["aliases"] == others
        assert card["x_zinc"]["sampling"]["top_k"] == 7
        assert card["x_zinc"]["sampling"]["sources"]["top_k"] == "catalog"


def test_models_beside_have_their_files_names(serve, tiny_model_path, tmp_path):
    other = tmp_path / "other.gguf"
    shutil.copy(tiny_model_path, other)
    with serve(beside={"second": other}, aliases=("*",)) as server:
        http = Http(server.url)
        for asked, answers in (("second", "second"), ("other", "second"), ("x", "tiny")):
            assert http.post(CHAT, {**ASKED, "model": asked}).json["model"] == answers
            assert http.get(f"/v1/models/{asked}").json["id"] == answers


def test_requests_sample_with_what_they_leave_out(serve):
    """An answer is the one to a request that names the values in force, and says which they are."""
    values = {"temperature": 0.9, "top_k": 3, "top_p": 0.8, "min_p": 0.0, "repeat_penalty": 1.5}
    with serve(sampling={**values, "max_tokens": 5}) as server:
        http = Http(server.url)
        bare = http.post(CHAT, {"messages": MESSAGES, "seed": 3, "ignore_eos": True}).json
        named = {"messages": MESSAGES, "seed": 3, "ignore_eos": True, "max_tokens": 5, **values}
        assert http.post(CHAT, named).json["choices"] == bare["choices"]
        assert bare["usage"]["completion_tokens"] == 5
        more = {"max_tokens": 5, "repeat_last_n": 64, "context": CONTEXT}
        assert bare["x_zinc"]["sampling_defaults"] == values | more
        told = http.get("/v1/models").json["data"][0]["x_zinc"]["sampling"]
        assert told["sources"] == dict.fromkeys((*values, "max_tokens"), "server setting")
        response = http.post("/v1/responses", {"input": "hello", "seed": 3}).json
        assert (response["temperature"], response["top_p"]) == (0.9, 0.8)
        other = http.post(CHAT, {**named, "top_k": 40, "temperature": 3.0}).json
        assert other["choices"] != bare["choices"]


def test_defaults_are_mild(serve):
    with serve(sampling={}) as server:
        told = Http(server.url).get("/v1/models/tiny").json["x_zinc"]["sampling"]
    assert told == {
        "temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0,
        "max_tokens": 4096, "sources": dict.fromkeys(SamplingDefaults().values, "default"),
    }  # fmt: skip


def test_who_says_what_a_model_samples_with():
    """A setting before the file, the file before the catalog, value by value."""
    file = {"general.sampling.temp": 1.5, "general.sampling.top_k": 9, "general.name": "x"}
    found = sampling_defaults(file, {"top_k": 5, "top_p": 0.5}, {"temperature": 0.1})
    expected = {"temperature": 0.1, "top_k": 9, "top_p": 0.5, "min_p": 0.05}
    assert expected.items() <= found.values.items()
    assert found.facts["sources"]["temperature"] == "server setting"
    assert found.facts["sources"]["top_k"] == "model file"
    assert found.facts["sources"]["top_p"] == "catalog"
    assert found.facts["sources"]["min_p"] == "default"


@given(
    st.dictionaries(
        st.sampled_from(sorted(GGUF_KEYS.values())),
        st.floats() | st.integers() | st.booleans() | st.text() | st.none(),
    )
)
def test_a_file_cannot_break_its_server(metadata):
    """Whatever it says, requests that name nothing are valid."""
    found = sampling_defaults(metadata).values
    SamplingParams(
        **{n: v for n, v in found.items() if n not in ("max_tokens", "top_p")}
    ).validate()
    assert 0 <= found["top_p"] <= 1


def test_the_catalogs_values_are_valid():
    for entry in ENTRIES.values():
        assert entry.sampling
        found = sampling_defaults({}, dict(entry.sampling))
        assert dict(entry.sampling).items() <= found.values.items()


def test_a_catalogued_file_is_known_wherever_it_lies(catalogued, tmp_path):
    """By name and size."""
    entry = entry_of_file(catalogued)
    assert entry is not None
    assert entry.id == "tiny-of-the-catalog"
    grown = tmp_path / "grown" / catalogued.name
    grown.parent.mkdir()
    grown.write_bytes(catalogued.read_bytes() + b"x")
    assert entry_of_file(grown) is None
    assert entry_of_file(catalogued.rename(tmp_path / "renamed.gguf")) is None
    assert entry_of_file(tmp_path / "absent.gguf") is None


def test_flags_name_aliases_and_sampling(tiny_model_path, tmp_path):
    """Only what was given, wherever: other values are the model's."""
    words = ["serve", "--model", str(tiny_model_path), "--alias", "a", "--alias", "b/c"]
    env = {"ZINC_RT_TOP_K": "5", "ZINC_RT_CONFIG": str(tmp_path / "config.toml")}
    (tmp_path / "config.toml").write_text("max_tokens = 77\n")
    args: argparse.Namespace = build_parser().parse_args([*words, "--temperature", "0.3"])
    options = options_of(resolve(args, NAMES, env))
    assert options.model.aliases == ("a", "b/c")
    assert options.model.sampling == {"temperature": 0.3, "top_k": 5, "max_tokens": 77}
    nothing = options_of(resolve(build_parser().parse_args(words[:3]), NAMES, {}))
    assert (nothing.model.aliases, nothing.model.sampling) == ((), {})
    assert replace(options, model=nothing.model).model.aliases == ()
