"""``zinc-rt logits``: prints a model's logits for every position of a text, exact to the bit."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, BinaryIO

from contract.cached_files import writing
from contract.errors import ConfigError, NonFiniteLogits, RequestError, system_errors_as
from harness.cli.outputs import check_output
from harness.cli.parser import add_count, add_file, add_json_flag, add_switch
from harness.cli.sessions import ENGINE_SETTINGS, MODEL_SETTINGS, open_session
from harness.console import printable, table
from harness.settings import add_flags, group_of, resolve

if TYPE_CHECKING:
    from pathlib import Path

    from contract.arrays import Floats
    from harness.host.session import Session

NAMES = (*MODEL_SETTINGS, "lora", *ENGINE_SETTINGS)
MAX_TOP = 1000
MAX_ID_DIGITS = 10
EXAMPLES = """\
examples:
  zinc-rt logits --prompt "The capital of France is"
  zinc-rt logits --tokens 1,2,3 --json
  zinc-rt logits --prompt "Hello" --chunk 1    the same digest as any --chunk
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``logits`` command; its parser sets ``func(args) -> exit code``."""
    text = "compute the logits of a text: their digest, and the likeliest tokens"
    parser = subparsers.add_parser("logits", help=text, description=text, epilog=EXAMPLES)
    given = group_of(parser, "input").add_mutually_exclusive_group(required=True)
    given.add_argument("--tokens", metavar="ID[,ID]", help="token ids")
    given.add_argument("-p", "--prompt", metavar="TEXT", help="text, without a chat template")
    group = group_of(parser, "output")
    add_file(group, "--out", help="write float32 [positions, vocab] as .npy")
    add_count(group, "--top", 5, "number of likeliest tokens to show")
    add_switch(group, "--every", help="show every position, not only the last")
    add_json_flag(parser)
    add_flags(parser, NAMES)
    parser.set_defaults(func=logits)


def logits(args: argparse.Namespace) -> int:
    """Print the digest and the most likely tokens; the digest depends only on model and tokens."""
    settings = resolve(args, NAMES)
    if not 0 <= args.top <= MAX_TOP:
        raise ConfigError(f"flag --top: {args.top} is not from 0 to {MAX_TOP}")
    ids = None if args.tokens is None else token_ids(args.tokens)
    if args.out is not None:
        check_output("--out", args.out)
    with open_session(settings, all_logits=True) as session:
        check_ids(session, ids or ())
        tokens = session.model.tokenizer.encode(args.prompt) if ids is None else ids
        document = _stored(session, tokens, args.out, args.top)
        if args.json:
            print(json.dumps(document))
        else:
            print(_text(session, document, args.every))
    return 0


def token_ids(text: str, flag: str = "--tokens") -> list[int]:
    """The token ids in ``text``, the value of ``flag``: numbers separated by commas. Raises
    ConfigError."""
    words = text.split(",")
    for word in words:
        digits = word.strip()
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > MAX_ID_DIGITS:
            raise ConfigError(f"flag {flag}: {word!r} is not a token id; give numbers like 1,2,3")
    return [int(word) for word in words]


def check_ids(session: Session, ids: Iterable[int], flag: str = "--tokens") -> None:
    """Raises ConfigError where the value of ``flag`` has an id that the model lacks."""
    vocab = session.model.config.vocab
    for one in ids:
        if one >= vocab:
            raise ConfigError(f"flag {flag}: {one} is outside 0 to {vocab - 1}")


def _stored(session: Session, tokens: list[int], out: Path | None, top: int) -> dict[str, Any]:
    """The document of the logits of every position, which the file ``out`` gets if given."""
    import numpy as np

    shape = (len(tokens), session.model.config.vocab)
    if not tokens:
        raise RequestError("prompt", "is empty; give at least one token")
    if len(tokens) > session.context:
        raise RequestError(
            "prompt", f"is {len(tokens)} tokens, the context is {session.context}; raise --context"
        )
    if out is None:
        try:
            values = np.empty(shape, np.float32)
        except MemoryError:
            raise RequestError(
                "prompt", f"needs {shape[0] * shape[1] * 4:,} bytes of memory; use --out FILE"
            ) from None
        return _document(session, tokens, values, top)
    with system_errors_as(f"flag --out: {out}: cannot write"), writing(out) as file:
        return _document(session, tokens, _mapped(file, shape), top)


def _mapped(file: BinaryIO, shape: tuple[int, int]) -> Floats:
    """A mapping of an empty .npy file. Raises OSError where the disk has no room for it: later, the
    system would end the process."""
    import numpy as np

    header = np.lib.format.header_data_from_array_1_0(np.empty((0, shape[1]), np.float32))
    np.lib.format.write_array_header_1_0(file, header | {"shape": shape})
    start = file.tell()
    nbytes = start + shape[0] * shape[1] * 4
    file.truncate(nbytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return np.memmap(file, np.float32, "r+", start, shape)


def _document(session: Session, tokens: list[int], values: Floats, top: int) -> dict[str, Any]:
    """Compute the logits into ``values``, and describe them."""
    import numpy as np

    from harness.digest import logits_digest
    from harness.progress import progress_on

    session.logits(tokens, values, progress_on(transient=True))
    broken = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(broken):
        raise NonFiniteLogits(f"the logits at position {broken[0]} hold NaN or infinity")
    config, info = session.model.config, session.tier.info
    return {
        "model": {"name": config.name, "path": str(session.model.file.path)},
        "tier": info.name,
        "device": info.device,
        "arithmetic": info.arithmetic,
        "kv_dtype": session.runner.limits.kv_dtype.name,
        "tokens": tokens,
        "shape": list(values.shape),
        "digest": logits_digest(values),
        "positions": [
            {"position": position, "token": tokens[position], "top": _top(row, top)}
            for position, row in enumerate(values)
        ],
    }


def _top(row: Floats, count: int) -> list[dict[str, Any]]:
    """The largest logits with their bits; equal ones by rising id."""
    import numpy as np

    order = np.argsort(-row, kind="stable")[:count]
    bits = row.view(np.uint32)
    return [
        {"token": int(token), "logit": float(row[token]), "bits": f"{int(bits[token]):08x}"}
        for token in order
    ]


def _text(session: Session, document: dict[str, Any], every: bool) -> str:
    tokenizer = session.model.tokenizer
    positions, width = document["shape"]
    lines = [
        f"digest {document['digest']}",
        f"{positions} positions x {width} logits, {document['tier']}, {document['arithmetic']}, "
        f"KV {document['kv_dtype']}",
    ]
    for entry in document["positions"] if every else document["positions"][-1:]:
        text = printable(repr(tokenizer.token_text(entry["token"])))
        lines.append(f"after position {entry['position']}, {text} ({entry['token']}):")
        rows = [
            (
                f"  {found['logit']:.6f}",
                found["bits"],
                str(found["token"]),
                printable(repr(tokenizer.token_text(found["token"]))),
            )
            for found in entry["top"]
        ]
        if rows:
            lines.append(table(rows, right=(0, 2)))
    return "\n".join(lines)
