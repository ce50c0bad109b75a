"""The ``zinc-rt`` console script: finds the command, and turns errors into one line each."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from contract.arithmetic import ARITHMETIC_VERSION
from contract.errors import ConfigError, ZincError
from harness.cli.foreign_flags import advice_about, own_spelling, refuse_foreign_flags
from harness.cli.model_argument import take_model
from harness.cli.parser import (
    DEBUG_ENV,
    EXIT_CODES,
    Parser,
    add_common_flags,
    commands,
    inherit_examples,
    named_parser,
    search,
)
from harness.cli.suggestions import refuse_arguments, refuse_command, translated
from harness.cli.tools_command import TOOLS, run_named_tool
from harness.console import DISK_ERRORS, complain, note, silence
from harness.extras import missing_module
from harness.interrupts import BROKEN_PIPE, INTERRUPTED, is_interrupt
from harness.settings import misspelt_variables
from harness.startup import finish_process, prepare_process

COMMANDS: Mapping[str, str] = {
    "run": "run_command",
    "chat": "run_command",
    "serve": "serve_command",
    "run-batch": "batch_command",
    "verify": "serve_command",
    "receipts": "receipts_command",
    "ps": "servers_command",
    "stop": "servers_command",
    "tenants": "tenants_command",
    "model": "model_command",
    "inspect": "inspect_command",
    "graph": "graph_command",
    "logits": "logits_command",
    "score": "score_command",
    "tokenize": "tokenize_command",
    "export-plan": "export_plan_command",
    "check": "check_command",
    "devices": "devices_command",
    "config": "config_command",
    "asm": "asm_command",
    "pm4-test": "pm4_test_command",
    "card-test": "card_test_command",
    **dict.fromkeys(TOOLS, "tools_command"),
}
"""The module of ``harness.cli`` that adds each command, in the order of the help."""
FAILED = 1
REFUSALS = (*DISK_ERRORS, errno.EBADF)
"""Error numbers of system calls that never indicate a fault of the program."""
UNKNOWN_CALLS = (errno.EIO, errno.EBADF)
"""Those of them that reads have, too."""
OUTPUT = "standard output"
NO_THREAD = "can't start new thread"
"""Python's words."""
THREADS_REMEDY = "raise the limit of threads (ulimit -u, or the container's pids.max)"
NO_TEMPORARY_FOLDER = "No usable temporary directory found"
"""Python's words."""

EXAMPLES = """\
examples:
  zinc-rt run "Why is the sky blue?"    fetches the default model if needed
  git diff | zinc-rt run "Write a commit message:"
  zinc-rt chat --model ./model.gguf     a conversation with a model file
  zinc-rt serve                         chat page and API on port 8080
  zinc-rt check                         is this machine ready, and if not, why
  zinc-rt devices                       what each tier runs on, or lacks here
  zinc-rt ps                            your servers: their models, tiers, load
  zinc-rt help serve                    the help of a command
  zinc-rt help memory                   all commands and options about a word
"""
MODELS = """\
models (GGUF, also split files):
  architectures    llama, mistral3, smollm3, granite, glm4, phi3, olmo2, qwen2,
                   qwen3, qwen3moe, qwen35, qwen35moe, qwen3next, lfm2,
                   lfm2moe, granitehybrid, gemma3, gemma4, gpt-oss,
                   command-r, cohere2, glm4moe, granitemoe, ernie4_5,
                   exaone4, seed_oss, minimax-m2, qwen2moe, olmoe,
                   nemotron_h, nemotron_h_moe, gemma, gemma2,
                   hunyuan-dense, hunyuan-moe, dots1, internlm2, minicpm,
                   deepseek2, falcon-h1, qwen2vl, qwen3vl, qwen3vlmoe,
                   bailingmoe2, exaone-moe, afmoe, llama4, apertus,
                   ernie4_5-moe, starcoder2, stablelm, phi2, gptneox, exaone,
                   chatglm, arcee, baichuan, falcon, nemotron, olmo, mamba2,
                   deepseek, bailingmoe, gemma3n, gpt2, starcoder, mistral4,
                   hy_v3, mellum, smallthinker, kimi-linear, qwen, xverse,
                   pangu-embedded, orion, codeshell, jais2, maincoder
  weights          f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k,
                   q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4
  keys and values  f16, f32, i12, i3r, i4r, q8_0 (--kv-dtype)
"""


def entry() -> int:
    """Run the command line of this process; returns the exit code.

    Text that the terminal cannot show is escaped instead of failing."""
    open_closed_streams()
    name_output()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    prepare_process()
    code = main()
    try:
        sys.stdout.flush()
    except OSError:
        # Data still buffered for an output that fails would raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finish_process()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code and prints at most one line of error."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or bool(os.environ.get(DEBUG_ENV))
    silence(False)
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
        if is_interrupt(error):
            return INTERRUPTED
        missing = missing_module(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            return _report(missing, ConfigError.exit_code, debug)
        hint = "" if debug else "; run again with --debug for a traceback"
        problem = machine_problem(error, words[:1] == ["serve"], hint)
        if problem is None:
            problem = f"unexpected {type(error).__name__}: {error}{hint}"
        return _report(problem, FAILED, debug)


def build_parser(words: Iterable[str] = COMMANDS) -> Parser:
    """The parser of the command line, with the commands ``words`` and others of their modules."""
    parser = Parser(
        prog="zinc-rt",
        description="Run GGUF language models with the same bits on every device.",
        epilog=EXAMPLES,
        appendix=f"{MODELS}\n{EXIT_CODES}",
    )
    parser.add_argument("-V", "-v", "--version", action=_Version, help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name in dict.fromkeys(COMMANDS[word] for word in words):
        import_module(f"harness.cli.{name}").add_parser(subparsers)
    _add_help(subparsers, parser)
    inherit_examples(parser)
    for leaf in (parser, *commands(parser)):
        add_common_flags(leaf)
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
    text = "show the help of a command, or search all help for a word"
    parser = subparsers.add_parser("help", help=text, description=text)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="a command, a flag, a setting or any word"
    )

    def show(args: argparse.Namespace) -> int:
        named, used = named_parser(root, args.words)
        if used == len(args.words):
            named.print_help()
            return 0
        word = " ".join(args.words)
        found = [*advice_about(word), *search(root, word)]
        if not found:
            raise ConfigError(f"no command or flag mentions {word!r}; see zinc-rt --help")
        print("\n".join(found))
        return 0

    parser.set_defaults(func=show)


def _run(words: list[str]) -> int:
    words = translated(words)
    if words[:1] == ["help"] and words[1:2] and words[1] in TOOLS:
        words = [words[1], "--help"]
    try:
        code = run_named_tool(words)
        if code is not None:
            return code
        args = _parse(words)
    except SystemExit as finished:
        return int(finished.code or 0)
    if not hasattr(args, "func"):
        build_parser().print_help()
        return 0
    silence(getattr(args, "silent", False))
    for line in misspelt_variables(os.environ):
        note(line)
    result: int = args.func(args)
    return result


def _parse(words: list[str]) -> argparse.Namespace:
    """Parse a command line; only the module of its command is imported. Raises ConfigError."""
    if words[:1] == ["help"] and words[1:2] not in (["-h"], ["--help"], ["--help-all"]):
        words = ["help", "--", *words[1:]]
    named = bool(words) and words[0] in COMMANDS
    parser = build_parser(words[:1]) if named else build_parser()
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in (*COMMANDS, "help"):
        refuse_command(words, parser, tuple(COMMANDS))
    command, _ = named_parser(parser, words)
    words = own_spelling(command, words)
    refuse_foreign_flags(command, words, build_parser)
    args, rest = parser.parse_known_args(words)
    rest = take_model(command, args, rest)
    if rest:
        refuse_arguments(command, rest, build_parser(), getattr(args, "prompt", None))
    return args


def machine_problem(error: Exception, serves: bool, hint: str) -> str | None:
    """A one-line message for memory, a thread, a file or a folder that the system refuses and for
    an output that cannot be written; it ends with ``hint`` where the system does not say what it
    refused. None for any other error, which is a fault of the program."""
    name = getattr(error, "filename", None)
    if isinstance(name, int):
        name = None  # The number of an open file, which says nothing to a user.
    if isinstance(error, MemoryError):
        why = f" ({error})" if str(error) else ""
        return f"out of memory{why}; end other programs, or raise this process's limit (ulimit -v)"
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        fewer = ", or lower --queue-depth" if serves else ""
        return f"{error}; {THREADS_REMEDY}{fewer}"
    if isinstance(error, FileNotFoundError) and NO_TEMPORARY_FOLDER in str(error):
        return f"{error.strerror}; free some disk space, or set TMPDIR to another folder"
    if isinstance(error, FileNotFoundError) and name is None and _nowhere():
        return "the current folder is not there any more; change to another one (cd)"
    if isinstance(error, PermissionError) and name is not None:
        return f"{name}: {error.strerror}; change its permissions, or name another one"
    if not isinstance(error, OSError) or error.errno not in REFUSALS:
        return None
    if name is None:
        return f"{error.strerror}{hint}"
    wrote = name == OUTPUT or error.errno not in UNKNOWN_CALLS
    return f"{name}: {'cannot write: ' if wrote else ''}{error.strerror}"


def _nowhere() -> bool:
    """Whether the current folder was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def name_output() -> None:
    """From now on an error of standard output names it, as one of a file names the file, and all is
    written or it is an error: without a buffer (``python -u``) Python takes no notice of a rest."""
    raw: Any = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
    write = raw.write

    def write_all(data: Any) -> int | None:
        left = memoryview(data).cast("B")
        try:
            while left and (count := write(left)) is not None:
                left = left[count:]
        except OSError as error:
            error.filename = OUTPUT
            raise
        return memoryview(data).nbytes - len(left) or (None if left else 0)

    raw.write = write_all


def open_closed_streams() -> None:
    """Open /dev/null for every standard stream that is closed, so that no other file gets its
    number. Writing to a closed standard output stays an error."""
    for number, name, mode, flags in (
        (0, "stdin", "r", os.O_RDONLY),
        (1, "stdout", "w", os.O_RDONLY),
        (2, "stderr", "w", os.O_WRONLY),
    ):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _report(problem: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    complain(f"error: {problem}")
    return code
