"""What the Python API takes: one or many of a thing, said by types, and by errors that help."""

import importlib.metadata
import inspect
import math
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any, get_type_hints

import numpy as np
import pytest

import zinc_rt
from harness.settings_table import SETTINGS, TIERS
from tests.cli.conftest import environment
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS
from tests.python.conftest import CONTEXT
from tests.tables import table
from zinc_rt import LLM, EngineStopped, RequestError, SamplingParams, ZincError, serve
from zinc_rt.arguments import NAMES, SERVER_NAMES, ModelSettings, ServerSettings

GREEDY = SamplingParams(max_tokens=4)
TURN = [{"role": "user", "content": "Hello"}]


def test_the_types_name_every_setting():
    assert set(get_type_hints(ModelSettings)) == {*NAMES, "config"} - {"model"}
    assert set(get_type_hints(ServerSettings)) == {*SERVER_NAMES, "config"} - {"model"}
    hints = get_type_hints(ModelSettings)
    assert set(hints["tier"].__args__[0].__args__) == set(TIERS)
    accepted = SETTINGS["kv_dtype"].kind.accepts
    assert all(name in accepted for name in hints["kv_dtype"].__args__[0].__args__)


@pytest.mark.parametrize("call", [LLM, serve])
def test_help_and_editors_see_every_setting(call):
    parameters = inspect.signature(call).parameters
    assert {"model", "tier", "context", "slots", "config"} <= parameters.keys()
    assert "settings" not in parameters


@pytest.mark.parametrize(
    ("given", "says"), table(__file__, "test_shapes")["wrong_arguments_say_the_right_one"]
)
def test_wrong_arguments_say_the_right_one(given, says):
    with pytest.raises(TypeError, match=says):
        LLM(**given)


def test_the_package_has_a_version():
    assert zinc_rt.__version__ == importlib.metadata.version("zinc-rt")
    with pytest.raises(AttributeError, match="has no attribute 'versoin'"):
        zinc_rt.versoin  # noqa: B018


def test_sampling_parameters_are_values():
    given: dict[str, Any] = {
        "stop": ["a", "b"], "stop_token_ids": [3], "logit_bias": {5: 1.5, 4: -1.0}, "logprobs": 2,
    }  # fmt: skip
    one, other = SamplingParams(**given), SamplingParams(**given)
    given["stop"].append("c")
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert {one: 1}[other] == 1
    assert one != replace(one, seed=1)
    assert (one.stop, one.stop_token_ids, one.listed) == (("a", "b"), (3,), 2)
    assert one.logit_bias == {5: 1.5, 4: -1.0}
    with pytest.raises(FrozenInstanceError):
        one.seed = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        one.logit_bias[5] = 2.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": -1}, "temperature: is -1"),
        ({"temperature": "1"}, "temperature: is '1'"),
        ({"temperature": float("nan")}, "temperature: is nan"),
        ({"top_p": 1.5}, "top_p: is 1.5"),
        ({"n": 0}, "n: is 0"),
        ({"max_tokens": 0}, "max_tokens: is 0"),
        ({"max_tokens": 2.0}, "max_tokens: is 2.0"),
        ({"max_tokens": np.float64(2)}, "max_tokens: is 2.0"),
        ({"seed": -1}, "seed: is -1"),
        ({"stop": ""}, "stop: holds an empty text"),
        ({"stop": [1]}, "stop: is .*not a text or a list of texts"),
        ({"stop_token_ids": "ab"}, "stop_token_ids: is 'ab'"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: is -1"),
        ({"logit_bias": [1]}, "logit_bias: is .*not a dict"),
        ({"logit_bias": {"1": 2}}, "logit_bias: is '1'"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias: of token 1 is inf"),
        ({"logprobs": -1}, "logprobs: is -1"),
        ({"logprobs": 1, "log_probabilities": 2}, "logprobs: is another name"),
        ({"repeat_last_n": "64"}, "repeat_last_n: is '64'"),
        ({"logits": 1}, "logits: is 1"),
    ],
)
def test_sampling_parameters_are_checked_at_once(fields, says):
    with pytest.raises(RequestError, match=says):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("of_numpy", "plain"),
    [
        (dict.fromkeys(["max_tokens", "n", "top_k", "logprobs"], np.int64(3)),
         dict.fromkeys(["max_tokens", "n", "top_k", "logprobs"], 3)),
        ({"min_p": np.float32(0.5), "logits": np.True_}, {"min_p": 0.5, "logits": True}),
        ({"seed": np.uint64(2**63), "stop": np.str_("a")}, {"seed": 2**63, "stop": "a"}),
        ({"stop_token_ids": [np.int32(3)]}, {"stop_token_ids": [3]}),
        ({"force_tokens": [*np.arange(3)]}, {"force_tokens": [0, 1, 2]}),
        ({"logit_bias": {np.int64(3): np.float32(0.5)}}, {"logit_bias": {3: 0.5}}),
        ({"lora": {"style": np.float64(0.5)}}, {"lora": {"style": 0.5}}),
    ],
)  # fmt: skip
def test_numbers_of_numpy_are_numbers(of_numpy, plain):
    """As columns of tables and arrays of trainers have them."""
    assert repr(SamplingParams(**of_numpy)) == repr(SamplingParams(**plain))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"repetition_penalty": 1.1}, "no argument 'repetition_penalty'; here it is 'repeat_pen"),
        ({"max_new_tokens": 4}, "no argument 'max_new_tokens'; here it is 'max_tokens'"),
        ({"ignore_ends": True}, "no argument 'ignore_ends'; did you mean 'ignore_end'"),
        ({"prompt_logprobs": 1}, "no argument 'prompt_logprobs'; LLM.score has those"),
        ({"zzz": 1}, "SamplingParams has no argument 'zzz'$"),
    ],
)
def test_an_unknown_parameter_says_what_it_is_called_here(given, says):
    with pytest.raises(TypeError, match=says):
        SamplingParams(**given)
    with pytest.raises(TypeError, match="takes arguments by name"):
        SamplingParams(64)  # type: ignore[misc]


def test_none_counts_as_left_out():
    """As on the server; wrappers of several engines pass ``stop=None`` and ``seed=None``."""
    nothing: dict[str, Any] = dict.fromkeys(get_type_hints(SamplingParams))
    assert SamplingParams(**nothing) == replace(SamplingParams(), **nothing) == SamplingParams()
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_vllms_names_mean_the_same(llm):
    ours, theirs = SamplingParams(log_probabilities=2), SamplingParams(logprobs=2)
    both = [replace(one, max_tokens=4) for one in (ours, theirs)]
    logs = [llm.generate("one", one)[0].completion.log_probabilities for one in both]
    assert logs[0] is not None
    assert logs[1] is not None
    assert logs[0].tobytes() == logs[1].tobytes()


def test_outputs_have_vllms_names(llm):
    """A script that was written for vLLM reads them."""
    asked = SamplingParams(n=2, temperature=0.8, max_tokens=4, logprobs=2)
    for output in llm.generate(["one", "two"], sampling_params=asked, use_tqdm=False):
        assert output.prompt == ("one", "two")[output.index]
        assert output.prompt_token_ids == llm.tokenize(output.prompt)
        assert (output.request_id, output.finished) == (str(output.index), True)
        assert output.num_cached_tokens == output.cached_tokens
        assert [one.index for one in output.outputs] == [0, 1]
        for one in output.outputs:
            assert (one.token_ids, one.stop_reason) == (list(one.tokens), None)
            assert one.logprobs is not None
            assert one.log_probabilities is not None
            assert one.cumulative_logprob == math.fsum(one.log_probabilities.tolist())
            for token, row, value in zip(
                one.tokens, one.logprobs, one.log_probabilities, strict=True
            ):
                assert row[token].logprob == float(value)
                assert row[token].decoded_token == llm.detokenize([token])
                assert [each.rank for each in row.values()][:2] == [1, 2]
                assert len(row) == (2 if row[token].rank else 3)
            assert pickle.loads(pickle.dumps(one)).logprobs == one.logprobs


def test_vllms_names_of_other_prompts(llm):
    tokens, bad = llm.generate([[5, 6], "two " * 999], GREEDY)
    assert (tokens.prompt, tokens.prompt_token_ids) == (None, [5, 6])
    assert tokens.outputs[0].logprobs is tokens.outputs[0].cumulative_logprob is None
    assert bad.prompt == "two " * 999
    with pytest.raises(RequestError, match="larger context"):
        assert bad.outputs
    (answer,) = llm.chat("Hello", GREEDY, use_tqdm=False)
    assert answer.prompt == llm.detokenize(answer.prompt_tokens)
    assert "Hello" in answer.prompt
    stop = llm.generate("one", replace(GREEDY, ignore_end=True))[0].tokens[2]
    ended = replace(GREEDY, ignore_end=True, stop_token_ids=[stop])
    assert llm.generate("one", ended)[0].outputs[0].stop_reason == stop


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda llm: llm.get_tokenizer(), AttributeError, "here it is tokenizer$"),
    (lambda llm: llm.create_chat_completion(), AttributeError, "here it is chat$"),
    (lambda llm: llm.nothing, AttributeError, "'LLM' object has no attribute 'nothing'$"),
    (lambda llm: llm.generate("x", lora=1), TypeError, "generate has no argument 'lora'$"),
    (lambda llm: llm.chat("x", max_tokens=9), TypeError, "is an argument of SamplingParams$"),
    (lambda llm: llm.chat("x", stream=True), TypeError, "'stream'; LLM.stream"),
    (lambda llm: llm.chat("x", chat_template_kwargs={}), TypeError, "it is thinking=True"),
    (lambda llm: llm.generate("x", GREEDY)[0].prompt_logprobs, AttributeError,
     "here it is LLM.score"),
    (lambda llm: llm.generate("x", GREEDY)[0].outputs[0].content, AttributeError, "is text$"),
])  # fmt: skip
def test_names_of_other_programs_say_ours(llm, call, error, says):
    with pytest.raises(error, match=says):
        call(llm)


def test_a_stop_token_ends_a_text_and_is_no_part_of_it(llm):
    plain = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_end=True)
    whole = llm.generate("one", plain)[0].tokens
    stop = whole[6]
    (output,) = llm.generate("one", replace(plain, stop_token_ids=[stop]))
    assert output.tokens == whole[: whole.index(stop)]
    assert output.completion.finish_reason == "stop"
    last = replace(plain, stop_token_ids=[whole[-1]], max_tokens=whole.index(whole[-1]) + 1)
    assert llm.generate("one", last)[0].completion.finish_reason == "stop"
    stream = llm.stream("one", replace(plain, stop_token_ids=[stop]))
    assert "".join(map(str, stream)) == output.text


def test_a_text_is_a_users_turn(llm):
    (expected,) = llm.chat(TURN, GREEDY)
    assert llm.chat("Hello", GREEDY)[0].tokens == expected.tokens
    assert [one.tokens for one in llm.chat(["Hello", TURN], GREEDY)] == [expected.tokens] * 2
    assert llm.encode_chat("Hello") == llm.encode_chat(TURN)
    stream = llm.stream_chat("Hello", GREEDY)
    assert "".join(piece.text for piece in stream) == expected.text


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.generate(5), "prompts: 5 is of type int; give a text"),
        (lambda llm: llm.generate(None), "prompts: None is of type NoneType"),
        (lambda llm: llm.generate(b"one"), "prompts: b'one' is of type bytes"),
        (lambda llm: llm.generate({"prompt": "x"}), "is of type dict; give a text"),
        (lambda llm: llm.generate("x", {"max_tokens": 3}), "give SamplingParams"),
        (lambda llm: llm.generate("x", 3), "parameters: 3 is of type int"),
        (lambda llm: llm.generate(["x"], [3]), "parameters: 3 is of type int"),
        (lambda llm: llm.stream("x", 3), "parameters: 3 is of type int"),
        (lambda llm: llm.chat({"role": "user", "content": "x"}), "messages: .*list of messages"),
        (lambda llm: llm.chat(3), "messages: 3 is of type int"),
        (lambda llm: llm.chat([TURN[0], "x"]), "messages: 'x' is of type str"),
        (lambda llm: llm.stream_chat({"role": "user"}), "messages: .*list of messages"),
        (lambda llm: llm.logits([1.5]), r"prompt: \[1.5\] is of type list; give a text"),
        (lambda llm: llm.score(5), "texts: 5 is of type int"),
        (lambda llm: llm.score("x", start="1"), "start: '1' is of type str"),
        (lambda llm: llm.embed(None), "texts: None"),
        (lambda llm: llm.tokenize(["x"]), "text: .* is of type list; give a text"),
        (lambda llm: llm.detokenize("x"), "tokens: 'x' is of type str; give a list of token ids"),
    ],
)
def test_wrong_shapes_are_type_errors_that_say_the_right_one(llm, call, says):
    with pytest.raises(TypeError, match=says):
        list(call(llm))


def test_one_array_or_many(llm):
    tokens = llm.tokenize("one two")
    expected = llm.generate("one two", GREEDY)[0].tokens
    for given in (np.array(tokens), np.array([tokens]), [np.array(tokens)], tuple(tokens)):
        assert [one.tokens for one in llm.generate(given, GREEDY)] == [expected]


def test_tokens_and_texts(llm):
    for text in ("", "one two", "ü €", "<|im_end|>"):
        assert llm.detokenize(llm.tokenize(text)) == text
    with pytest.raises(RequestError, match="tokens: holds an id outside 0 to 319"):
        llm.detokenize([320])


def test_vectors_are_those_of_the_server(llm, tiny_model_path, tmp_path):
    texts = ["one", "another text"]
    with serve(
        tiny_model_path, tier="cpu", context=CONTEXT, port=0, ledger=tmp_path / "ledger.sqlite"
    ) as server:
        from tests.serve.http import Http

        data = Http(server.url).post("/v1/embeddings", {"input": texts}).json["data"]
        assert repr(server) == f"Server({server.url!r})"
    vectors = llm.embed(texts)
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [one["embedding"] for one in data]
    assert llm.embed("one", dimensions=4).shape == (1, 4)
    assert llm.embed([]).shape[0] == 0
    with pytest.raises(RequestError, match="dimensions: is 0"):
        llm.embed("one", dimensions=0)
    with pytest.raises(RequestError, match="text"):
        llm.embed(["one", ""])


def test_hidden_states_are_what_logits_and_vectors_are_computed_from(llm):
    """Logits are one matrix times them, the same for all rows; a vector is their mean."""
    draws = np.random.default_rng(17)
    texts = [draws.integers(0, 256, size).tolist() for size in (100, 1, 100, 100, 60)]
    found = llm.hidden_states(texts)
    assert [rows.shape for rows in found] == [(len(text), 256) for text in texts]
    for rows, vector in zip(found, llm.embed(texts), strict=True):
        mean = rows.mean(axis=0, dtype=np.float64)
        assert np.allclose(vector, mean / np.linalg.norm(mean), rtol=1e-6, atol=1e-7)
    states = np.concatenate(found).astype(np.float64)
    logits = np.concatenate([llm.logits(text) for text in texts])
    matrix = np.linalg.lstsq(states, logits, rcond=None)[0]
    assert np.abs(states @ matrix - logits).max() < 1e-3 * np.abs(logits).max()
    with pytest.raises(RequestError, match="text"):
        llm.hidden_states(["one", ""])
    assert llm.hidden_states([]) == []


def test_what_is_printed_helps(llm):
    assert repr(llm) == f"LLM({llm.model.config.name!r}, tier='native', slots=3, context=128)"
    good, bad = llm.generate(["one", ""], GREEDY)
    assert str(good) == good.text
    assert repr(good).startswith("Output(index=0, completions=[Completion(")
    assert "4 tokens, finish_reason='length'" in repr(good.completion)
    assert str(bad).startswith("error: prompt: is empty")
    assert "RequestError" in repr(bad)
    stream = llm.stream("one", GREEDY)
    assert repr(stream) == "Stream(not finished)"
    assert "".join(map(str, stream)) == str(stream.output)
    assert "Output(" in repr(stream)
    (score,) = llm.score("one two")
    assert f"total={score.total:.4f}" in repr(score)


def test_errors_speak_of_what_a_program_has(tiny_model_path):
    """Not of servers, flags or routes."""
    llm = LLM(tiny_model_path, tier="cpu", context=32, progress=False)
    (long,) = llm.generate("x" * 400)
    assert "larger context" in str(long.error)
    llm.close()
    assert repr(llm).endswith(", closed)")
    formed = partial(llm.chat, response_format={"type": "json_object"})
    calls = (llm.generate, llm.score, llm.logits, llm.embed, llm.chat, llm.encode_chat, formed)
    for call in calls:
        with pytest.raises(EngineStopped, match="the LLM was closed, as it is") as stopped:
            call("one")
        assert isinstance(stopped.value, ZincError)
    # A process for the template or for a grammar would stay.
    assert llm._hosted.template._worker.child is llm._grammars._worker.child is None
    for words in (str(long.error), str(stopped.value)):
        assert not any(word in words for word in ("server", "--", "route", "HTTP"))


def test_every_error_that_callers_meet_is_exported():
    from contract import errors

    exported = {getattr(zinc_rt, name) for name in zinc_rt.__all__}
    met = (
        errors.CatalogError, errors.ConfigError, errors.DoesNotFit, errors.ModelFileError,
        errors.NonFiniteLogits, errors.RequestError, errors.TemplateError, errors.TierError,
        errors.UnsupportedModel, EngineStopped,
    )  # fmt: skip
    assert set(met) <= exported


def test_the_package_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "zinc_rt", "--version"],
        env={**environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'harness' / 'python'}"},
        capture_output=True, text=True, timeout=PROCESS_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("zinc-rt ")
