"""A process that was forked while a model is open ends by itself, and says what it cannot do."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.digest import HASHING_THREADS, RowDigests, row_digest
from tests.cli.conftest import SOURCES, script_process
from tests.forked import in_a_fork
from tests.needs import need_device
from tests.patience import PATIENCE_SECONDS
from zinc_rt import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=4)
SCRIPT = """
import multiprocessing
import sys
import warnings

from zinc_rt import LLM, SamplingParams

warnings.simplefilter("ignore")
greedy, prompt = SamplingParams(max_tokens=4), "one two three four five six seven eight"
llm = LLM(sys.argv[1], tier="cpu", context=64, progress=False)
before = llm.generate(prompt, greedy)[0].tokens


def child():
    with LLM(sys.argv[1], tier="cpu", context=64, progress=False) as own:
        print("child", own.generate(prompt, greedy)[0].tokens == before)


child = multiprocessing.get_context("fork").Process(target=child)
child.start()
child.join()
print(child.exitcode, llm.generate(prompt, greedy)[0].tokens == before)
"""


def test_a_fork_opens_a_model_of_its_own_and_ends_by_itself(tiny_model_path):
    """It has none of the threads that computed for the process it was forked from, which goes on as
    before."""
    done = script_process(SCRIPT, tiny_model_path, PYTHONPATH=SOURCES)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == ["child True", "0 True"]


def test_a_fork_is_told_that_a_driver_cannot_be_used_in_it(tiny_model_path):
    """Its threads are in the process that it was forked from, and it would wait for them."""

    def text() -> str:
        with LLM(tiny_model_path, tier="opencl", context=64, progress=False) as llm:
            return llm.generate("one", GREEDY)[0].text

    before = need_device(text)
    told = in_a_fork(text)
    assert isinstance(told, str)
    assert told.startswith("TierUnavailable: ")
    assert "method spawn" in told
    assert text() == before


@pytest.mark.parametrize(
    "call",
    [
        *(lambda llm: llm.generate("one", GREEDY), lambda llm: list(llm.stream("one", GREEDY))),
        *(lambda llm: llm.chat("one", GREEDY), lambda llm: llm.score("one")),
        *(lambda llm: llm.logits("one"), lambda llm: llm.embed("one")),
    ],
)
def test_calls_in_a_fork_say_what_to_do(llm, call):
    said = str(in_a_fork(lambda: call(llm)))
    assert said.startswith("EngineStopped: this process was forked")
    assert "open a model in each process" in said
    assert llm.generate("one", GREEDY)[0].error is None


def test_a_fork_hashes_rows_with_threads_of_its_own():
    """Also where the process it was forked from has started all threads of its pool."""
    together = threading.Barrier(HASHING_THREADS)

    def digests(digest: Callable[[Any], str] = row_digest) -> list[str]:
        rows = RowDigests(digest)
        rows(0, np.ones((HASHING_THREADS, 3), np.float32))
        return rows.first(HASHING_THREADS)

    digests(lambda row: str(together.wait(PATIENCE_SECONDS)))
    assert digests() == in_a_fork(digests)


def test_closing_in_a_fork_frees_nothing(llm):
    assert in_a_fork(lambda: (llm.close(), repr(llm))[1]).endswith(", closed)")  # type: ignore[attr-defined]
    assert llm.generate("one", GREEDY)[0].error is None
