"""The name of a model as an argument, as users of other programs write it: ``run MODEL PROMPT``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from contract.errors import ConfigError
from harness.cli.parser import flags_of
from harness.cli.suggestions import names_model


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add an argument that means the same as ``--model``."""
    parser.add_argument(
        "named_model", nargs="?", metavar="MODEL", help="the model, the same as --model"
    )


def take_model(
    parser: argparse.ArgumentParser, args: argparse.Namespace, rest: Sequence[str]
) -> list[str]:
    """Set ``args.model`` from the arguments, where one of them names it; what is left of ``rest``.

    ``run`` has its own rule: the first of two words, or a single one, is a model if it looks like
    the name of one. Raises ConfigError for a model that is named twice."""
    unknown_flag = any(word.startswith("-") for word in rest)
    if getattr(args, "named_model", None) is not None:
        # What follows an unknown flag is taken for a model, and is the value of that flag.
        if args.model is not None and not unknown_flag:
            raise ConfigError(
                f"the model is named twice, {args.named_model!r} and --model {args.model!r}; "
                f"leave one of them out; see {parser.prog} --help"
            )
        args.model = args.model or args.named_model
    words = [word for word in (getattr(args, "prompt", None), *rest) if word is not None]
    if "--chat" not in flags_of(parser) or args.model is not None or len(words) not in (1, 2):
        return list(rest)
    if not names_model(words[0]) or unknown_flag:
        return list(rest)
    args.model, args.prompt = words[0], words[1] if len(words) == 2 else None
    args.names_only_model = args.prompt is None
    return []
