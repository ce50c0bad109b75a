"""``python -m harness.synth``: write a random-weight model file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.cli.outputs import check_synthetic
from harness.cli.parser import Parser, path_argument
from harness.cli.tool import run_tool
from harness.progress import progress_on
from harness.settings import group_of
from harness.synth.architectures import ARCHITECTURES
from harness.synth.dflash import write_dflash_head
from harness.synth.eagle import write_eagle_head
from harness.synth.flags import add_fields
from harness.synth.sizes import size_names, sized_spec
from harness.synth.spec import SynthSpec
from harness.synth.write import write_synthetic

EVERY_COMMAND = ("debug", "silent")
"""Flags that are no fields."""
HEADS: dict[str, tuple[str, Callable[[Path, SynthSpec], None]]] = {
    "eagle_out": ("an EAGLE-3 head", write_eagle_head),
    "dflash_out": ("a DFlash head", write_dflash_head),
}
"""Fields of the paths of heads: what is written there, and by what."""
PROG = "python -m harness.synth"
EXAMPLES = """\
examples:
  zinc-rt synth --arch qwen3 --out tiny.gguf
  zinc-rt synth --arch qwen3 --size 0.6b --quant q4_k_m --out q.gguf
  zinc-rt synth --arch llama --size custom --layers 4 --hidden 512 --out l.gguf
"""


def build_parser(prog: str = PROG) -> Parser:
    """The parser of the flags; a flag that is not given leaves the named size's value."""
    parser = Parser(
        prog=prog,
        description="Write a GGUF model with random weights; the same flags give the same bytes.",
        epilog=EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    parser.rare |= {"tokenizer_from", "sparse", *HEADS}
    group = group_of(parser, "model")
    sizes = (*dict.fromkeys(name for arch in ARCHITECTURES for name in size_names(arch)), "custom")
    group.add_argument(
        "--size",
        choices=sizes,
        default="tiny",
        metavar="NAME",
        help=f"sizes of the model: one of {', '.join(sizes)}; other flags change them "
        "[default: tiny]",
    )
    add_fields(parser)
    group.add_argument(
        "--tokenizer-from",
        metavar="FILE",
        default=None,
        help="GGUF file whose tokenizer is copied [default: a small one of bytes]",
    )
    output = group_of(parser, "output")
    output.add_argument(
        "--out", required=True, type=path_argument, metavar="FILE", help="the GGUF file to write"
    )
    for name, (kind, _) in HEADS.items():
        output.add_argument(
            _flag(name),
            type=path_argument,
            default=None,
            metavar="FILE",
            help=f"also write {kind} for the model",
        )
    output.add_argument(
        "--sparse",
        action="store_true",
        default=False,
        help="write no weights: their part of the file takes no disk and reads as zeros",
    )
    return parser


def _grouped(flags: dict[str, Any]) -> dict[str, Any]:
    """Collect the flags of a group's fields under the name of the group."""
    values: dict[str, Any] = {}
    for name, value in flags.items():
        if name in EVERY_COMMAND:
            continue
        group, dot, field = name.partition(".")
        if dot:
            values.setdefault(group, {})[field] = value
        else:
            values[name] = value
    return values


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Write the file; returns 0, or 2 with one line on standard error."""
    return run_tool(build_parser(prog), _write, argv)


def _write(args: argparse.Namespace) -> int:
    values = _grouped(vars(args))
    out, tokenizer, size = values.pop("out"), values.pop("tokenizer_from"), values.pop("size")
    sparse, heads = values.pop("sparse"), {name: values.pop(name) for name in HEADS}
    read = [out, None if tokenizer is None else Path(tokenizer)]
    check_synthetic("--out", out, read[1])
    for name, path in heads.items():
        if path is not None:
            check_synthetic(_flag(name), path, *read)
            read.append(path)
    spec = sized_spec("tiny" if size == "custom" else size, **values)
    write_synthetic(out, spec, tokenizer_from=tokenizer, sparse=sparse, progress=progress_on())
    for name, path in heads.items():
        if path is not None:
            HEADS[name][1](path, spec)
    return 0


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    sys.exit(main())
