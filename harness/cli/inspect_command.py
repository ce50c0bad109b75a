"""``zinc-rt inspect``: shows the contents of a model file and what running it needs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from contract.errors import RequestError
from harness.cli.layer_text import head_rows, layer_rows
from harness.cli.parser import add_json_flag, add_switch
from harness.cli.sessions import MODEL_SETTINGS, TIER_SETTINGS, model_file, tier_options
from harness.console import printable, table
from harness.settings import Settings, add_flags, group_of, resolve

if TYPE_CHECKING:
    from reference.model.gguf.file import GgufFile

ENGINE_NAMES = ("context", "slots", "kv_dtype", "chunk", "memory_budget", *TIER_SETTINGS)
EXAMPLES = """\
examples:
  zinc-rt inspect model.gguf
  zinc-rt inspect model.gguf --context 32K --kv-dtype f32
  zinc-rt inspect model.gguf --slots 8 --tier cpu --memory-budget 6GB
  zinc-rt inspect model.gguf --metadata tokenizer.chat_template
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``inspect`` command; its parser sets ``func(args) -> exit code``."""
    text = "show what is in a model file, whether it runs here, and what memory it takes"
    described = f"{text}; with --tier in the form that this tier stores"
    parser = subparsers.add_parser("inspect", help=text, description=described, epilog=EXAMPLES)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="GGUF file or model name [default: the model that run takes]",
    )
    add_json_flag(parser)
    group = group_of(parser, "output")
    add_switch(group, "--tensors", help="list every tensor")
    group.add_argument("--metadata", metavar="KEY", help="print this value of the file only, uncut")
    add_flags(parser, ("cache_dir", "lora", *ENGINE_NAMES))
    parser.set_defaults(func=inspect)


def inspect(args: argparse.Namespace) -> int:
    """Print the facts; returns 0 also for a model that this build cannot run."""
    settings = resolve(args, (*MODEL_SETTINGS, "lora", *ENGINE_NAMES))
    path = model_file(settings, pull_missing=False)
    from harness.cli.model_facts import file_facts, json_value, vocabulary_facts
    from reference.model.gguf.file import open_gguf

    with open_gguf(path) as file:
        if args.metadata is not None:
            if args.metadata not in file.metadata:
                raise RequestError("metadata", f"{path} has no key {args.metadata!r}")
            value = json_value(file.metadata[args.metadata])
            print(value if isinstance(value, str) and not args.json else json.dumps(value))
            return 0
        facts = file_facts(file)
        facts["vocabulary"] = vocabulary_facts(file)
        facts["run"] = _run_facts(file, settings, args.tier is not None)
    if not args.json:
        print(_text(facts, args.tensors))
        return 0
    if not args.tensors:
        facts["tensors"] = len(facts["tensors"])
    print(json.dumps(facts, indent=2, allow_nan=False))
    return 0


def _run_facts(file: GgufFile, settings: Settings, on_tier: bool) -> dict[str, Any]:
    """The facts of a run, on the tier if the command names one: opening it may compile for a
    while."""
    from accel.packets.host_memory import available_memory
    from harness.cli.model_facts import RequestedSizes, run_facts
    from harness.memory import budget_of
    from harness.tiers import open_tier
    from reference.model.adapters import Adapters, open_adapter

    with ExitStack() as stack:
        tier, available = None, available_memory()
        if on_tier:
            tier = stack.enter_context(open_tier(settings["tier"], tier_options(settings)))
            available = tier.available_bytes
        opened = tuple(open_adapter(one.path, file) for one in settings["lora"] or ())
        for adapter in opened:
            stack.callback(adapter.file.close)
        adapters = Adapters(opened)
        budget = budget_of(available, settings["memory_budget"])
        requested = RequestedSizes(
            settings["context"],
            settings["kv_dtype"],
            settings["chunk"],
            budget,
            settings["slots"] or 1,
            tier,
            adapters,
        )
        return run_facts(file, requested)


def _text(facts: Mapping[str, Any], with_tensors: bool) -> str:
    sections = [_overview(facts), _types(facts["types"]), _metadata(facts["metadata"])]
    sections.append(_vocabulary(facts["vocabulary"]))
    if "head" in facts["run"]:
        sections.append(f"IT DRAFTS FOR A MODEL\n{table(head_rows(facts['run']['head']))}")
    elif "problem" in facts["run"]:
        sections.append(f"THIS BUILD CANNOT RUN IT\n{_shown(facts['run']['problem'])}")
    else:
        sections += [_memory(facts["run"]["memory"]), _graph(facts["run"]["graph"])]
    if with_tensors:
        sections.append(_tensors(facts["tensors"]))
    return "\n\n".join(sections)


def _overview(facts: Mapping[str, Any]) -> str:
    from contract.amounts import format_bytes

    run = facts["run"]
    rows = [
        ("file", _shown(facts["path"])),
        ("size", f"{format_bytes(facts['bytes'])} in {_count(facts['shards'], 'file')}"),
        ("format", f"GGUF {facts['gguf_version']}, {_count(len(facts['tensors']), 'tensor')}"),
        ("name", _shown(facts["name"])),
        ("architecture", _shown(facts["architecture"])),
        ("parameters", _parameters(facts)),
    ]
    if "problem" not in run:
        rows += layer_rows(run)
        if run["images"] is not None:
            rows.append(("images", f"{run['images']}: this build understands text alone"))
        rows.append(("context", f"{run['longest_context']:,} tokens"))
        rows += [("adapter", _adapter(one)) for one in run["adapters"]]
    return table(rows)


def _adapter(facts: Mapping[str, Any]) -> str:
    from contract.amounts import format_bytes

    ranks = " to ".join(
        str(rank) for rank in dict.fromkeys((facts["ranks"][0], facts["ranks"][-1]))
    )
    what = f"rank {ranks} of {_count(facts['matrices'], 'matrix')}"
    return f"{_shown(facts['path'])}: {what}, {format_bytes(facts['stacked_bytes'])} in memory"


def _parameters(facts: Mapping[str, Any]) -> str:
    active = facts["run"].get("active_parameters", facts["parameters"])
    share = "" if active == facts["parameters"] else f", {active:,} of them for a token"
    return f"{facts['parameters']:,}{share}"


def _types(types: Mapping[str, Mapping[str, int]]) -> str:
    rows = [("TYPE", "TENSORS", "ELEMENTS", "BYTES")]
    for name, row in types.items():
        rows.append((name, str(row["tensors"]), f"{row['elements']:,}", f"{row['bytes']:,}"))
    return table(rows, right=(1, 2, 3))


def _metadata(metadata: Mapping[str, Any]) -> str:
    rows = [("KEY", "VALUE")]
    for key, value in metadata.items():
        if isinstance(value, dict):
            first = ", ".join(_shown(item) for item in value["first"])
            more = ", ..." if value["length"] > len(value["first"]) else ""
            value = f"{value['length']:,} x {value['array']}: {first}{more}"
        rows.append((_shown(key), _shown(value)))
    return table(rows)


def _vocabulary(facts: Mapping[str, Any]) -> str:
    if "problem" in facts:
        return f"VOCABULARY CANNOT BE USED\n{_shown(facts['problem'])}"
    ends = ", ".join(_token(token) for token in facts["end_of_generation"])
    rows = [
        ("vocabulary", f"{facts['tokens']:,} tokens, {_shown(facts['model'])}"),
        ("pre-tokenizer", _shown(facts["pre_tokenizer"])),
        ("bos", f"{_token(facts['bos'])}{' before every prompt' if facts['adds_bos'] else ''}"),
        ("ends at", ends or "-"),
        ("chat template", "yes" if facts["chat_template"] else "no"),
    ]
    return table(rows)


def divided_pages(memory: Mapping[str, Any]) -> str:
    """Whose KV heads a device has, if there are several."""
    whole, layers = memory["whole_pages"] or (0, 0)
    if not layers:
        return ""
    if not whole:
        return ", of a device's own KV heads"
    those = "" if whole == layers else f" in {whole} of {layers} layers"
    return f", whole on each device{those}: KV heads do not divide among {memory['devices']}"


def _memory(memory: Mapping[str, Any]) -> str:
    from contract.amounts import format_bytes

    tier = f"on {memory['tier']}"
    if memory["tier"] is None:
        tier = "without a tier's own copies; --tier auto adds them"
    if memory["devices"] > 1:
        tier += f", each of {memory['devices']} devices"
    where = "in the budget" if memory["fits"] else "MORE THAN the budget"
    if memory["beyond"]:
        where = f"{format_bytes(memory['beyond'])} more than the budget"
    elif memory["streamed"]:
        where = f"{format_bytes(memory['device'])} on the device, in the budget"
    slots = _count(memory["slots"], "slot")
    each = f"{memory['context']:,} tokens, {memory['kv_per_token']:,} bytes each"
    weights = ", ".join(f"{name} {format_bytes(n)}" for name, n in memory["weights"].items())
    rows = [
        ("MEMORY", "", tier),
        ("weights", sum(memory["weights"].values()), weights),
        ("in host memory", memory["streamed"], "weights that steps move to the device"),
        ("ring", memory["ring"], "two layers, and experts that are used often"),
        ("keys and values", memory["kv"], f"{slots} of {each}{divided_pages(memory)}"),
        (
            "recurrent state",
            memory["recurrent"],
            f"{slots} of {memory['recurrent_per_slot']:,} bytes",
        ),
        ("tables", memory["constants"], "rotary angles"),
        ("step data", memory["step_data"], "inputs and logits"),
        ("scratch", memory["scratch"], f"a step of {_count(memory['step_tokens'], 'token')}"),
        ("lowered steps", memory["variants"], "one for each size of a step"),
        ("workspace", memory["workspace"], "during a step"),
        ("other state", memory["state"], ""),
        ("host copies", memory["staging"], "of what the device reads and writes"),
        ("total", memory["total"], f"{where} of {format_bytes(memory['budget'])}"),
    ]
    always = ("MEMORY", "weights", "keys and values", "total")
    shown = [
        (name, format_bytes(count) if isinstance(count, int) else count, note)
        for name, count, note in rows
        if count or name in always
    ]
    tables = table(shown, right=(1,)), _kinds(memory["kinds"]), _sequences(memory)
    return "\n\n".join((tables[0], *memory["notes"], *tables[1:]))


def _kinds(kinds: Mapping[str, Mapping[str, Any]]) -> str:
    from contract.amounts import format_bytes

    rows = [("KEYS AND VALUES", "BYTES A TOKEN", "CONTEXT THAT FITS", "TOTAL")]
    for name, kind in kinds.items():
        if "problem" in kind:
            rows.append((name, "-", "-", _shown(kind["problem"])))
        elif kind["longest_context"] is None:
            rows.append((name, f"{kind['kv_per_token']:,}", "none", "-"))
        else:
            total = f"{format_bytes(kind['total'])}{_elsewhere(kind)}"
            rows.append((name, f"{kind['kv_per_token']:,}", f"{kind['longest_context']:,}", total))
    return table(rows, right=(1, 2))


def _sequences(memory: Mapping[str, Any]) -> str:
    """Number of sequences and their context that fit, and what prevents more."""
    from contract.amounts import format_bytes

    rows = [("SLOTS", "CONTEXT OF EACH", "TOTAL", "WHY NOT MORE")]
    for row in memory["sequences"]:
        if row["context"] is None:
            why = f"a page of each takes {format_bytes(-row['left'])} more than the budget"
        elif row["more"] is None:
            why = "it is the whole context"
        else:
            more, left = format_bytes(row["more"]), format_bytes(row["left"])
            why = f"a page more of each takes {more}, {left} are left"
        context = "none" if row["context"] is None else f"{row['context']:,}"
        why += _elsewhere(row)
        rows.append((str(row["slots"]), context, format_bytes(row["total"]), why))
    return table(rows, right=(0, 1))


def _elsewhere(row: Mapping[str, Any]) -> str:
    return f", weights {row['weights']}" if row["weights"] else ""


def _graph(graph: Mapping[str, Any]) -> str:
    work = f"{graph['bytes_per_token']:,} bytes, {graph['flops_per_token']:,} FLOP"
    seen = f"attending to {_count(graph['context'], 'token')}"
    opcodes = ", ".join(f"{count} {name}" for name, count in graph["opcodes"].items())
    return table([("nodes", f"{graph['nodes']}: {opcodes}"), ("a decode token", f"{work} {seen}")])


def _tensors(tensors: list[Mapping[str, Any]]) -> str:
    rows = [("TENSOR", "TYPE", "SHAPE", "BYTES", "OFFSET")]
    for tensor in tensors:
        shape = " x ".join(str(extent) for extent in tensor["shape"])
        size, offset = f"{tensor['bytes']:,}", str(tensor["offset"])
        rows.append((_shown(tensor["name"]), tensor["type"], shape, size, offset))
    return table(rows, right=(3, 4))


def _token(token: Mapping[str, Any] | None) -> str:
    return "-" if token is None else f"{_shown(token['text'])} ({token['id']})"


def _count(number: int, noun: str) -> str:
    plural = "matrices" if noun == "matrix" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _shown(value: Any) -> str:
    return "-" if value is None else printable(str(value))
