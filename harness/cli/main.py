"""The ``zinc-rt`` console script: finds the command, and turns errors into one line each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from types import MappingProxyType
from typing import Any

from contract.arithmetic import ARITHMETIC_VERSION
from contract.errors import ConfigError, ZincError
from harness.cli.answer import INTERRUPTED
from harness.cli.parser import EXIT_CODES, Parser, commands, search
from harness.cli.tools_command import TOOLS, run_tool
from harness.console import printable
from harness.settings import ENV_PREFIX
from harness.startup import prepare_process

COMMANDS = MappingProxyType(
    {
        "run": "run_command",
        "chat": "run_command",
        "serve": "serve_command",
        "verify": "serve_command",
        "receipts": "receipts_command",
        "ps": "servers_command",
        "stop": "servers_command",
        "tenants": "tenants_command",
        "model": "model_command",
        "inspect": "inspect_command",
        "graph": "graph_command",
        "logits": "logits_command",
        "check": "check_command",
        "devices": "devices_command",
        "asm": "asm_command",
        "pm4-test": "pm4_test_command",
        "card-test": "card_test_command",
        **dict.fromkeys(TOOLS, "tools_command"),
    }
)
"""The module of ``harness.cli`` that adds each command, in the order of the help."""
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
    """The console script. Text that the terminal cannot show is escaped instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    prepare_process()
    code = main()
    if code == BROKEN_PIPE:
        # Data still buffered for the closed pipe would raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code and prints at most one line of error."""
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


def build_parser(words: Iterable[str] = COMMANDS) -> Parser:
    """The parser of the command line, with the commands ``words`` and others of their modules."""
    parser = Parser(
        prog="zinc-rt",
        description="Run GGUF language models with the same bits on every device.",
        epilog=f"{EXAMPLES}\n{MODELS}\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name in dict.fromkeys(COMMANDS[word] for word in words):
        import_module(f"harness.cli.{name}").add_parser(subparsers)
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
    """Prints the version of the installed distribution, which is looked up only then."""

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
        code = run_tool(words)
        if code is not None:
            return code
        args = _parse(words)
    except SystemExit as finished:
        return int(finished.code or 0)
    if not hasattr(args, "func"):
        build_parser().print_help()
        return 0
    result: int = args.func(args)
    return result


def _parse(words: list[str]) -> argparse.Namespace:
    """Parse a command line. Raises ConfigError.

    Only the module of its command is imported, unless the line is invalid: the user may have meant
    a flag of another command.
    """
    if words and words[0] in COMMANDS:
        with suppress(ConfigError):
            return build_parser(words[:1]).parse_args(words)
    return build_parser().parse_args(words)


def _report(problem: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"error: {printable(problem)}", file=sys.stderr)
    return code
