"""The command line of a tool, which ``zinc-rt NAME`` and ``python -m harness.NAME`` share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from contract.errors import ZincError
from harness.cli.foreign_flags import own_spelling, refuse_foreign_flags
from harness.cli.parser import DEBUG_ENV, Parser, add_common_flags
from harness.cli.suggestions import refuse_arguments
from harness.console import complain, silence
from harness.interrupts import BROKEN_PIPE, INTERRUPTED


def run_tool(
    parser: Parser, run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """Parse the words and call ``run``; returns the exit code. An error is one line. Who reads no
    further ends it without one."""
    words = list(sys.argv[1:] if argv is None else argv)
    add_common_flags(parser)
    try:
        words = own_spelling(parser, words)
        refuse_foreign_flags(parser, words, lambda: parser)
        args, rest = parser.parse_known_args(words)
        if rest:
            refuse_arguments(parser, rest, parser)
        silence(getattr(args, "silent", False))
        code = run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Data still buffered would raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except ZincError as error:
        if "--debug" in words or os.environ.get(DEBUG_ENV):
            import traceback

            traceback.print_exc()
        complain(f"error: {error}")
        return error.exit_code
