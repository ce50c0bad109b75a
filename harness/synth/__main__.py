"""``python -m harness.synth``: write a random-weight model file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from contract.errors import ZincError
from harness.cli.progress import progress_on
from harness.synth import ARCHITECTURES, QUANTS, SIZES, sized_spec, write_synthetic
from harness.synth.spec import ROPE_SCALINGS

INTEGERS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "context")


def _widths(text: str) -> int | tuple[int, ...]:
    widths = tuple(int(part) for part in text.split(","))
    return widths if len(widths) > 1 else widths[0]


def build_parser() -> argparse.ArgumentParser:
    """The flags; a flag that is not given leaves the size's value."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.synth",
        description="Write a GGUF model with random weights; the same flags give the same bytes.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--arch", dest="architecture", choices=ARCHITECTURES, required=True)
    parser.add_argument("--size", choices=(*SIZES, "custom"), default="tiny")
    parser.add_argument("--quant", choices=QUANTS)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", required=True, metavar="FILE", help="the GGUF file to write")
    parser.add_argument(
        "--tokenizer-from",
        metavar="FILE",
        default=None,
        help="GGUF file whose tokenizer is copied (default: a small byte-level one)",
    )
    for name in INTEGERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    parser.add_argument(
        "--feed-forward", type=_widths, metavar="N[,N...]", help="one width, or one per layer"
    )
    for name in ("tied", "qkv_bias", "attention_output_bias", "fused_qkv", "rope_freqs"):
        parser.add_argument(f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction)
    parser.add_argument("--rope-base", type=float, metavar="X")
    parser.add_argument("--rope-scaling", choices=ROPE_SCALINGS)
    parser.add_argument("--rope-factor", type=float, metavar="X")
    parser.add_argument("--rope-original-context", type=int, metavar="N")
    parser.add_argument(
        "--expand-to-f32", action="store_true", help="write the same weights dequantized to F32"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; 0, or 2 with one line on standard error."""
    fields: dict[str, Any] = vars(build_parser().parse_args(argv))
    out, tokenizer, size = fields.pop("out"), fields.pop("tokenizer_from"), fields.pop("size")
    try:
        spec = sized_spec("tiny" if size == "custom" else size, **fields)
        write_synthetic(out, spec, tokenizer_from=tokenizer, progress=progress_on())
    except ZincError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
