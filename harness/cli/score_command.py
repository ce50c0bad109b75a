"""``zinc-rt score``: prints how likely the tokens of a text are, exact to the bit."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError
from harness.cli.logits_command import check_ids, token_ids
from harness.cli.parser import add_count, add_json_flag, add_switch, add_text_source, whole_number
from harness.cli.sessions import ENGINE_SETTINGS, MODEL_SETTINGS, open_session
from harness.console import printable, table
from harness.settings import add_flags, group_of, resolve

if TYPE_CHECKING:
    from harness.host.collectors import ExpertChoices
    from harness.host.session import Session
    from reference.sched.scores import TokenScores

NAMES = (*MODEL_SETTINGS, "lora", *ENGINE_SETTINGS)
MAX_LISTED = 20
EXAMPLES = """\
examples:
  zinc-rt score --prompt "The sky is blue."
  zinc-rt score essay.txt --json --top 5       with the likeliest tokens
  zinc-rt score --tokens 1,2,3,4 --from 3      of the token at position 3 only
  zinc-rt score --prompt "2 + 2 =" --force-tokens 216,36   token by token
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``score`` command; its parser sets ``func(args) -> exit code``."""
    text = "compute the log-probability of every token of a text, their sum and the perplexity"
    parser = subparsers.add_parser("score", help=text, description=text, epilog=EXAMPLES)
    add_text_source(parser).add_argument("--tokens", metavar="ID[,ID]", help="token ids")
    source = group_of(parser, "input")
    source.add_argument(
        "--force-tokens",
        metavar="ID[,ID]",
        help="token ids of an answer to the text; only these get scores",
    )
    group = group_of(parser, "output")
    add_switch(
        group,
        "--experts",
        help="with --json: the experts of a mixture that every token used, layer by layer",
    )
    source.add_argument(
        "--from",
        dest="start",
        type=whole_number,
        default=1,
        metavar="N",
        help="position of the first token to score [default: 1, the second token]",
    )
    add_count(
        group,
        "--top",
        1,
        f"number of likeliest tokens to list at every position, at most {MAX_LISTED}",
    )
    add_json_flag(parser)
    add_flags(parser, NAMES)
    parser.set_defaults(func=score)


def score(args: argparse.Namespace) -> int:
    """Print the scores; they depend only on model and tokens."""
    from harness.host.collectors import ExpertChoices

    settings = resolve(args, NAMES)
    if not 1 <= args.top <= MAX_LISTED:
        raise ConfigError(f"flag --top: {args.top} is not from 1 to {MAX_LISTED}")
    if args.start < 1:
        raise ConfigError(f"flag --from: {args.start} is not 1 or more")
    text = text_of(args)
    ids = None if args.tokens is None else token_ids(args.tokens)
    forced = None if args.force_tokens is None else token_ids(args.force_tokens, "--force-tokens")
    if forced is not None and args.start != 1:
        raise ConfigError("flag --from: --force-tokens says what is scored; give one of them")
    if args.experts and not args.json:
        raise ConfigError("flag --experts: needs --json")
    with open_session(settings, scores=args.top, experts=args.experts) as session:
        check_ids(session, ids or ())
        check_ids(session, forced or (), "--force-tokens")
        tokens = session.model.tokenizer.encode(text) if ids is None else ids
        _check_length(args, tokens, forced)
        start = args.start if forced is None else len(tokens)
        scored = tokens + (forced or [])
        document = _document(
            session, scored, start, args.top, ExpertChoices() if args.experts else None
        )
        print(json.dumps(document) if args.json else _shown(session, document))
    return 0


def text_of(args: argparse.Namespace) -> str:
    """The text of a file or an argument; empty for token ids."""
    if args.file is None:
        return args.prompt or ""
    try:
        data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
        return data.decode()
    except OSError as error:
        hint = "; give a text with --prompt" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{args.file}: cannot read: {error.strerror}{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{args.file}: byte {error.start} is not UTF-8") from None


def _check_length(args: argparse.Namespace, tokens: list[int], forced: list[int] | None) -> None:
    """Raises ConfigError for a text whose tokens have no scores, or that no answer comes after."""
    file = "standard input" if args.file == "-" else args.file
    given = "flag --prompt" if file is None else file
    where = given if args.tokens is None else "flag --tokens"
    if forced is not None and not tokens:
        raise ConfigError(f"{where}: is empty; an answer comes after at least one token")
    if forced is None and len(tokens) < 2:
        count = "one token" if tokens else "empty"
        raise ConfigError(f"{where}: is {count}; give at least two, since the first has no score")


def _document(
    session: Session, tokens: list[int], start: int, top: int, experts: ExpertChoices | None
) -> dict[str, Any]:
    from reference.sched.scores import perplexity

    if start >= len(tokens):
        raise ConfigError(f"flag --from: {start} is not below the {len(tokens)} tokens of the text")
    scored: list[dict[str, Any]] = []
    for part in _scores(session, tokens, start, top, experts):
        bits = part.log_probability.view("<u4").tolist()
        logs = part.log_probability.tolist()
        listed = zip(part.top_ids.tolist(), part.top_log_probabilities.tolist(), strict=True)
        for log, word, (ids, tops) in zip(logs, bits, listed, strict=True):
            position = start + len(scored)
            token = tokens[position]
            scored.append(
                {
                    "position": position,
                    "token": token,
                    "log_probability": log,
                    "bits": f"{word:08x}",
                    "rank": ids.index(token) + 1 if token in ids else None,
                    "top": [
                        {"token": one, "log_probability": value}
                        for one, value in zip(ids, tops, strict=True)
                    ],
                }
            )
    total = math.fsum(one["log_probability"] for one in scored)
    used = {} if experts is None else {"experts": experts.of(len(tokens)).tolist()}
    return {
        "model": session.model.config.name,
        "tier": session.tier.info.name,
        "tokens": tokens,
        "scored": scored,
        "sum": total,
        "perplexity": perplexity(total, len(scored)),
        **used,
    }


def _scores(
    session: Session, tokens: list[int], start: int, top: int, experts: ExpertChoices | None
) -> list[TokenScores]:
    """The log-probabilities of the tokens from position ``start`` on. Raises RequestError, and
    NonFiniteLogits for a model that fails."""
    from contract.types import Request, SamplingParams
    from harness.host.submissions import Submission
    from harness.progress import progress_on

    found: list[TokenScores] = []
    request = Request(
        session.next_id(),
        tuple(tokens),
        max_tokens=0,
        sampling=SamplingParams(repeat_last_n=0),
        score_from=start,
        score_top=top,
        adapters=session.adapters,
    )
    read = {} if experts is None else {request.id: experts}
    submission = Submission([request], scores={request.id: found.append}, experts=read)
    session.read(submission, progress_on(transient=True))
    return found


def _shown(session: Session, document: dict[str, Any]) -> str:
    def name(token: int) -> str:
        return printable(repr(session.model.tokenizer.token_text(token)))

    rows = []
    for one in document["scored"]:
        likeliest = "" if one["rank"] == 1 else f"likeliest: {name(one['top'][0]['token'])}"
        log, token = one["log_probability"], one["token"]
        rows.append((f"{log:.4f}", one["bits"], str(token), name(token), likeliest))
    count = len(document["scored"])
    what = "1 token" if count == 1 else f"{count} tokens"
    total = f"{what}, sum {document['sum']:.4f}, perplexity {document['perplexity']:.3f}"
    return f"{table(rows, right=(0, 2))}\n{total}"
