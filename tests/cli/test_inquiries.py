"""The commands that only look: inspect, graph, logits, devices, help."""

import json
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from contract.dtypes import WEIGHT_DTYPES
from contract.ir.codec import graph_digest
from contract.spec import KV
from harness.digest import logits_digest
from harness.interrupts import BROKEN_PIPE
from harness.settings import SETTINGS
from harness.synth.spec import SynthSpec
from harness.synth.write import write_synthetic
from reference.limits import Limits
from reference.model.families import FAMILIES
from reference.model.open import open_model
from tests.cli.conftest import Result, script_process, zinc_process
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS


def json_of(result: Result) -> Any:
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_inspect_counts_what_the_file_holds(zinc, tiny_model):
    facts = json_of(zinc("inspect", tiny_model, "--json", "--tensors", "--context", 64))
    with open_model(tiny_model).file as file:
        shapes = [tensor.shape for tensor in file.tensors.values()]
        assert facts["parameters"] == sum(int(np.prod(shape)) for shape in shapes)
        assert [tensor["shape"] for tensor in facts["tensors"]] == [list(s) for s in shapes]
        weights = sum(tensor.nbytes for tensor in file.tensors.values())
        assert list(facts["metadata"]) == list(file.metadata)
    assert facts["bytes"] == tiny_model.stat().st_size
    assert sum(row["bytes"] for row in facts["types"].values()) == weights
    memory = facts["run"]["memory"]
    assert sum(memory["weights"].values()) == weights
    assert memory["context"] == 64
    assert memory["kv_per_token"] == 2 * 2 * 2 * (64 * 3 // 2 + 1)
    assert memory["kv"] == 64 * memory["kv_per_token"]
    parts = ("kv", "scratch", "step_data", "constants", "state")
    assert memory["total"] == weights + sum(memory[part] for part in parts)
    assert facts["vocabulary"]["tokens"] == 320
    whole = json_of(zinc("inspect", tiny_model, "--json", "--kv-dtype", "f32"))
    assert whole["run"]["memory"]["kv_per_token"] == 2 * 2 * 2 * 64 * 4


def test_inspect_plans_every_storage_of_keys_and_values(zinc, tiny_model):
    """Halving the bytes a token takes nearly doubles the context that a budget holds."""
    budget = ("--memory-budget", "1700KiB", "--chunk", "16")
    memory = json_of(zinc("inspect", tiny_model, "--json", *budget))["run"]["memory"]
    kinds = memory["kinds"]
    assert {name: kind["kv_per_token"] for name, kind in kinds.items()} == {
        "f32": 2048, "f16": 1024, "q8_0": 544, "i12": 776, "i4r": 312, "i3r": 248,
    }  # fmt: skip
    fits = [kinds[name]["longest_context"] for name in ("f32", "f16", "q8_0")]
    assert 16 <= fits[0] < fits[1] < kinds["i12"]["longest_context"] < fits[2] < 1024
    least = [kinds[name]["longest_context"] for name in ("i4r", "i3r")]
    assert fits[2] < least[0] < least[1] <= 1024
    assert memory["context"] == kinds["i12"]["longest_context"]
    assert memory["fits"]
    assert memory["total"] <= memory["budget"] == 1700 << 10
    for name, context in zip(("f32", "f16", "q8_0"), fits, strict=True):
        words = ("inspect", tiny_model, "--json", *budget, "--kv-dtype", name)
        exact = json_of(zinc(*words, "--context", context))["run"]["memory"]
        longer = json_of(zinc(*words, "--context", context + 16))["run"]["memory"]
        assert exact["fits"]
        assert exact["total"] == kinds[name]["total"]
        assert not longer["fits"]
    text = zinc("inspect", tiny_model, *budget, "--context", 1024).out
    assert "MORE THAN the budget of 1.74 MB" in text
    assert f"{fits[2]}" in text


def test_inspect_plans_for_slots_and_a_tier(zinc, tiny_model):
    """Each slot has pages of its own; the cpu tier's prepared weights are larger than stored."""
    words = ("inspect", tiny_model, "--json", "--context", 64)
    one, four = (json_of(zinc(*words, "--slots", slots))["run"]["memory"] for slots in (1, 4))
    assert four["kv"] == 4 * one["kv"]
    assert four["kv_per_token"] == one["kv_per_token"]
    cpu = json_of(zinc(*words, "--tier", "cpu"))["run"]["memory"]
    assert (one["tier"], cpu["tier"]) == (None, "cpu")
    assert sum(cpu["weights"].values()) > sum(one["weights"].values())


def test_inspect_says_how_many_sequences_fit_and_why_not_more(zinc, tiny_model):
    """Each line is exact: its context fits that many slots, and a page more of each does not."""
    budget = ("--memory-budget", "1700KiB", "--chunk", "16")
    words = ("inspect", tiny_model, "--json", *budget)
    rows = json_of(zinc(*words, "--slots", 3))["run"]["memory"]["sequences"]
    assert [row["slots"] for row in rows] == [1, 2, 3, 4, 8, 16]
    contexts = [row["context"] for row in rows if row["context"] is not None]
    assert contexts == sorted(contexts, reverse=True)
    assert len(set(contexts)) > 2
    for row in rows:
        sized = (*words, "--slots", row["slots"], "--context")
        if row["context"] is None:
            assert row["left"] < 0
            continue
        exact = json_of(zinc(*sized, row["context"]))["run"]["memory"]
        assert exact["fits"]
        assert exact["total"] == row["total"]
        longer = json_of(zinc(*sized, row["context"] + 16))["run"]["memory"]
        assert not longer["fits"]
        assert longer["total"] - exact["total"] == row["more"] > row["left"]
    text = zinc("inspect", tiny_model, *budget).out
    assert "WHY NOT MORE" in text
    assert "a page more of each takes" in text
    short = zinc("inspect", tiny_model, *budget, "--context", 16).out
    assert "it is the whole context" in short
    assert "more than the budget" in zinc("inspect", tiny_model, "--memory-budget", "1M").out


def test_inspect_says_which_storage_the_heads_do_not_allow(zinc, tmp_path):
    path = tmp_path / "model.gguf"
    write_synthetic(path, SynthSpec("qwen3", "q8_0", seed=3, head_dim=48))
    kinds = json_of(zinc("inspect", path, "--json"))["run"]["memory"]["kinds"]
    assert kinds["q8_0"]["problem"].startswith(
        "stores 32 channels of a head at a time; head_dim is 48"
    )
    assert kinds["f16"]["longest_context"] == 1024
    assert "head_dim is 48" in zinc("inspect", path).out
    refused = zinc("run", "hi", "--model", path, "--kv-dtype", "q8_0")
    assert refused.code == 2
    assert "head_dim is 48" in refused.err


def test_inspect_for_people(zinc, tiny_model):
    text = zinc("inspect", tiny_model, "--tensors").out
    for shown in ("architecture  llama", "q8_0", "1,024 tokens", "MEMORY", "blk.1.ffn_down.weight"):
        assert shown in text
    assert "320 x string: " in text


def test_inspect_prints_one_value_whole(zinc, tiny_model):
    whole = zinc("inspect", tiny_model, "--metadata", "tokenizer.chat_template").out
    assert whole.startswith("{% for message in messages %}")
    tokens = json_of(zinc("inspect", tiny_model, "--metadata", "tokenizer.ggml.tokens"))
    assert len(tokens) == 320
    assert zinc("inspect", tiny_model, "--metadata", "no.such").code == 2


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("general.architecture", "gpt5", "run"),
        ("tokenizer.ggml.model", "martian", "vocabulary"),
        ("llama.block_count", 3, "run"),
    ],
)
def test_inspect_explains_what_it_cannot_run(zinc, variant, key, value, part):
    path = variant(lambda metadata, tensors: metadata.update({key: value}))
    facts = json_of(zinc("inspect", path, "--json"))
    assert str(path) in facts[part]["problem"]
    assert facts["parameters"] > 0
    text = zinc("inspect", path)
    assert text.code == 0
    assert facts[part]["problem"] in text.out


def test_inspect_refuses_an_adapter_that_is_none(zinc, tiny_model):
    """As ``run`` does: the question was what memory both take."""
    for adapter, problem in (("none.gguf", "does not exist"), (str(tiny_model), "adapter")):
        result = zinc("inspect", tiny_model, "--lora", adapter)
        assert (result.code, result.out) == (2, "")
        assert adapter in result.err
        assert problem in result.err


def test_inspect_shows_no_control_characters(zinc, variant):
    path = variant(lambda metadata, tensors: metadata.update({"general.name": "a\x1b[2J\nb"}))
    result = zinc("inspect", path)
    assert "\x1b" not in result.out
    assert "a\\x1b[2J\\nb" in result.out


def test_graph_json_is_the_graph_of_the_file(zinc, tiny_model):
    words = ("graph", "--model", tiny_model, "--context", 64, "--tokens", 3)
    (document,) = json_of(zinc(*words, "--kv-dtype", "f32"))
    model = open_model(tiny_model)
    with model.file:
        graph = model.graph(Limits(slots=1, context=64, pages=4))
    assert document["digest"] == graph_digest(graph)
    assert document["key"] == {"tokens": 3, "rows": 1}
    assert document["totals"]["flops"] == sum(node["flops"] for node in document["nodes"])


def test_graph_dot_to_a_file(zinc, tiny_model, tmp_path):
    out = tmp_path / "graph.dot"
    result = zinc("graph", "--model", tiny_model, "--format", "dot", "--out", out)
    assert (result.code, result.out) == (0, "")
    assert out.read_text().startswith("digraph")


def test_logits_are_the_same_for_every_chunk(zinc, tiny_model, tmp_path):
    out = tmp_path / "logits.npy"
    words = ("logits", "--tokens", "5,1,300,7,7,9", "--model", tiny_model)
    document = json_of(zinc(*words, "--json", "--out", out, "--top", 2))
    values = np.load(out)
    assert values.shape == tuple(document["shape"]) == (6, 320)
    assert logits_digest(values) == document["digest"]
    for chunk in (1, 4):
        assert json_of(zinc(*words, "--json", "--chunk", chunk))["digest"] == document["digest"]
    other = zinc("logits", "--tokens", "5,1,300,7,7,8", "--model", tiny_model, "--json")
    assert json_of(other)["digest"] != document["digest"]
    for entry, row in zip(document["positions"], values, strict=True):
        best, second = entry["top"]
        assert best["token"] == int(row.argmax())
        assert best["logit"] >= second["logit"]
        assert best["bits"] == struct.pack(">f", row[best["token"]]).hex()


def test_logits_agree_with_what_run_generates(zinc, tiny_model):
    """Greedy decode picks at each position what a teacher-forced prefill finds likeliest."""
    run = zinc("run", "--raw", "hello", "--model", tiny_model, "--max-tokens", 6, "--json")
    generated = json_of(run)["tokens"]
    model = open_model(tiny_model)
    with model.file:
        prompt = model.tokenizer.encode("hello")
    ids = ",".join(map(str, prompt + generated))
    words = ("logits", "--tokens", ids, "--model", tiny_model, "--json", "--top", 1)
    likeliest = [entry["top"][0]["token"] for entry in json_of(zinc(*words))["positions"]]
    assert likeliest[len(prompt) - 1 : -1] == generated


def test_logits_for_people(zinc, tiny_model):
    words = ("logits", "--prompt", "hello", "--model", tiny_model, "--top", 3)
    last, every = zinc(*words).out, zinc(*words, "--every").out
    assert last.count("after position") == 1
    assert every.count("after position") > 1
    assert every.startswith("digest ")
    assert last.splitlines()[-4:] == every.splitlines()[-4:]


def test_devices_lists_every_tier(zinc):
    rows = {row["name"]: row for row in json_of(zinc("devices", "--json"))}
    assert rows["cpu"]["available"]
    assert all(row["available"] or (row["reason"] and row["remedy"]) for row in rows.values())
    lines = zinc("devices").out.splitlines()
    assert len(lines) == 1 + sum(1 + len(row["details"]) for row in rows.values())
    assert all(detail in "".join(lines) for row in rows.values() for detail in row["details"])
    assert lines[1].split()[:2] == ["cpu", "yes"]


def test_help_is_searchable(zinc):
    found = zinc("help", "ZINC_RT_SEED").out
    assert "--seed" in found
    assert "zinc-rt run" in found
    assert "--temperature" in zinc("help", "sampling").out
    assert zinc("help").out == zinc().out == zinc("--help").out


@pytest.mark.parametrize("name", ["run", "chat", "inspect", "graph", "logits"])
def test_help_has_examples(zinc, name):
    text = zinc(name, "--help").out
    assert "examples:" in text
    assert f"zinc-rt {name}" in text


def test_every_setting_of_run_shows_its_environment_twin(zinc):
    text = " ".join(zinc("run", "--help-all").out.split())
    for name in ("model", "tier", "max_tokens", "seed", "context", "kv_dtype", "thinking"):
        assert SETTINGS[name].env in text


def test_version(zinc):
    result = zinc("--version")
    assert result.code == 0
    assert result.out.startswith("zinc-rt ")
    assert "exact-2" in result.out


def test_help_names_what_this_build_runs(zinc):
    text = zinc("--help-all").out
    after = text[text.index("models (GGUF") :]
    kinds, weights = after.split("weights  ")
    stored, kv = weights.split("keys and values  ")
    assert set(kinds.split("architectures")[1].replace(",", "").split()) == set(FAMILIES)
    assert set(stored.replace(",", "").split()) == {dtype.name for dtype in WEIGHT_DTYPES}
    assert set(kv.partition("(")[0].replace(",", "").split()) == {dtype.name for dtype in KV}


def test_help_loads_nothing_heavy():
    """Help is quick because numpy and what needs it are not loaded for it."""
    script = (
        "import sys; from harness.cli.main import main; main(['run', '--help']);"
        "heavy = {'numpy', 'jinja2', 'regex', 'psutil'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = script_process(script)
    assert (done.code, done.err) == (0, "")


def test_tools_are_commands(tmp_path, zinc):
    """``zinc-rt synth`` writes a model that ``zinc-rt run`` can run."""
    path = tmp_path / "made.gguf"
    assert zinc("synth", "--arch", "qwen3", "--quant", "q4_k", "--out", path).code == 0
    assert zinc("run", "hi", "--model", path, "--max-tokens", 2).code == 0


def test_module_is_the_console_script():
    result = zinc_process("--version")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("zinc-rt ")


@pytest.mark.parametrize("module", ["harness", "harness.conformance"])
def test_a_reader_that_leaves_ends_a_list_without_a_word(module):
    """It is more than a pipe holds. The exit code is what shells have."""
    words = ("conformance", "--list") if module == "harness" else ("--list",)
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(PROCESS_SECONDS) == BROKEN_PIPE
