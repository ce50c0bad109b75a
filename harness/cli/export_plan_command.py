"""``zinc-rt export-plan``: writes what a C program needs to run a model without Python."""

from __future__ import annotations

import argparse
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError
from harness.cli.outputs import check_own
from harness.cli.parser import add_switch, path_argument
from harness.cli.sessions import MODEL_SETTINGS, model_file
from harness.console import note
from harness.settings import Settings, add_flags, group_of, resolve

if TYPE_CHECKING:
    from accel.native.plan_export import PlanFacts
    from harness.host.options import SessionOptions
    from reference.runner import ModelRunner

NAMES = (
    *MODEL_SETTINGS,
    *("threads", "context", "slots", "kv_dtype", "chunk", "memory_budget", "repeat_last_n"),
)
EXAMPLES = """\
examples:
  zinc-rt export-plan model.plan
  zinc-rt export-plan model.plan --model model.gguf --context 4096 --slots 4
  zinc-rt export-plan model.plan --all-logits    for the logits of whole prompts
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``export-plan`` command; its parser sets ``func(args) -> exit code``."""
    text = "write a plan that a C program runs on the processor without Python"
    parser = subparsers.add_parser("export-plan", help=text, description=text, epilog=EXAMPLES)
    parser.add_argument(
        "plan", type=path_argument, metavar="FILE", help="the plan; its weights become FILE.weights"
    )
    add_switch(
        group_of(parser, "memory"),
        "--all-logits",
        help="make room for the logits of every prompt token of a step",
    )
    add_flags(parser, NAMES)
    parser.set_defaults(func=export_plan_command)


def export_plan_command(args: argparse.Namespace) -> int:
    """Write the plan, its weights, and print how to compile a program that opens it."""
    settings = resolve(args, NAMES)
    path = args.plan
    from accel.native.plan_file import PLAN_MAGIC, WEIGHTS_MAGIC, WEIGHTS_SUFFIX

    try:
        check_own("FILE", path, PLAN_MAGIC)
        check_own("its weights", path.with_name(path.name + WEIGHTS_SUFFIX), WEIGHTS_MAGIC)
    except ConfigError as error:
        raise ConfigError(f"{error}; a model is named with --model") from None
    from accel.native.c_library import INCLUDE, find_c_library
    from harness.tiers import kernel_cache

    library = find_c_library(kernel_cache("native"), note)
    weights = export(model_file(settings), _options(settings, args.all_logits), path)
    for what, file in (("plan", path), ("weights", weights)):
        print(f"{what:<8} {file} {file.stat().st_size:,} bytes")
    print(f"{'library':<8} {library}")
    compiler = "cc" if shutil.which("cc") else "python -m ziglang cc"
    print(f"{'compile':<8} {compiler} decode.c {library} -I {INCLUDE} -pthread -o decode")
    return 0


def export(model: Path, options: SessionOptions, path: Path) -> Path:
    """Load the model file and write its plan; returns the path of the weights."""
    from accel.native.plan_export import export_plan
    from accel.native.tier import NativeTier
    from harness.host.open import load_model
    from harness.progress import progress_on

    progress = progress_on(transient=True)
    with ExitStack() as owned:
        loaded = load_model(model, options, owned, progress)
        prepared, runner = loaded.prepared, loaded.runner
        assert isinstance(prepared.tier, NativeTier)
        weights = sum(tensor.nbytes for tensor in prepared.model.file.tensors.values())
        progress.start("writing", weights, "B")
        try:
            return export_plan(
                prepared.tier, runner.executable, plan_facts(runner), path, progress.advance
            )
        finally:
            progress.close()


def plan_facts(runner: ModelRunner) -> PlanFacts:
    """The plan's facts about a loaded model."""
    from accel.native.plan_export import PlanFacts
    from reference.memory.recurrent import recurrent_buffers
    from reference.runner import LOGITS, RING

    limits = runner.limits
    return PlanFacts(
        model=runner.model.config.name,
        kv_dtype=limits.kv_dtype.name,
        limits={
            "slots": limits.slots,
            "context": limits.context,
            "pages": limits.pages,
            "slot_pages": limits.slot_pages,
            "recent": limits.recent_tokens,
            "ring_events": limits.ring_events,
            "vocab": runner.model.config.vocab,
            "recurrent": bool(recurrent_buffers(runner.graph)),
        },
        largest=limits.largest,
        ring=RING,
        logits=LOGITS,
    )


def _options(settings: Settings, all_logits: bool) -> SessionOptions:
    from harness.host.options import SessionOptions
    from harness.tiers import TierOptions

    return SessionOptions(
        tier="native",
        tier_options=TierOptions(threads=settings["threads"], note=note),
        context=settings["context"],
        kv_dtype=settings["kv_dtype"],
        chunk=settings["chunk"],
        repeat_last_n=settings["repeat_last_n"],
        memory_budget=settings["memory_budget"],
        all_logits=all_logits,
        slots=settings["slots"] or 1,
    )
