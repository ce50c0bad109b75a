"""``zinc-rt serve`` and ``zinc-rt verify``: a model for many users, over HTTP."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError
from harness.cli.model_argument import add_model_argument
from harness.cli.parser import add_switch, path_argument
from harness.cli.receipts_command import (
    add_receipt_flags,
    refuse_receipt_flags,
    verify_receipt_file,
)
from harness.cli.sessions import (
    ENGINE_SETTINGS,
    MODEL_SETTINGS,
    model_file,
    model_name,
    session_options,
)
from harness.console import complain, note
from harness.extras import optional_libraries
from harness.interrupts import INTERRUPTED
from harness.sampling_defaults import SamplingDefaults
from harness.settings import Settings, add_flags, resolve, values_for
from harness.settings_table import names_in
from harness.unblocked import unblock_standard_error

if TYPE_CHECKING:
    from harness.serve.model import ModelOptions
    from harness.serve.run import Running, ServeOptions
    from harness.serve.signals import Signals

SAMPLED = tuple(SamplingDefaults().values)
"""The sampling settings for parameters that a request omits."""
NAMES = (*names_in("model", "adapters", "server"), "repeat_last_n", *SAMPLED, *ENGINE_SETTINGS)
OF_MODEL = "what the model's file or the catalog says, else {}"
SHOWN = {name: OF_MODEL.format(value) for name, value in SamplingDefaults().values.items()} | {
    "max_tokens": f"{SamplingDefaults().max_tokens} for a conversation, 16 for a text"
}
VERIFY_NAMES = (*MODEL_SETTINGS, "lora", "slots", "repeat_last_n", *ENGINE_SETTINGS)
SLOTS = 4
DIFFERENT = 1
TERMINATED = 128 + 15
"""Exit code of a server that SIGTERM ended before it was ready, as shells have it."""
FAILED = 70
"""Exit code of a server whose engine hangs when it ends: sysexits.h's for an internal fault."""
MAX_BIASES = 1024
QUESTION = "Why is the sky blue?"
LISTED = 20
"""Most likely tokens per position whose log-probabilities a client may request: OpenAI's number."""

EXAMPLES = """\
examples:
  zinc-rt serve                                the default model on port 8080
  zinc-rt serve qwen3-0.6b --slots 8 --context 8K
  zinc-rt serve --host 0.0.0.0 --tenants tenants.toml

  curl http://127.0.0.1:8080/v1/chat/completions \\
    -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="unused")

SIGTERM lets running answers end and Ctrl-C cuts them. SIGHUP reads the file of
tenants again.
"""
VERIFY_EXAMPLES = """\
examples:
  zinc-rt verify request.json response.json
  zinc-rt verify request.json response.json --tier cpu   the same bits elsewhere
  zinc-rt verify receipt.json --sample 8                 8 steps of a receipt

Exit code 0: identical; 1: different, and where; 2: bad input; 3: identical, but
the chain of receipts has no beginning.
The model and --kv-dtype must be those of the server, and so must --context
where the request names no max_tokens.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``serve`` and ``verify`` commands; their parsers set ``func(args) -> exit code``."""
    text = "serve a model over HTTP, with a chat page"
    described = (
        "Serve a model to many users over HTTP: a chat page, and the APIs of OpenAI, Anthropic "
        "and Ollama."
    )
    parser = subparsers.add_parser("serve", help=text, description=described, epilog=EXAMPLES)
    add_model_argument(parser)
    add_switch(
        parser.add_argument_group("output"), "-q", "--quiet", help="log problems only, no requests"
    )
    add_flags(parser, NAMES, SHOWN)
    parser.set_defaults(func=serve)
    text = "check an answer or a receipt of a server by computing it again"
    described = (
        "Compute an answer of a server again, or what a receipt says of it: identical, or where "
        "it first differs."
    )
    parser = subparsers.add_parser(
        "verify", help=text, description=described, epilog=VERIFY_EXAMPLES
    )
    parser.add_argument(
        "request",
        metavar="RECEIPT|REQUEST",
        type=path_argument,
        help="file: a receipt, or several of a chain, one a line; or the JSON that was sent",
    )
    parser.add_argument(
        "response",
        metavar="RESPONSE",
        type=path_argument,
        nargs="?",
        help="file: the JSON or the events received",
    )
    add_receipt_flags(parser)
    add_flags(parser, VERIFY_NAMES)
    parser.set_defaults(func=verify)


def serve(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    unblock_standard_error()
    settings = resolve(args, NAMES)
    need_server_extra()
    from harness.serve.signals import Signals

    level = logging.WARNING if args.quiet else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("zinc_rt.serve").setLevel(level)
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    with Signals() as signals:
        try:
            return _serve(settings, signals, args.quiet)
        except KeyboardInterrupt:
            if signals.ended_early != signal.SIGTERM:
                raise
    complain("SIGTERM ended the server before it was ready")
    return TERMINATED


def _serve(settings: Settings, signals: Signals, quiet: bool) -> int:
    """Open the model and serve it; returns the exit code."""
    from harness.host.heap import freeze_heap
    from harness.progress import progress_on
    from harness.serve.presence import announced
    from harness.serve.run import LEFT, running
    from harness.serve.signals import notify_supervisor

    progress = progress_on(transient=True)
    with running(options_of(settings), progress, signals.hold) as server:
        freeze_heap()
        model = server.service.model
        note(
            f"{model.name} on {model.tier}: {model.limits.slots} slots of {model.context:,} tokens,"
            f" fingerprint {model.fingerprint}"
        )
        sampling = (f"{name} {value:g}" for name, value in model.sampling.values.items())
        note(f"sampling, where a request names none: {', '.join(sampling)}")
        began_with, _ = server.models.began_with
        if model.name != began_with:
            note(f"it was chosen at the server in place of {began_with}, which can be chosen again")
        with announced(server, settings["drain_seconds"]):
            note(f"listening on {server.url}")
            if not quiet:
                for line in _ways_in(server):
                    note(line)
            notify_supervisor("READY=1")
            interrupted = signals.serve_until_stopped(server, settings["drain_seconds"])
    if LEFT:
        complain("the engine hangs: the process ends without it")
        os._exit(FAILED)
    return INTERRUPTED if interrupted else 0


def verify(args: argparse.Namespace) -> int:
    """Recompute an answer and compare."""
    settings = resolve(args, VERIFY_NAMES)
    need_server_extra()
    if args.response is None:
        return verify_receipt_file(args, settings, model_options)
    refuse_receipt_flags(args)
    from harness.host.engine_thread import EngineThread
    from harness.progress import progress_on
    from harness.serve.errors import ApiError
    from harness.serve.model import WINDOW, open_model
    from harness.serve.transcripts import read_answer, read_object
    from harness.serve.verify import first_difference, server_value, tells_no_usage

    request, response = read_object(args.request), read_answer(args.response)
    path = model_file(settings)
    options = model_options(settings, path)
    window = max(options.session.repeat_last_n, server_value(response, WINDOW) or 0)
    options = replace(options, session=replace(options.session, repeat_last_n=window))
    with ExitStack() as owned:
        thread = owned.enter_context(EngineThread())
        progress = progress_on(transient=True)
        model = open_model(path, options, thread, owned, progress)
        try:
            difference = first_difference(model, request, response, progress)
        except ApiError as error:
            raise ConfigError(f"{args.request}: {error}") from None
    if tells_no_usage(response):
        note("note: the stream tells no usage, so its counts were not compared")
    print("identical" if difference is None else f"different: {difference}")
    return 0 if difference is None else DIFFERENT


def _ways_in(server: Running) -> Iterator[str]:
    """Lines that show how to use the server: its page, and a request to paste into a shell."""
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}]})
    key = "-H 'Authorization: Bearer KEY' " if server.service.accounts.keyed else ""
    if server.service.model.template is not None:
        yield f"chat page: {server.url}/"
        yield (
            f"curl {server.url}/v1/chat/completions {key}"
            f"-H 'Content-Type: application/json' -d '{body}'"
        )


def need_server_extra() -> None:
    """Raise ConfigError when the server's libraries are not installed."""
    with optional_libraries():
        import harness.serve.run  # noqa: F401


def options_of(settings: Settings) -> ServeOptions:
    """The options of the server that the settings describe; fetches its model's file if needed."""
    from harness.serve.run import ServeOptions

    path = model_file(settings)
    name = model_name(settings["model"], path)
    given = values_for(ServeOptions, settings) | {
        "path": path,
        "model": model_options(settings, path),
        "beside": _files_of(settings["beside"], settings, name),
    }
    return ServeOptions(**given)


def model_options(settings: Settings, path: Path) -> ModelOptions:
    """The options of the model in the file ``path``, as a server opens it."""
    from harness.file_digests import DIGESTS_FILE
    from harness.serve.model import ModelOptions

    session = replace(
        session_options(settings, chat=True),
        slots=settings["slots"] or SLOTS,
        biases=MAX_BIASES,
        top_log_probabilities=LISTED,
    )
    return ModelOptions(
        **values_for(ModelOptions, settings),
        session=session,
        name=model_name(settings["model"], path),
        digests=settings["cache_dir"] / DIGESTS_FILE,
        sampling={
            name: settings[name]
            for name in SAMPLED
            if name in settings and settings.sources[name] != "default"
        },
    )


def _files_of(names: Sequence[str], settings: Settings, answers: str) -> dict[str, Path]:
    """The files of further models to serve besides ``answers``, by name. Raises ConfigError when
    two have the same name."""
    files = {answers: Path()}
    for one in names:
        path = model_file(settings, one)
        name = model_name(one, path)
        if name in files:
            raise ConfigError(f"--beside: two models would be called {name!r}; rename a file")
        files[name] = path
    del files[answers]
    return files
