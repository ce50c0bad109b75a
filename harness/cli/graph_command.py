"""``zinc-rt graph``: the forward pass of a model with the cost of every operation."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from harness.cli.serving import MODEL_SETTINGS, model_file
from harness.settings import add_flags, resolve

NAMES = (*MODEL_SETTINGS, "context", "kv_dtype")
DRAWING_SECONDS = 120
"""Longest wait for Graphviz; graphs of hundreds of layers take it minutes."""
EXAMPLES = """\
examples:
  zinc-rt graph | jq .op_mix               where the bytes and FLOPs of a decode token go
  zinc-rt graph --tokens 256 --out prefill.json
  zinc-rt graph --format svg --out model.svg
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``graph`` command; its parser sets ``func(args) -> exit code``."""
    text = "write the graph of a model's forward pass, with the cost of every node"
    parser = subparsers.add_parser("graph", help=text, description=text, epilog=EXAMPLES)
    parser.add_argument("--format", choices=("json", "dot", "svg"), default="json")
    parser.add_argument("--out", metavar="FILE", help="file to write [default: standard output]")
    parser.add_argument(
        "--tokens", type=int, default=1, metavar="N", help="query tokens of the step [default: 1]"
    )
    add_flags(parser, NAMES)
    parser.set_defaults(func=graph)


def graph(args: argparse.Namespace) -> int:
    """Write the graph; every query token attends the whole ``--context``."""
    settings = resolve(args, NAMES)
    if not 1 <= args.tokens < 1 << 20:
        raise ConfigError(f"flag --tokens: {args.tokens} is not from 1 to {(1 << 20) - 1}")
    if args.format == "svg" and shutil.which("dot") is None:
        raise ConfigError(
            "--format svg needs the program dot: apt install graphviz, or take --format dot"
        )
    path = model_file(settings, pull_missing=False)
    from contract.dtypes import BY_NAME
    from contract.ir.export import to_dot, to_json
    from contract.shape_key import ShapeKey
    from harness.memory import longest_context
    from reference.memory.pages import pages_for
    from reference.model.families.tensors import Limits
    from reference.model.open import open_model

    model = open_model(path)
    with model.file:
        context = longest_context(model, settings["context"])
        ir = model.graph(
            Limits(
                slots=1,
                context=context,
                pages=pages_for(context),
                kv_dtype=BY_NAME[settings["kv_dtype"]],
            )
        )
    export = to_json if args.format == "json" else to_dot
    text = export(ir, ShapeKey(args.tokens, 1), context)
    _write(_drawn(text) if args.format == "svg" else text, args.out)
    return 0


def _drawn(dot: str) -> str:
    try:
        done = subprocess.run(
            ["dot", "-Tsvg"],
            input=dot,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=DRAWING_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"dot did not finish in {DRAWING_SECONDS} s; take --format dot") from None
    if done.returncode:
        raise ConfigError(f"dot failed: {done.stderr.strip()}; take --format dot")
    return done.stdout


def _write(text: str, out: str | None) -> None:
    if out is None:
        sys.stdout.write(text)
        return
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"flag --out: {out}: cannot write: {error.strerror}") from None
