"""``zinc-rt run-batch``: answers a file of requests as the server would, without a server."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from threading import Lock
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError
from harness.cli.batch_files import AnswerFile, open_answers
from harness.cli.model_argument import add_model_argument
from harness.cli.outputs import check_writable
from harness.cli.parser import add_switch, path_argument
from harness.cli.serve_command import SAMPLED, SHOWN, VERIFY_NAMES, model_options, need_server_extra
from harness.cli.sessions import model_file
from harness.console import note
from harness.progress import SILENT, Progress
from harness.settings import Settings, add_flags, group_of, resolve

if TYPE_CHECKING:
    from harness.serve.batch_lines import BatchAnswer, BatchRequest

NAMES = (*VERIFY_NAMES, "alias", "unknown_fields", "read_experts", *SAMPLED)
SOME_REFUSED = 1
UNKNOWN_MODEL = "model_not_found"
EXAMPLES = """\
examples:
  zinc-rt run-batch -i requests.jsonl -o answers.jsonl
  zinc-rt run-batch qwen3-0.6b -i requests.jsonl -o answers.jsonl --slots 8
  zinc-rt run-batch -i requests.jsonl -o answers.jsonl --resume   after Ctrl-C

A line of requests, in OpenAI's format:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello"}]}}

Each answer is written when it is there; in the end the lines have the order of
the requests. --alias '*' lets the requests call the model by any name.
Exit code 0: all answered; 1: some refused; 2: bad input, nothing computed.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``run-batch`` command; its parser sets ``func(args) -> exit code``."""
    text = "answer a file of requests in OpenAI's batch format"
    described = f"{text}, as the server would answer them, without a server"
    parser = subparsers.add_parser("run-batch", help=text, description=described, epilog=EXAMPLES)
    add_model_argument(parser)
    source = group_of(parser, "input")
    source.add_argument(
        *("-i", "--input-file"),
        metavar="FILE",
        type=path_argument,
        required=True,
        help="the requests, a JSON object in each line",
    )
    group = group_of(parser, "output")
    group.add_argument(
        *("-o", "--output-file"),
        metavar="FILE",
        type=path_argument,
        required=True,
        help="file for the answers, a line for each request",
    )
    group.add_argument(
        "--error-file",
        metavar="FILE",
        type=path_argument,
        help="file for the lines of refused requests [default: among the answers]",
    )
    add_switch(group, "--resume", help="go on with earlier files, and ask again what was refused")
    add_flags(parser, NAMES, SHOWN)
    parser.set_defaults(func=run_batch)


def run_batch(args: argparse.Namespace) -> int:
    """Answer the requests; the exit code says whether any was refused."""
    settings = resolve(args, NAMES)
    need_server_extra()
    from harness.serve.batch_lines import read_batch
    from harness.serve.run import MAX_BODY_BYTES

    source, out, errors = args.input_file, args.output_file, args.error_file
    check_writable("--output-file", out, source)
    if errors is not None:
        check_writable("--error-file", errors, source, out)
    requests = read_batch(source, MAX_BODY_BYTES)
    known = {request.custom_id: index for index, request in enumerate(requests)}
    if not known:
        raise ConfigError(f"{source}: has no requests")
    with ExitStack() as owned:
        answers = owned.enter_context(open_answers("--output-file", out, known, args.resume))
        refusals = answers
        if errors is not None:
            refusals = owned.enter_context(open_answers("--error-file", errors, known, args.resume))
        done = {*answers.answered, *refusals.answered}
        written = _Written(answers, refusals, len(done), len(known))
        # Lines that somebody adds meanwhile are not asked for.
        names = known.keys() - done
        left = (one for one in read_batch(source, MAX_BODY_BYTES) if one.custom_id in names)
        try:
            if len(done) < len(known):
                _answer(settings, left, written)
        except BaseException:
            if written.done:
                note(f"{written.done:,} of {len(known):,} answers are written; --resume goes on")
            raise
        for file in {answers, refusals}:
            file.arrange()
    note(written.summary)
    if UNKNOWN_MODEL in written.refused:
        note("requests call the model by other names; --alias '*' --resume answers them, too")
    return SOME_REFUSED if written.refused else 0


def _answer(settings: Settings, requests: Iterable[BatchRequest], written: _Written) -> None:
    """Open the model and answer the requests."""
    from harness.host.engine_thread import EngineThread
    from harness.progress import progress_on
    from harness.serve.batch_lines import Batch
    from harness.serve.model import open_model
    from harness.serve.receipts.verify import uncounted_service

    path, progress = model_file(settings), progress_on(transient=True)
    options = model_options(settings, path)
    with ExitStack() as owned:
        thread = owned.enter_context(EngineThread())
        model = open_model(path, options, thread, owned, progress)
        service = owned.enter_context(uncounted_service(model))
        written.begin(progress)
        owned.callback(progress.close)
        Batch(service, settings["unknown_fields"]).run(requests, written.add)


class _Written:
    """Writes answers to their files, from any thread, and counts them. ``done`` of ``total``
    answers are there before."""

    def __init__(self, answers: AnswerFile, refusals: AnswerFile, done: int, total: int) -> None:
        self.done = done
        self.refused: Counter[str] = Counter()
        self._answers, self._refusals, self._total = answers, refusals, total
        self._progress: Progress = SILENT
        self._tokens = [0, 0]
        self._began = time.monotonic()
        self._lock = Lock()

    def begin(self, progress: Progress) -> None:
        """Show on ``progress`` how many are done."""
        self._progress, self._began = progress, time.monotonic()
        progress.start("answering", self._total, "request")
        progress.advance(self.done)

    def add(self, request: BatchRequest, answer: BatchAnswer) -> None:
        """Write an answer. Raises OSError."""
        with self._lock:
            file = self._refusals if answer.refused is not None else self._answers
            file.add(request.custom_id, answer.line)
            self.done += 1
            if answer.refused is not None:
                self.refused[answer.refused] += 1
            self._tokens = [a + b for a, b in zip(self._tokens, answer.tokens, strict=True)]
            self._progress.advance(1)

    @property
    def summary(self) -> str:
        """What happened, as one line."""
        refused = ", ".join(f"{count:,} {code}" for code, count in self.refused.most_common())
        if refused:
            refused = f"; refused: {refused}, see {self._refusals.path}"
        prompts, answers = self._tokens
        seconds = time.monotonic() - self._began
        return (
            f"{self.done - self.refused.total():,} answers{refused} "
            f"[{prompts:,} prompt tokens · {answers:,} tokens · {seconds:.1f} s]"
        )
