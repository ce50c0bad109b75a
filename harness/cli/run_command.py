"""``zinc-rt run`` and ``zinc-rt chat``: a model answers a prompt or holds a conversation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from contract.errors import ConfigError, RequestError
from harness.cli.run_receipt import receipt_of_run
from harness.cli.serving import (
    ENGINE_SETTINGS,
    MODEL_SETTINGS,
    SAMPLING_SETTINGS,
    open_session,
    sampling_of,
)
from harness.console import note
from harness.setting_kinds import KEY_ENV
from harness.settings import Settings, add_flags, resolve
from harness.startup import load_ahead

NAMES = (
    *MODEL_SETTINGS,
    *ENGINE_SETTINGS,
    *SAMPLING_SETTINGS,
    "max_tokens",
    "system",
    "thinking",
)

RUN_EXAMPLES = """\
examples:
  zinc-rt run "Why is the sky blue?"
  zinc-rt run -f notes.txt --system "Summarise the text." --max-tokens 200
  zinc-rt run --raw "Once upon a time" --temperature 0.8 --seed 7
  zinc-rt run --model ./model.gguf --json "Name three rivers." | jq .usage
"""
CHAT_EXAMPLES = """\
examples:
  zinc-rt chat
  zinc-rt chat --model qwen3-0.6b --system "Answer in one sentence." --thinking off
  zinc-rt chat --server http://127.0.0.1:8080
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``run`` and ``chat`` commands; their parsers set ``func(args) -> exit code``."""
    text = "answer a prompt: the answer on standard output, all else on standard error"
    parser = subparsers.add_parser("run", help=text, description=text, epilog=RUN_EXAMPLES)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt")
    parser.add_argument(
        "-f", "--file", metavar="FILE", help="read the prompt from a file; - is standard input"
    )
    manner = parser.add_mutually_exclusive_group()
    manner.add_argument(
        "--chat", action="store_true", help="go on with a conversation after the prompt, if any"
    )
    manner.add_argument(
        "--raw", action="store_true", help="continue the text: no chat template, no system prompt"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--receipt",
        type=Path,
        metavar="FILE",
        help="write a signed receipt of the answer, for zinc-rt verify (docs/receipts.md)",
    )
    _add_common(parser)
    text = "talk to a model; standard input that is no terminal gives one turn a line"
    parser = subparsers.add_parser("chat", help=text, description=text, epilog=CHAT_EXAMPLES)
    parser.add_argument(
        "--server", metavar="URL", help="talk to this server instead of a model of this process"
    )
    parser.add_argument(
        "--key", metavar="KEY", help=f"your API key there [env {KEY_ENV}, which others cannot see]"
    )
    parser.set_defaults(prompt=None, file=None, chat=True, raw=False, json=False, receipt=None)
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record everything the tier is told, for python -m harness.replay",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write a timeline for ui.perfetto.dev"
    )
    add_flags(parser, NAMES)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Answer one prompt, or hold a conversation."""
    settings = resolve(args, NAMES)
    if args.raw and settings.sources["system"].startswith("flag"):
        raise RequestError("system", "is not sent with --raw; leave one of them out")
    if args.chat and (args.json or args.receipt):
        flag = "--json" if args.json else "--receipt"
        raise ConfigError(f"{flag} answers one prompt; leave out --chat")
    if getattr(args, "server", None) is not None:
        from harness.cli.remote_chat import converse_with_server

        return converse_with_server(args, settings)
    load_ahead(settings["tier"])
    if args.chat:
        from harness.cli.chat import converse

        return converse(args, settings)
    return _answer(args, settings)


def _answer(args: argparse.Namespace, settings: Settings) -> int:
    from harness.cli.answer import INTERRUPTED, closing_line, follow, record, show_answer
    from harness.cli.prompt import encode_turn, read_prompt
    from harness.generate import Recording
    from harness.progress import progress_on

    prompt = read_prompt(args.prompt, args.file)
    receipt = None if args.receipt is None else receipt_of_run(args, settings, prompt)
    recording = Recording(args.trace, args.timeline)
    with open_session(settings, chat=not args.raw, recording=recording) as session:
        tokens = encode_turn(
            session,
            prompt,
            system=settings["system"],
            thinking=settings["thinking"],
            raw=args.raw,
        )
        generation = session.generate(
            tokens,
            sampling_of(settings, session),
            settings["max_tokens"],
            args.stop,
            progress_on(transient=True),
            None if receipt is None else receipt.digests,
        )
        if args.json:
            interrupted = follow(generation, lambda text: None)
            print(json.dumps(record(generation, session, settings["seed"])))
        else:
            interrupted = show_answer(generation)
            note(closing_line(generation, session))
        if receipt is not None and not interrupted:
            receipt.write(generation, session)
    return INTERRUPTED if interrupted else 0
