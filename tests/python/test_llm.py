"""Opening, conversations, closing, the server; and that it is installed."""

import gc
import json
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace

import pytest

import zinc_rt
from contract.extras import install_command
from harness.host.options import SessionOptions
from harness.host.session import Session
from tests.cli.conftest import SOURCES, environment, script_process
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.python.conftest import CONTEXT, engine_threads
from zinc_rt import LLM, ConfigError, RequestError, SamplingParams, serve

GREEDY = SamplingParams(max_tokens=6)
TURN = [{"role": "user", "content": "Hello <|im_end|>"}]


def test_an_argument_that_is_no_setting():
    with pytest.raises(TypeError, match="LLM has no argument 'tire'; did you mean 'tier'"):
        LLM("model.gguf", tire="cpu")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="serve has no argument 'prot'; did you mean 'port'"):
        serve("model.gguf", prot=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="argument slots: 'many' is not accepted"):
        LLM("model.gguf", slots="many")  # type: ignore[arg-type]


def test_settings_come_from_the_environment_too(tiny_model_path, monkeypatch):
    monkeypatch.setenv("ZINC_RT_TIER", "cpu")
    monkeypatch.setenv("ZINC_RT_CONTEXT", "48")
    with LLM(tiny_model_path, progress=False) as llm:
        assert (llm.tier, llm.context) == ("cpu", 48)


def test_a_conversation_is_what_the_template_makes_of_it(llm, tiny_model_path):
    """One conversation or many; text of the user that looks like a control token is text."""
    (answer,) = llm.chat(TURN, GREEDY)
    assert [output.text for output in llm.chat([TURN, TURN], GREEDY)] == [answer.text] * 2
    tokens = llm.encode_chat(TURN)
    assert llm.generate([tokens], GREEDY)[0].tokens == answer.tokens
    with Session.open(tiny_model_path, SessionOptions(tier="native", context=CONTEXT)) as session:
        assert session.template is not None
        rendered = session.template.render(TURN).text
    assert len(tokens) > len(llm.tokenizer.encode(rendered, parse_special=True))
    assert "".join(piece.text for piece in llm.stream_chat(TURN, GREEDY)) == answer.text


def test_a_conversation_that_is_none(llm):
    (output,) = llm.chat([[{"role": "nobody", "content": "x"}]], GREEDY)
    assert isinstance(output.error, RequestError)
    (output,) = llm.chat([TURN], GREEDY, thinking=True)
    assert isinstance(output.error, RequestError)


def test_closing_ends_the_engine_and_a_second_time_does_nothing(tiny_model_path):
    before = engine_threads()
    llm = LLM(tiny_model_path, tier="cpu", context=32, progress=False)
    assert len(engine_threads() - before) == 1
    llm.close()
    llm.close()
    assert engine_threads() <= before


def test_a_program_that_does_not_close_ends_well(tiny_model_path):
    """With a stream that was left in the middle, too."""
    program = (
        "import sys; from zinc_rt import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], tier='cpu', context=128, progress=False)\n"
        "kept = iter(llm.stream('one', SamplingParams(max_tokens=100, ignore_end=True)))\n"
        "print(next(kept).token)\n"
    )
    done = script_process(program, tiny_model_path, PYTHONPATH=SOURCES)
    assert (done.code, done.err) == (0, "")


def test_the_server_gives_the_same_bits(llm, tiny_model_path, tmp_path):
    asked = SamplingParams(
        temperature=0.7, top_k=0, top_p=0.9, min_p=0.0, seed=3, max_tokens=9, log_probabilities=2
    )
    (output,) = llm.generate("Once", asked)
    requested = {"prompt": "Once", "temperature": 0.7, "top_p": 0.9, "seed": 3, "max_tokens": 9}
    body = json.dumps({**requested, "top_k": 0, "min_p": 0.0, "logprobs": 2}).encode()
    ledger = tmp_path / "ledger.sqlite"
    with serve(tiny_model_path, tier="native", context=CONTEXT, port=0, ledger=ledger) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            (choice,) = json.load(response)["choices"]
    found = output.completion
    assert choice["text"] == output.text
    assert found.log_probabilities is not None
    assert choice["logprobs"]["token_logprobs"] == found.log_probabilities.tolist()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.url + "/health")


def test_it_is_installed(tmp_path):
    """Beside the project, without a path to its sources: what ``pip install`` made of it."""
    program = "import zinc_rt, harness; print(zinc_rt.LLM.__module__)"
    named = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=named, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("zinc_rt.llm\n", "")


def test_a_server_needs_its_extra_and_nothing_else_does(tiny_model_path):
    program = (
        "import sys; absent = ('flask', 'waitress', 'msgspec', 'prometheus_client')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "from zinc_rt import LLM, ConfigError, SamplingParams, serve\n"
        "with LLM(sys.argv[1], tier='cpu', context=64, progress=False) as llm:\n"
        "    asked = SamplingParams(max_tokens=2, ignore_end=True)\n"
        "    print(len(llm.generate('a', asked)[0].tokens))\n"
        "    asking = [{'role': 'user', 'content': 'a'}]\n"
        "    form = {'type': 'json_object'}\n"
        "    print(llm.chat(asking, asked, response_format=form)[0].error)\n"
        "try: serve(sys.argv[1], tier='cpu', port=0)\n"
        "except ConfigError as error: print(error)\n"
    )
    done = script_process(program, tiny_model_path, PYTHONPATH=SOURCES)
    first, *told = done.out.splitlines()
    assert first == "2"
    assert len(told) == 2
    assert all(install_command("server") in line for line in told)


def test_everything_it_exports_is_there():
    assert all(hasattr(zinc_rt, name) for name in zinc_rt.__all__)


def test_a_model_that_its_own_engine_finds_to_be_garbage_is_closed(tiny_model_path):
    """Python collects cycles on whichever thread makes an object, and closing waits for the
    engine's thread."""
    before = engine_threads()
    llm = LLM(tiny_model_path, tier="cpu", context=64, progress=False)
    driver, closed = llm._driver, llm._close
    llm.itself = llm  # type: ignore[attr-defined]
    del llm
    collecting = threading.Thread(
        target=driver.call, args=(lambda engine: gc.collect(),), daemon=True
    )
    collecting.start()
    collecting.join(PATIENCE_SECONDS)
    assert not collecting.is_alive()
    assert not closed.alive
    wait_until(lambda: engine_threads() <= before)


def test_tokens_are_guessed_ahead_where_it_is_asked_for(tiny_model_path, monkeypatch):
    """By the argument or any other source of the setting, from the prompt, too; the answer is the
    same."""
    asked, prompt = SamplingParams(max_tokens=60, ignore_eos=True), "to be or not to be " * 4
    found = {}
    for draft, named in ((None, ""), (None, "5"), (0, "5"), (7, "")):
        monkeypatch.setenv("ZINC_RT_DRAFT", named)
        sizes = {"context": CONTEXT, "slots": 1, "draft": draft}
        with LLM(tiny_model_path, tier="cpu", progress=False, **sizes) as llm:  # type: ignore[arg-type]
            (answer,) = llm.generate(prompt, asked)
            limit = llm._driver.call(lambda engine: engine.runner.limits.draft_tokens)
            found[draft, named] = limit, answer.tokens
    assert [limit for limit, _ in found.values()] == [0, 5, 0, 7]
    assert len({tokens for _, tokens in found.values()}) == 1


def test_a_reach_of_penalties_is_that_of_the_setting(tiny_model_path):
    """Not that of what is stored, which is more where tokens are guessed ahead. One that is named
    has the same bits where the setting reaches further, and is refused where it does not."""
    asked = SamplingParams(max_tokens=60, presence_penalty=1.5, ignore_eos=True)
    prompt, found, none = "to be or not ", {}, replace(asked, presence_penalty=0)
    for draft, window in ((0, 0), (0, 8), (11, 8), (0, 19)):
        sizes = {"draft": draft, "repeat_last_n": window, "context": CONTEXT, "slots": 1}
        with LLM(tiny_model_path, tier="native", progress=False, **sizes) as llm:  # type: ignore[arg-type]
            (answer,) = llm.generate(prompt, asked)
            assert found.setdefault(window, answer.tokens) == answer.tokens
            for reach, tokens in found.items():
                (again,) = llm.generate(prompt, replace(asked, repeat_last_n=reach))
                assert again.tokens == tokens
            for far in (window + 1, CONTEXT, CONTEXT + 9):
                (refused,) = llm.generate(prompt, replace(asked, repeat_last_n=far))
                assert f"with LLM(..., repeat_last_n={min(far, CONTEXT)})" in str(refused.error)
                (unused,) = llm.generate(prompt, replace(none, repeat_last_n=far))
                assert unused.tokens == found[0]
    assert len(found) == len(set(found.values())) == 3
    sizes = {"repeat_last_n": 4096, "context": CONTEXT}
    with LLM(tiny_model_path, tier="native", progress=False, **sizes) as llm:  # type: ignore[arg-type]
        (far,) = llm.generate(prompt, replace(asked, repeat_last_n=4096))
        assert far.error is None
