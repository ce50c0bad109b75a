"""``python -m harness.synth``: write a random-weight model file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from contract.errors import ZincError
from harness.progress import progress_on
from harness.synth import ARCHITECTURES, QUANTS, size_names, sized_spec, write_synthetic
from harness.synth.spec import GROUPS, ROPE_SCALINGS, SynthSpec

PROG = "python -m harness.synth"


def _widths(text: str) -> int | tuple[int, ...]:
    widths = tuple(int(part) for part in text.split(","))
    return widths if len(widths) > 1 else widths[0]


def build_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """The parser of the flags; a flag that is not given leaves the named size's value."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write a GGUF model with random weights; the same flags give the same bytes.",
        argument_default=argparse.SUPPRESS,
    )
    sizes = dict.fromkeys(name for arch in ARCHITECTURES for name in size_names(arch))
    parser.add_argument("--size", choices=(*sizes, "custom"), default="tiny")
    parser.add_argument("--out", required=True, metavar="FILE", help="the GGUF file to write")
    parser.add_argument(
        "--tokenizer-from",
        metavar="FILE",
        default=None,
        help="GGUF file whose tokenizer is copied (default: a small byte-level one)",
    )
    parser.add_argument(
        "--sparse",
        action="store_true",
        default=False,
        help="leave the tensors' data a hole in the file: it takes no disk and reads as zeros",
    )
    _add_fields(parser, SynthSpec, "", "")
    for name, kind in GROUPS.items():
        group = parser.add_argument_group(name, (kind.__doc__ or "").partition("\n")[0])
        _add_fields(group, kind, f"{name}-", f"{name}.")
    return parser


SPECIAL: Mapping[str, dict[str, Any]] = {
    "architecture": {"choices": ARCHITECTURES, "required": True},
    "quant": {"choices": QUANTS},
    "rope_scaling": {"choices": ROPE_SCALINGS},
    "feed_forward": {"type": _widths, "metavar": "N[,N...]", "help": "one width, or one per layer"},
    "expand_to_f32": {
        "action": "store_true",
        "help": "write the same weights dequantized to F32",
    },
}
"""Options of flags that the type of their field does not determine."""


def _add_fields(parser: argparse._ActionsContainer, kind: type, flags: str, names: str) -> None:
    """Add a flag for every field: ``--layers N``, ``--experts-count N`` and so on."""
    types = get_type_hints(kind)
    for field in fields(kind):
        if field.name in GROUPS:
            continue
        (value_type, *_) = get_args(types[field.name]) or (types[field.name],)
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if value_type is not bool:
            how = {"type": value_type, "metavar": "TEXT" if value_type is str else "N"}
        short = "arch" if field.name == "architecture" else field.name.replace("_", "-")
        how = SPECIAL.get(field.name, how)
        parser.add_argument(f"--{flags}{short}", dest=f"{names}{field.name}", **how)


def _grouped(flags: dict[str, Any]) -> dict[str, Any]:
    """Collect the flags of a group's fields under the name of the group."""
    values: dict[str, Any] = {}
    for name, value in flags.items():
        group, dot, field = name.partition(".")
        if dot:
            values.setdefault(group, {})[field] = value
        else:
            values[name] = value
    return values


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Write the file; returns 0, or 2 with one line on standard error."""
    values = _grouped(vars(build_parser(prog).parse_args(argv)))
    out, tokenizer, size = values.pop("out"), values.pop("tokenizer_from"), values.pop("size")
    sparse = values.pop("sparse")
    try:
        spec = sized_spec("tiny" if size == "custom" else size, **values)
        write_synthetic(out, spec, tokenizer_from=tokenizer, sparse=sparse, progress=progress_on())
    except ZincError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
