"""A loaded model with an engine that any number of threads use."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar, Unpack

from contract.context_manager import ContextManager
from contract.errors import RequestError
from contract.types import MAX_INT32
from harness.console import complain
from harness.file_digests import adapted_fingerprint, system_fingerprint
from harness.host.engine_thread import EngineThread
from harness.host.hosted import host_model
from harness.host.submissions import EndMessages, EngineStopped
from harness.named_adapters import default_scales
from harness.progress import SILENT, Progress, progress_on
from zinc_rt.arguments import ModelSettings, opening, signature_of
from zinc_rt.batches import Job, run_batch
from zinc_rt.other_names import refuse_attribute
from zinc_rt.pending import text_of_tokens
from zinc_rt.shapes import Prompt, token_ids, wrong

Result = TypeVar("Result")
WORDS = EndMessages(
    "the LLM was closed, as it is when the main thread ends; open another one",
    "open another LLM",
    "open another LLM",
)
WAITING = 16
"""Waiting requests of a batch besides the running ones, so that no slot is empty."""


OPEN: weakref.WeakSet[OpenModel] = weakref.WeakSet()
"""Every open model of this process."""


LEFT: list[ExitStack] = []
"""What engines that hang use, up to the end of the process."""


def _close_all() -> None:
    for llm in list(OPEN):
        try:
            llm.close()
        except EngineStopped as error:
            complain(f"error: {error}")


# ``atexit`` would be too late: thread pools, in which a step may compute, end before it. Functions
# registered last are called first, so the module of thread pools is imported before this.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


def _forget_all() -> None:
    """Detach all models in a forked process: only the process that opened them may free them."""
    for llm in list(OPEN):
        llm.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _close(owned: ExitStack, engine_thread: EngineThread) -> None:
    """Free a model's resources. Closing waits for the engine's thread; if the garbage collector
    calls this on that very thread, another thread frees them. Raises EngineStopped if it hangs:
    then what it uses is not freed."""
    if engine_thread.is_current:
        threading.Thread(target=owned.close, name="close", daemon=True).start()
        return
    try:
        engine_thread.remove_all()
    except EngineStopped as error:
        if engine_thread.hangs:
            LEFT.append(owned)
            raise EngineStopped(f"{error}; its memory is not freed") from None
    except BaseException:  # An interrupt, which comes after the rest as out of ``owned``.
        owned.close()
        raise
    owned.close()


def _warn_of_a_second_run() -> None:
    """Warn if multiprocessing runs a script again that opens a model outside of its main guard."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and getattr(processes.current_process(), "_inheriting", False):
        warnings.warn(
            "multiprocessing runs this script again in a new process, which opens the model once "
            "more; put what only the first process does under if __name__ == '__main__':",
            RuntimeWarning,
            stacklevel=3,
        )


class OpenModel(ContextManager):
    """A model and its engine, from its opening to ``close``."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        log_probabilities: int = 20,
        logit_biases: int = 1024,
        experts: bool = False,
        progress: bool = True,
        **settings: Unpack[ModelSettings],
    ) -> None:
        _warn_of_a_second_run()
        path, options, self._digests = opening(model, settings)
        options = replace(
            options,
            top_log_probabilities=log_probabilities,
            biases=logit_biases,
            masks=True,
            hidden_states=True,
            scores=log_probabilities > 0,
            experts=experts,
            # Callers in this process wait without a limit.
            queue_depth=MAX_INT32,
            stall_steps=MAX_INT32,
        )
        self._shows = progress
        with ExitStack() as owned:
            engine_thread = owned.enter_context(EngineThread(words=WORDS))
            hosted = host_model(
                path, options, engine_thread, owned, self._progress(True), prepare=False
            )
            self._close = weakref.finalize(self, _close, owned.pop_all(), engine_thread)
            OPEN.add(self)
        self._hosted = hosted
        self._adapters, self._default_adapters = options.lora, default_scales(options.lora)
        self._driver = hosted.driver
        self._grammars = hosted.grammars
        self._ids = iter(self._driver.new_id, None)
        self.model = hosted.model
        """The open model: its configuration, file and tokenizer."""
        self.tokenizer = hosted.tokenizer

    @property
    def tier(self) -> str:
        """The tier that computes."""
        return self._hosted.tier

    @property
    def slots(self) -> int:
        """Sequences that run at once."""
        return self._hosted.limits.slots

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self._hosted.limits.context

    @cached_property
    def system_fingerprint(self) -> str:
        """The server's fingerprint of the model with its adapters: equal ones give equal answers.
        The first time a file is read for its digest."""
        alone = system_fingerprint(self.model, self._hosted.limits, self._digests)
        return adapted_fingerprint(alone, self.model, self._default_adapters)

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text. Text that looks like a control token stays text."""
        if not isinstance(text, str):
            raise wrong("text", text, "give a text")
        return self.tokenizer.encode(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids, including control tokens and incomplete characters."""
        ids = token_ids(tokens, "tokens", "give a list of token ids")
        vocab = self.model.config.vocab
        if any(not 0 <= token < vocab for token in ids):
            raise RequestError("tokens", f"holds an id outside 0 to {vocab - 1}")
        return text_of_tokens(self.tokenizer, ids)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            refuse_attribute(self, name)

    def __repr__(self) -> str:
        closed = "" if self._close.alive else ", closed"
        return (
            f"LLM({self.model.config.name!r}, tier={self.tier!r}, slots={self.slots}, "
            f"context={self.context}{closed})"
        )

    def __enter__(self) -> Self:
        self._check_open()
        return super().__enter__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be copied or sent to another process; open one in each process, and "
            "share it between threads"
        )

    def _check_open(self) -> None:
        if not self._close.alive:
            raise EngineStopped(self._driver.failure or WORDS.closed)

    def forget(self) -> None:
        """Do not free anything, even at the end of the process."""
        OPEN.discard(self)
        self._close.detach()

    def close(self) -> None:
        """Cancel all requests and free everything. A second call does nothing. Raises EngineStopped
        if a step hangs, whose memory cannot be freed."""
        OPEN.discard(self)
        self._close()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)

    def _results(
        self,
        label: str,
        jobs: Iterator[Job[Result]],
        total: int | None,
        names: Mapping[str, str],
        shows: bool = True,
    ) -> Iterator[Result]:
        """The results of all jobs as they end, with a progress bar if ``shows``. ``names`` as of
        ``RequestError.renamed``."""
        progress = self._progress(False) if shows else SILENT
        progress.start(label, total, "prompt")
        try:
            for result in run_batch(self._driver, jobs, self.slots + WAITING):
                progress.advance(1)
                yield _named(result, names)
        except RequestError as error:
            raise error.renamed(names) from None
        finally:
            progress.close()

    def _progress(self, transient: bool) -> Progress:
        return progress_on(sys.stderr, transient=transient) if self._shows else SILENT


def _named(result: Result, names: Mapping[str, str]) -> Result:
    """The result with the name that its error's caller knows."""
    error = getattr(result, "error", None)
    if not isinstance(error, RequestError):
        return result
    return replace(result, error=error.renamed(names))  # type: ignore[type-var]


OpenModel.__init__.__signature__ = signature_of(  # type: ignore[attr-defined]
    OpenModel.__init__, ModelSettings
)
