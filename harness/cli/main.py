"""The ``zinc-rt`` console script: finds the command, and turns errors into one line each."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from contract.arithmetic import ARITHMETIC_VERSION
from contract.errors import ConfigError, ZincError
from harness.cli import (
    asm_command,
    card_test_command,
    check_command,
    devices_command,
    graph_command,
    inspect_command,
    logits_command,
    model_command,
    pm4_test_command,
    run_command,
    serve_command,
    servers_command,
    tenants_command,
    tools_command,
)
from harness.cli.answer import INTERRUPTED
from harness.cli.parser import EXIT_CODES, Parser, commands, search
from harness.console import printable
from harness.settings import ENV_PREFIX

COMMANDS = (
    run_command,
    serve_command,
    servers_command,
    tenants_command,
    model_command,
    inspect_command,
    graph_command,
    logits_command,
    check_command,
    devices_command,
    asm_command,
    pm4_test_command,
    card_test_command,
    tools_command,
)
DEBUG_ENV = f"{ENV_PREFIX}DEBUG"
INTERNAL_ERROR = 1
BROKEN_PIPE = 141

EXAMPLES = """\
examples:
  zinc-rt run "Why is the sky blue?"       pull the default model if need be, and answer
  git diff | zinc-rt run --system "Write a commit message."
  zinc-rt chat --model ./model.gguf        talk to a model file of your own
  zinc-rt serve                            OpenAI's HTTP routes on http://127.0.0.1:8080
  zinc-rt check                            is this machine ready, and if not, why
  zinc-rt inspect ./model.gguf             what is in a file, and the memory it takes
  zinc-rt help memory                      search the help of all commands
"""
MODELS = """\
models (GGUF, also split files):
  architectures    llama, qwen2, qwen3, qwen3moe, qwen35, qwen35moe, qwen3next, gemma3, gemma4
  weights          f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k,
                   iq4_nl, iq4_xs, mxfp4
  keys and values  f16, f32, i12, q8_0 (--kv-dtype)
"""


def entry() -> int:
    """Console script. Text that the terminal cannot show is escaped rather than fatal."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = main()
    if code == BROKEN_PIPE:
        # What is still buffered for the closed pipe would raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; gives its exit code and prints at most one line of error."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or bool(os.environ.get(DEBUG_ENV))
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except ZincError as error:
        return _report(str(error), error.exit_code, debug)
    except Exception as error:
        hint = "" if debug else "; run again with --debug for a traceback"
        problem = f"unexpected {type(error).__name__}: {error}{hint}"
        return _report(problem, INTERNAL_ERROR, debug)


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="zinc-rt",
        description="Run GGUF language models with the same bits on every device.",
        epilog=f"{EXAMPLES}\n{MODELS}\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add_parser(subparsers)
    _add_help(subparsers, parser)
    for leaf in (parser, *commands(parser)):
        leaf.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help=f"show a traceback with every error [env {DEBUG_ENV}]",
        )
    return parser


class _Version(argparse.Action):
    """Prints the version of the installed distribution, looked up only when asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("zinc-rt")
        except PackageNotFoundError:
            number = "(not installed, run from its source tree)"
        print(f"zinc-rt {number}, arithmetic exact-{ARITHMETIC_VERSION}")
        raise SystemExit(0)


def _add_help(subparsers: Any, root: Parser) -> None:
    text = "search the help of all commands for a word"
    parser = subparsers.add_parser("help", help=text, description=text)
    parser.add_argument("word", nargs="?", help="a flag, a setting or any word")

    def show(args: argparse.Namespace) -> int:
        if args.word is None:
            root.print_help()
            return 0
        found = search(root, args.word)
        if not found:
            raise ConfigError(f"no command or flag mentions {args.word!r}; see zinc-rt --help")
        print("\n".join(found))
        return 0

    parser.set_defaults(func=show)


def _run(words: list[str]) -> int:
    try:
        code = tools_command.run_tool(words)
        if code is not None:
            return code
        parser = build_parser()
        args = parser.parse_args(words)
    except SystemExit as finished:
        return int(finished.code or 0)
    if not hasattr(args, "func"):
        parser.print_help()
        return 0
    result: int = args.func(args)
    return result


def _report(problem: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {printable(problem)}", file=sys.stderr)
    return code
