"""``zinc-rt run`` and ``zinc-rt chat``: a model answers a prompt or holds a conversation."""

from __future__ import annotations

import argparse
import json
from typing import Any

from contract.errors import ConfigError, RequestError
from harness.cli.answer_format import add_format_flags, answer_format, constraint_of, errors_of
from harness.cli.model_argument import add_model_argument
from harness.cli.outputs import check_output
from harness.cli.parser import add_file, add_quiet_flag, add_switch
from harness.cli.sessions import RUN_SETTINGS, open_session, sampling_of
from harness.cli.suggestions import is_file, names_model
from harness.console import note
from harness.interrupts import INTERRUPTED
from harness.setting_kinds import KEY_ENV
from harness.settings import Settings, add_flags, resolve
from harness.settings_table import names_in
from harness.startup import load_ahead

RUN_EXAMPLES = """\
examples:
  zinc-rt run "Why is the sky blue?"
  cat notes.txt | zinc-rt run "Summarise this:" --max-tokens 200
  zinc-rt run -f question.txt                 # or: zinc-rt run - < question.txt
  zinc-rt run --raw "Once upon a time" --temperature 0.8 --seed 7
  zinc-rt run ./model.gguf "Name three rivers." --json | jq .usage
  zinc-rt run "Name three rivers as JSON." --json-schema rivers.json
"""
CHAT_EXAMPLES = """\
examples:
  zinc-rt chat
  zinc-rt chat qwen3-0.6b --system "Be brief." --thinking off
  zinc-rt chat --server http://127.0.0.1:8080
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``run`` and ``chat`` commands; their parsers set ``func(args) -> exit code``."""
    text = "answer one prompt"
    described = (
        "Answer one prompt. The answer goes to standard output, everything else to standard error."
    )
    parser = subparsers.add_parser("run", help=text, description=described, epilog=RUN_EXAMPLES)
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="[MODEL] PROMPT",
        help="the prompt; text that is piped in is appended to it; - reads all of it from there. "
        "A model may be named before it instead of with --model; without a prompt, on a "
        "terminal, that begins a conversation",
    )
    source = parser.add_argument_group("input")
    source.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    source.add_argument("-p", "--prompt", dest="prompt_flag", help=argparse.SUPPRESS)
    manner = source.add_mutually_exclusive_group()
    add_switch(manner, "--chat", help="go on with a conversation after the answer")
    add_switch(
        manner, "--raw", help="continue the text as it is, without chat template and system prompt"
    )
    output = parser.add_argument_group("output")
    add_switch(output, "--json", help="print one JSON object")
    add_file(output, "--receipt", help="write a signed receipt of the answer, see zinc-rt verify")
    _add_common(parser, output)
    text = "hold a conversation with a model"
    described = (
        "Hold a conversation with a model: /help lists what can be typed besides messages. Of "
        'piped text every line is one turn, or what stands between """ and """.'
    )
    parser = subparsers.add_parser("chat", help=text, description=described, epilog=CHAT_EXAMPLES)
    source = parser.add_argument_group("input")
    source.add_argument(
        "--server", metavar="URL", help="use the model of a running server, see zinc-rt ps"
    )
    source.add_argument(
        "--key",
        metavar="KEY",
        help=f"API key for that server; other users see a key that is typed, but not "
        f"the environment variable {KEY_ENV}",
    )
    parser.set_defaults(prompt=None, prompt_flag=None, file=None, chat=True, raw=False, json=False)
    parser.set_defaults(receipt=None)
    add_model_argument(parser)
    _add_common(parser, parser.add_argument_group("output"))


def _add_common(parser: Any, output: argparse._ArgumentGroup) -> None:
    output.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text. May be given several times",
    )
    add_quiet_flag(output, "the answer")
    add_file(output, "--trace", help="record every step, to be repeated by zinc-rt replay")
    add_file(output, "--timeline", help="write what happened when, to be shown by ui.perfetto.dev")
    add_format_flags(output)
    parser.rare |= {"trace", "timeline", "grammar", "regex"}
    add_flags(parser, RUN_SETTINGS)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Answer one prompt, or hold a conversation."""
    settings = resolve(args, RUN_SETTINGS)
    if args.prompt_flag is not None:
        if args.prompt is not None:
            raise RequestError("prompt", "is given twice; leave out -p")
        args.prompt = args.prompt_flag
    if _begins_conversation(args):
        args.chat = True
    for name in ("system", "thinking") if args.raw else ():
        if settings.sources[name].startswith("flag"):
            raise RequestError(name, "is not sent with --raw; leave one of them out")
    if args.chat and (args.json or args.receipt):
        flag = "--json" if args.json else "--receipt"
        raise ConfigError(f"{flag} answers one prompt; leave out --chat")
    if getattr(args, "server", None) is not None:
        from harness.cli.remote_chat import converse_with_server

        for name in names_in("adapters", "device", "memory", "speed"):
            if settings.sources[name].startswith("flag"):
                raise ConfigError(f"{settings.sources[name]}: is the server's; leave it out")
        return converse_with_server(args, settings)
    if getattr(args, "key", None) is not None:
        raise ConfigError("--key: is for a server; name it with --server")
    for name in ("trace", "timeline"):
        if getattr(args, name) is not None:
            check_output(f"--{name}", getattr(args, name))
    load_ahead(settings["tier"])
    if args.chat:
        from harness.cli.chat import converse

        return converse(args, settings)
    return _answer(args, settings)


def _begins_conversation(args: argparse.Namespace) -> bool:
    """Whether a person on a terminal named a model and nothing else."""
    if not getattr(args, "names_only_model", False) or args.prompt is not None or args.file:
        return False
    from harness.cli.prompt import is_terminal

    return is_terminal() and not (args.raw or args.json or args.receipt)


def _answer(args: argparse.Namespace, settings: Settings) -> int:
    from harness.cli.answer import closing_line, follow, record, show_answer
    from harness.cli.prompt import encode_turn, opening, read_prompt, user
    from harness.host.options import Recording
    from harness.progress import progress_on

    held = answer_format(args)
    prompt = read_prompt(args.prompt, args.file)
    if names_model(prompt):
        note(f"{prompt!r} is the prompt; a model is named with --model")
    elif args.file is None and is_file(prompt):
        note(f"{prompt!r} is the prompt; the text of a file is read with -f")
    receipt = None
    if args.receipt is not None:
        from harness.cli.run_receipt import receipt_of_run

        receipt = receipt_of_run(args, settings, prompt, held)
    recording = Recording(args.trace, args.timeline)
    from reference.runner import LOGITS

    made = receipt is not None
    with open_session(
        settings, chat=not args.raw, digests=made, masks=held is not None, recording=recording
    ) as session:
        messages = None if args.raw else [*opening(settings["system"]), user(prompt)]
        tokens = encode_turn(session, prompt, messages, settings["thinking"])
        generation = session.generate(
            tokens,
            sampling_of(settings, session),
            settings["max_tokens"],
            args.stop,
            progress_on(transient=True),
            None if receipt is None else receipt.digests,
            LOGITS if receipt is None else receipt.output,
            chat=not args.raw,
            constraint=constraint_of(held, session, messages, settings["thinking"]),
        )
        with errors_of(held):
            if args.json:
                from harness.file_digests import DIGESTS_FILE

                interrupted = follow(generation, lambda text: None)
                digests = settings["cache_dir"] / DIGESTS_FILE
                print(json.dumps(record(generation, session, digests)))
            else:
                interrupted = show_answer(generation)
                note(closing_line(generation, session))
        if receipt is not None and not interrupted:
            receipt.write(generation, session)
    return INTERRUPTED if interrupted else 0
