"""What a program does with a model besides asking it: processes, threads, loops, copies, Ctrl-C."""

import asyncio
import copy
import inspect
import itertools
import pickle
import pydoc
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import RequestError, ZincError
from tests.cli.conftest import environment
from tests.paths import ROOT
from tests.patience import PROCESS_SECONDS
from zinc_rt import LLM, EngineStopped, SamplingParams

GREEDY = SamplingParams(max_tokens=3)
GUARDED = """
import multiprocessing, sys
from zinc_rt import LLM, SamplingParams

greedy = SamplingParams(max_tokens=3)
settings = {"tier": "cpu", "context": 64, "progress": False}

def work(prompt):
    with LLM(sys.argv[1], **settings) as llm:
        return llm.generate([prompt, "long " * 999], greedy)

if __name__ == "__main__":
    llm = LLM(sys.argv[1], **settings)
    with multiprocessing.get_context(sys.argv[2]).Pool(1) as pool:
        ((good, bad),) = pool.map(work, ["a"])
        print(good.tokens == llm.generate("a", greedy)[0].tokens, bad.error.field)
        try:
            pool.map(llm.generate, ["a"])
        except TypeError as error:
            print(error)
"""
UNGUARDED = """
import multiprocessing, sys
from zinc_rt import LLM, SamplingParams

llm = LLM(sys.argv[1], tier="cpu", context=64, progress=False)
process = multiprocessing.get_context(sys.argv[2]).Process(target=print)
process.start()
process.join()
print(len(llm.generate("a", SamplingParams(max_tokens=3))[0].tokens))
"""


def run_script(folder: Path, text: str, *words: object) -> subprocess.CompletedProcess[str]:
    """A program of a user's; multiprocessing needs it to be a file."""
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, script, *map(str, words)],
        env={**environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'harness' / 'python'}"},
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )


def test_processes_open_a_model_each(tiny_model_path, tmp_path):
    done = run_script(tmp_path, GUARDED, tiny_model_path, "forkserver")
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "True prompt"
    assert "open one in each process" in done.stdout.splitlines()[1]


def test_a_script_without_a_main_guard_is_told_of_it(tiny_model_path, tmp_path):
    """By us before Python's own error, and the model of the first process answers."""
    done = run_script(tmp_path, UNGUARDED, tiny_model_path, "spawn")
    assert done.stdout == "3\n"
    warned, _, rest = done.stderr.partition("RuntimeWarning: ")
    assert "script.py" in warned
    assert "put what only the first process does under if __name__ == '__main__':" in rest
    assert done.stderr.count("RuntimeWarning") == 1


def test_parameters_by_vllms_name(llm):
    (known,) = llm.generate("a", GREEDY)
    assert llm.generate("a", sampling_params=GREEDY)[0].tokens == known.tokens
    assert [one.tokens for one in llm.completed(["a"], sampling_params=[GREEDY])] == [known.tokens]
    (answer,) = llm.chat("a", sampling_params=GREEDY)
    assert len(answer.tokens) == 3
    for stream in (
        llm.stream("a", sampling_params=GREEDY),
        llm.stream_chat("a", sampling_params=GREEDY),
    ):
        text = "".join(piece.text for piece in stream)
        assert (stream.output.text, len(stream.output.tokens)) == (text, 3)


@pytest.mark.parametrize("name", ["generate", "completed", "chat", "stream", "stream_chat"])
def test_parameters_by_both_names_are_refused(llm, name):
    with pytest.raises(TypeError, match="sampling_params is another name of parameters"):
        getattr(llm, name)("a", GREEDY, sampling_params=GREEDY)


def test_a_running_loop_changes_nothing(llm):
    """As in a notebook."""
    (known,) = llm.generate("a", GREEDY)

    async def cell() -> tuple[Any, Any, list[Any]]:
        blocking = llm.generate("a", GREEDY)[0].tokens
        pieces = [piece.token async for piece in llm.stream("a", GREEDY)]
        calls = (asyncio.to_thread(llm.generate, "a", GREEDY) for _ in range(3))
        return blocking, pieces, [one[0].tokens for one in await asyncio.gather(*calls)]

    blocking, pieces, others = asyncio.run(cell())
    assert blocking == known.tokens
    assert tuple(token for token in pieces if token is not None) == known.tokens
    assert others == [known.tokens] * 3


@pytest.mark.parametrize(
    "name", [*("generate", "chat", "score", "embed"), *("hidden_states", "logits", "stream")]
)
def test_ctrl_c_in_a_call_leaves_the_model_usable(llm, name):
    known = llm.generate("a", GREEDY)[0].tokens

    def interrupted() -> Iterator[str]:
        yield "one"
        signal.raise_signal(signal.SIGINT)
        yield "two"

    def call() -> None:
        if name == "stream":
            for _ in llm.stream("one", SamplingParams(max_tokens=64, ignore_end=True)):
                signal.raise_signal(signal.SIGINT)
        elif name == "logits":
            with pytest.MonkeyPatch.context() as patched:
                raising = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
                patched.setattr(np, "isfinite", raising)
                llm.logits("one")
        else:
            getattr(llm, name)(interrupted())

    with pytest.raises(KeyboardInterrupt):
        call()
    assert llm.generate("a", GREEDY)[0].tokens == known


def test_a_closed_model_says_so_and_closes_again(tiny_model_path):
    with LLM(tiny_model_path, tier="cpu", context=32, progress=False) as llm:
        stream = llm.stream("a", GREEDY)
    llm.close()
    calls: tuple[Callable[[], object], ...] = (
        *(llm.__enter__, lambda: llm.generate("a", GREEDY), lambda: llm.chat("a", GREEDY)),
        *(lambda: llm.score("a b"), lambda: llm.embed("a"), lambda: llm.logits("a")),
        lambda: llm.hidden_states("a"),
        lambda: list(stream),
    )
    for call in calls:
        with pytest.raises(EngineStopped, match="the LLM was closed, as it is"):
            call()
    assert repr(llm).endswith(", closed)")


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_results_and_parameters_can_be_copied(llm, again):
    asked = SamplingParams(
        max_tokens=3, n=2, logits=True, logprobs=2, stop=["zzz"], logit_bias={1: 2.0}
    )
    assert again(asked) == asked
    assert hash(again(asked)) == hash(asked)
    (output,) = llm.generate("a", asked)
    same = again(output)
    assert repr(same) == repr(output)
    for one, other in zip(output.completions, same.completions, strict=True):
        assert (one.tokens, one.text) == (other.tokens, other.text)
        assert one.logits is not None
        assert other.logits is not None
        assert (one.logits == other.logits).all()
    (bad,) = llm.generate("long " * 999, GREEDY)
    met = again(bad).error
    assert isinstance(met, RequestError)
    assert (str(met), met.field) == (str(bad.error), "prompt")
    assert repr(again(llm.score("a b")[0])) == repr(llm.score("a b")[0])


def all_errors(kind: type[ZincError] = ZincError) -> Iterator[type[ZincError]]:
    """The errors that callers meet."""
    yield kind
    for more in kind.__subclasses__():
        yield from all_errors(more)


def made(kind: type[ZincError]) -> ZincError:
    """An error of this kind, of whatever its constructor takes."""
    for count in range(1, 5):
        for given in itertools.product(("x", 7), repeat=count):
            try:
                return kind(*given)
            except (TypeError, ValueError, AttributeError):
                continue
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", sorted(set(all_errors()), key=lambda kind: kind.__qualname__))
def test_every_error_can_be_copied(kind):
    """Also one whose constructor takes other arguments than a message."""
    error = made(kind)
    for same in (copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(same) is kind
        assert (str(same), vars(same)) == (str(error), vars(error))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_and_a_stream_cannot_be_copied(llm, again):
    with pytest.raises(TypeError, match="an LLM cannot be copied or sent to another process; open"):
        again(llm)
    with pytest.raises(TypeError, match="a stream cannot be copied or sent to another process"):
        again(llm.stream("a"))
    assert llm.generate("a", GREEDY)[0].error is None


def test_help_teaches():
    """The first example is a question, and every method says what it does."""
    text = pydoc.plain(pydoc.render_doc(LLM))
    assert 0 < text.index("llm.chat(") < text.index("generate(")
    assert "Literal['auto', 'cpu'" in text
    for name in ("generate", "chat", "stream", "score", "embed", "close", "tokenize"):
        assert (inspect.getdoc(getattr(LLM, name)) or "").strip(), name
