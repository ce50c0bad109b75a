"""``zinc-rt tokenize``: prints the tokens of a text."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from typing import Any

from harness.cli.parser import add_json_flag, add_switch, add_text_source
from harness.cli.score_command import text_of
from harness.cli.sessions import MODEL_SETTINGS, model_file
from harness.console import printable, table
from harness.settings import add_flags, group_of, resolve

EXAMPLES = """\
examples:
  zinc-rt tokenize --prompt "Why is the sky blue?"
  zinc-rt tokenize essay.txt --json | jq .count
  zinc-rt tokenize --prompt "<|im_end|>" --special
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``tokenize`` command; its parser sets ``func(args) -> exit code``."""
    text = "show the token ids of a text and the text of each token"
    parser = subparsers.add_parser("tokenize", help=text, description=text, epilog=EXAMPLES)
    add_text_source(parser)
    add_switch(
        group_of(parser, "input"),
        "--special",
        help="read the text of a control token, such as <|im_end|>, as that token, as the server's "
        "/tokenize does; without it the text is what run and score make of a prompt",
    )
    add_json_flag(parser)
    add_flags(parser, MODEL_SETTINGS)
    parser.set_defaults(func=tokenize)


def tokenize(args: argparse.Namespace) -> int:
    """Print the tokens; of the model file only the vocabulary is read."""
    settings = resolve(args, MODEL_SETTINGS)
    text = text_of(args)
    from harness.host.token_pieces import token_pieces
    from reference.model.open import open_model

    with closing(open_model(model_file(settings))) as model:
        pieces = token_pieces(
            model.tokenizer, model.tokenizer.encode(text, parse_special=args.special)
        )
    if args.json:
        print(json.dumps({"tokens": pieces, "count": len(pieces)}))
        return 0
    rows = [(str(one["id"]), printable(repr(one["piece"]))) for one in pieces]
    if rows:
        print(table(rows, right=(0,)))
    print(f"{len(pieces)} tokens")
    return 0
