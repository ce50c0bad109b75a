"""``zinc-rt graph``: prints the graphs of models, with the cost of every operation."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.cached_files import writing
from contract.errors import ConfigError, system_errors_as
from harness.cli.outputs import check_output
from harness.cli.parser import add_count, add_file
from harness.cli.sessions import MODEL_SETTINGS, model_file
from harness.settings import Settings, add_flags, group_of, resolve

if TYPE_CHECKING:
    from contract.ir.nodes import Graph
    from harness.report.render import Assumptions

NAMES = (*MODEL_SETTINGS, "context", "kv_dtype")
FORMATS = ("json", "dot", "html")
MODELS_MAX = 16
"""Most models of one report."""
CONTEXT = 4096
"""The default context in positions, if every model has as many."""
BANDWIDTH = "100G"
PEAK = "1T"
"""The default bytes and FLOPs per second of an estimate, those of an everyday processor."""
RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)([kMGTP]?)")
PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
EXAMPLES = """\
examples:
  zinc-rt graph | jq '.[0].op_mix'      bytes and FLOPs of a token, by operation
  zinc-rt graph a.gguf b.gguf --format html -o compare.html
  zinc-rt graph --tokens 256 -o prefill.json
  zinc-rt graph --format dot | dot -Tsvg > model.svg
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``graph`` command; its parser sets ``func(args) -> exit code``."""
    text = "show the operations of a model's forward pass and what each costs"
    described = (
        f"{text}, for several models side by side; without --context for {CONTEXT:,} tokens, or as "
        "many as all models have"
    )
    parser = subparsers.add_parser("graph", help=text, description=described, epilog=EXAMPLES)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="GGUF file or model name [default: --model]"
    )
    group = group_of(parser, "output")
    group.add_argument(
        "--format",
        choices=FORMATS,
        default="json",
        help="json and html have every cost, dot draws the nodes for Graphviz [default: json]",
    )
    add_file(group, "-o", "--out", help="file to write [default: standard output]")
    add_count(group_of(parser, "input"), "--tokens", 1, "tokens of the step")
    for flag, default, what in (("--bandwidth", BANDWIDTH, "bytes"), ("--flops", PEAK, "FLOPs")):
        group_of(parser, "device").add_argument(
            flag,
            metavar="RATE",
            default=default,
            help=f"{what} a second of the machine for which times are estimated, such as 1.5T "
            f"or 80e9, for json and html [default: {default}]",
        )
    add_flags(parser, NAMES)
    parser.set_defaults(func=graph)


def graph(args: argparse.Namespace) -> int:
    """Write the graphs; every query token attends to the whole ``--context``."""
    settings = resolve(args, NAMES)
    if not 1 <= args.tokens < 1 << 20:
        raise ConfigError(f"flag --tokens: {args.tokens} is not from 1 to {(1 << 20) - 1}")
    rates = (_rate("--bandwidth", args.bandwidth), _rate("--flops", args.flops))
    if args.models and args.model is not None:
        raise ConfigError(f"flag --model: {args.models[0]} is given too; leave out one of them")
    paths = _paths(settings, args.models)
    if args.out is not None:
        check_output("--out", args.out)
    from contract.ir.analysis import Machine
    from contract.shape_key import ShapeKey
    from harness.report.render import Assumptions

    graphs, architectures, context = _graphs(paths, settings)
    assumptions = Assumptions(ShapeKey(args.tokens, 1), context, Machine(*rates))
    _write(_text(args.format, graphs, architectures, assumptions), args.out)
    return 0


def _rate(flag: str, text: str) -> float:
    match = RATE.fullmatch(text)
    value = float(match[1]) * PREFIXES[match[2]] if match else 0.0
    if not 1 <= value <= 1e21:
        raise ConfigError(
            f"flag {flag}: {text!r} is not accepted; expected a rate from 1 to 1e21 a second, "
            "such as 100G or 1.5e12"
        )
    return value


def _paths(settings: Settings, names: Sequence[str]) -> dict[str, Path]:
    """The files by their label in the output: their names where these differ."""
    if not names:
        path = model_file(settings, pull_missing=False)
        return {path.name: path}
    if len(names) > MODELS_MAX:
        raise ConfigError(f"{len(names)} models, at most {MODELS_MAX} fit side by side")
    found: dict[Path, Path] = {}
    for name in names:
        named = replace(settings, values_by_name={**settings, "model": name})
        path = model_file(named, pull_missing=False)
        if path.resolve() in found:
            raise ConfigError(f"{name} is the file {path.resolve()}, which is named already")
        found[path.resolve()] = path
    files = [path.name for path in found.values()]
    return {str(path) if files.count(path.name) > 1 else path.name: path for path in found.values()}


def _graphs(
    paths: Mapping[str, Path], settings: Settings
) -> tuple[dict[str, Graph], dict[str, str], int]:
    """Graphs and architectures by label, and the context, which is the same for all.

    By default the context is the longest that every model has."""
    from contextlib import ExitStack

    from contract.dtypes import BY_NAME
    from harness.memory import longest_context
    from reference.limits import Limits, pages_for
    from reference.model.open import open_model

    requested = settings["context"]
    with ExitStack() as stack:
        models = {}
        for label, path in paths.items():
            models[label] = open_model(path)
            stack.enter_context(models[label].file)
        context = min(longest_context(model, requested) for model in models.values())
        if requested is None:
            context = min(context, CONTEXT)
        kv_dtype = BY_NAME[settings["kv_dtype"]]
        limits = Limits(slots=1, context=context, pages=pages_for(context), kv_dtype=kv_dtype)
        graphs = {label: model.graph(limits) for label, model in models.items()}
        architectures = {label: model.config.architecture for label, model in models.items()}
        return graphs, architectures, context


def _text(
    form: str,
    graphs: Mapping[str, Graph],
    architectures: Mapping[str, str],
    assumptions: Assumptions,
) -> str:
    if form == "dot":
        from contract.ir.export import to_dot

        return to_dot(graphs, assumptions.key, assumptions.context)
    from harness.report.render import model_document, render_html, render_json

    documents = [
        model_document(label, architectures[label], ir, assumptions) for label, ir in graphs.items()
    ]
    return render_html(documents) if form == "html" else render_json(documents)


def _write(text: str, out: Path | None) -> None:
    if out is None:
        sys.stdout.write(text)
        return
    with system_errors_as(f"flag --out: {out}: cannot write"), writing(out) as file:
        file.write(text.encode())
