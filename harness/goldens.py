"""``python -m harness.goldens check|update``: the stored logits that every build must reproduce.

``goldens/default_model.json`` holds texts that the default model continued greedily, scored in one
pass; ``goldens/synthetic.json`` holds random-weight models: their specification and the digests of
the file, the IR graph and the logits. Only the reference CPU tier writes them; any tier can be
checked against them. Every position has its ten largest logits, so that a difference shows its
size."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contract.arithmetic import ARITHMETIC_VERSION
from contract.arrays import Floats
from contract.cached_files import replacing
from contract.errors import ConfigError, system_words
from contract.ir.codec import graph_digest
from contract.tier import Tier
from contract.types import Request
from harness.catalog import DEFAULT_ID, resolve_model
from harness.cli.parser import Parser, path_argument
from harness.cli.tool import run_tool
from harness.digest import file_digest, logits_digest
from harness.golden_specs import SYNTHETIC_SPECS
from harness.progress import SILENT, Progress, progress_on
from harness.settings import add_flags, group_of, resolve
from harness.synth.spec import GENERATOR_VERSION, SynthSpec, fields_of, spec_of
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import ModelRunner

PROG = "python -m harness.goldens"
FOLDER = Path(__file__).resolve().parents[1] / "goldens"
DEFAULT_MODEL, SYNTHETIC = "default_model.json", "synthetic.json"

POSITIONS = 32
TOP = 10
LIMITS = Limits(
    slots=1, context=2 * POSITIONS, pages=4, step_tokens=POSITIONS + 1, step_rows=POSITIONS
)

PROMPTS = {
    "fact": "The capital of France is",
    "story": "Once upon a time, in a small village by the sea,",
    "chat": "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "code": "def fibonacci(n):\n    if n <",
    "arithmetic": "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "unicode": "Größe, café, 東京, \U0001f600:",
}


def score(model: Model, tier: Tier, sequences: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield the stored form of the logits after every token of each sequence, scored in one
    pass."""
    with ModelRunner(model, tier, LIMITS) as runner:
        for tokens in sequences:
            logits = _all_logits(runner, tokens)
            yield {
                "digest": logits_digest(logits),
                "positions": [
                    {"digest": logits_digest(row), "top": _largest(row)} for row in logits
                ],
            }


def _all_logits(runner: ModelRunner, tokens: Sequence[int]) -> Floats:
    parts: list[Floats] = []
    engine = Engine(runner)
    engine.submit(Request(1, tuple(tokens), 0), lambda _, logits: parts.append(logits))
    list(engine.run())
    return np.concatenate(parts)


def _largest(row: Floats) -> list[list[Any]]:
    """The TOP largest logits as [token, hexadecimal binary32]; equal ones by rising token."""
    order = np.argsort(-row, kind="stable")[:TOP]
    return [[int(token), _hexadecimal(float(row[token]))] for token in order]


def _hexadecimal(value: float) -> str:
    """``float.hex`` without the zeros that a binary32 always ends in."""
    mantissa, exponent = value.hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}"


def default_model_golden(path: Path) -> dict[str, Any]:
    """The golden of the default model: every prompt continued greedily to POSITIONS tokens and
    scored."""
    model = open_model(path)
    with CpuTier() as tier:
        sequences = {}
        with ModelRunner(model, tier, LIMITS) as runner:
            for name, text in PROMPTS.items():
                prompt = tuple(model.tokenizer.encode(text, parse_special=True))
                if len(prompt) >= POSITIONS:
                    raise ConfigError(f"golden prompt {name!r} is {len(prompt)} tokens long")
                engine = Engine(runner)
                engine.submit(Request(1, prompt, POSITIONS - len(prompt), ignore_end=True))
                generated = [event.token for event in engine.run()]
                sequences[name] = (prompt, (*prompt, *generated))
        scores = score(model, tier, [tokens for _, tokens in sequences.values()])
        prompts = {
            name: {
                "text": PROMPTS[name],
                "prompt_tokens": len(prompt),
                "tokens": list(tokens),
                **result,
            }
            for (name, (prompt, tokens)), result in zip(sequences.items(), scores, strict=True)
        }
    model.close()
    return {"model": DEFAULT_ID, "file": file_digest(path), "prompts": prompts}


def synthetic_golden(spec: SynthSpec, tier: Tier) -> dict[str, Any]:
    """Digests of one random-weight model: its file, its graph and its logits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_synthetic(path, spec)
        model = open_model(path)
        tokens = synthetic_tokens(spec)
        (result,) = score(model, tier, [tokens])
        golden = {
            "spec": fields_of(spec),
            "file": file_digest(path),
            "graph": graph_digest(model.graph(LIMITS)),
            "tokens": list(tokens),
            **result,
        }
        model.close()
    return golden


def synthetic_tokens(spec: SynthSpec) -> tuple[int, ...]:
    """POSITIONS tokens spread over the whole vocabulary."""
    return tuple((7 + 89 * position) % spec.vocab for position in range(POSITIONS))


def update_default_model(folder: Path, reason: str, model_path: Path) -> None:
    """Rewrite the golden of the default model, with the reason in it."""
    _store(folder / DEFAULT_MODEL, {**_header(reason), **default_model_golden(model_path)})


def update_synthetic(folder: Path, reason: str, progress: Progress = SILENT) -> None:
    """Rewrite the goldens of the synthetic models, with the reason in them."""
    header = _header(reason)
    models = []
    progress.start("synthetic goldens", len(SYNTHETIC_SPECS), "model")
    with CpuTier() as tier:
        for spec in SYNTHETIC_SPECS:
            models.append(synthetic_golden(spec, tier))
            progress.advance(1)
    progress.close()
    _store(folder / SYNTHETIC, {**header, "models": models})


def _header(reason: str) -> dict[str, Any]:
    if not reason.strip():
        raise ConfigError("goldens: an update needs --reason TEXT")
    return {"reason": reason, "arithmetic": ARITHMETIC_VERSION, "generator": GENERATOR_VERSION}


def _store(path: Path, golden: Mapping[str, Any]) -> None:
    """Write JSON with one line per position, so that a change is readable as a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _layout(golden, "") + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def _layout(value: Any, indent: str) -> str:
    deeper = indent + "  "
    if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
        if "top" not in value:
            items = [f"{deeper}{json.dumps(k)}: {_layout(v, deeper)}" for k, v in value.items()]
            return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = [deeper + _layout(item, deeper) for item in value]
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def check_default_model(folder: Path, model_path: Path, tier: Tier | None = None) -> list[str]:
    """A message for every prompt whose logits differ from the stored ones; empty when all agree."""
    golden, problems = load_golden(folder / DEFAULT_MODEL)
    if file_digest(model_path) != golden["file"]:
        return [f"{golden['model']}: {model_path} is not the file the goldens were written from"]
    model = open_model(model_path)
    prompts = golden["prompts"]
    with tier or CpuTier() as used:
        scores = score(model, used, [entry["tokens"] for entry in prompts.values()])
        for (name, entry), result in zip(prompts.items(), scores, strict=True):
            label = f"{golden['model']}, prompt {name!r}"
            encoded = model.tokenizer.encode(entry["text"], parse_special=True)
            if encoded != entry["tokens"][: entry["prompt_tokens"]]:
                problems.append(f"{label}: the text is now encoded as {encoded}")
            problems += _first_difference(label, entry, result)
    model.close()
    return problems


def check_synthetic(
    folder: Path, tier: Tier | None = None, progress: Progress = SILENT
) -> list[str]:
    """A message for every digest of a synthetic model that differs from the stored one."""
    golden, problems = load_golden(folder / SYNTHETIC)
    progress.start("checking synthetic goldens", len(golden["models"]), "model")
    with tier or CpuTier() as used:
        for entry in golden["models"]:
            problems += check_synthetic_model(entry, used)
            progress.advance(1)
    progress.close()
    return problems


def check_synthetic_model(entry: Mapping[str, Any], tier: Tier) -> list[str]:
    """Messages for what ``tier`` computes differently from one stored synthetic model."""
    spec = spec_of(entry["spec"])
    result = synthetic_golden(spec, tier)
    problems = [
        f"{spec.name}: {part} is {result[part]}, stored is {entry[part]}"
        for part in ("file", "graph", "tokens")
        if result[part] != entry[part]
    ]
    return problems + _first_difference(spec.name, entry, result)


def load_golden(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A golden file, and messages for the parts of its header that do not match this build. Raises
    ConfigError when it cannot be read."""
    try:
        golden = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {system_words(error)}") from None
    current = {"arithmetic": ARITHMETIC_VERSION, "generator": GENERATOR_VERSION}
    problems = [
        f"{path.name}: written with {name} version {golden[name]}, this is version {version}"
        for name, version in current.items()
        if golden[name] != version
    ]
    return golden, problems


def _first_difference(
    label: str, stored: Mapping[str, Any], computed: Mapping[str, Any]
) -> list[str]:
    if len(stored["positions"]) != len(computed["positions"]):
        return [f"{label}: {len(stored['positions'])} positions are stored"]
    pairs = zip(stored["positions"], computed["positions"], strict=True)
    for position, (old, new) in enumerate(pairs):
        if old != new:
            differing = sum(
                a["digest"] != b["digest"]
                for a, b in zip(stored["positions"], computed["positions"], strict=True)
            )
            return [
                f"{label}: position {position} is the first of {differing} that differ\n"
                f"  stored   {old['digest'][:16]}  {_readable(old['top'])}\n"
                f"  computed {new['digest'][:16]}  {_readable(new['top'])}"
            ]
    if stored["digest"] != computed["digest"]:
        return [f"{label}: the overall digest is {computed['digest']}, stored {stored['digest']}"]
    return []


def _readable(top: Sequence[Sequence[Any]]) -> str:
    return " ".join(f"{token}:{float.fromhex(value):.9g}" for token, value in top)


def build_parser(prog: str = PROG) -> Parser:
    """The flags."""
    parser = Parser(
        prog=prog,
        description="Check or rewrite the stored logits of a checkout.",
        epilog=f"examples:\n  {prog} check --only synthetic    without the default model's file",
    )
    parser.add_argument(
        "action",
        choices=("check", "update"),
        help="check compares with the stored digests, update writes new ones",
    )
    group = group_of(parser, "input")
    group.add_argument(
        "--reason",
        default="",
        metavar="REASON",
        help="for update: why the stored logits change, which is stored with them",
    )
    group.add_argument(
        "--folder",
        type=path_argument,
        default=FOLDER,
        metavar="DIR",
        help="folder of the stored digests [default: goldens of this checkout]",
    )
    group.add_argument(
        "--only", choices=("default", "synthetic"), help="these models only, not the others"
    )
    add_flags(parser, ["cache_dir"])
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Check (returns 1 when something differs) or update; returns 2 with one line for a wrong
    call."""
    return run_tool(build_parser(prog), _check_or_update, argv)


def _check_or_update(args: argparse.Namespace) -> int:
    problems = _run(args, progress_on())
    if args.action == "update":
        return 0
    for problem in problems:
        print(problem)
    print(f"goldens: {len(problems)} differences" if problems else "goldens: all bits as stored")
    return 1 if problems else 0


def _run(args: argparse.Namespace, progress: Progress) -> list[str]:
    model_path = None
    if args.only != "synthetic":
        cache_dir = resolve(args, ["cache_dir"])["cache_dir"]
        model_path = resolve_model(DEFAULT_ID, cache_dir, progress)
    problems = []
    if model_path is not None and args.action == "update":
        update_default_model(args.folder, args.reason, model_path)
    elif model_path is not None:
        problems += check_default_model(args.folder, model_path)
    if args.only != "default" and args.action == "update":
        update_synthetic(args.folder, args.reason, progress)
    elif args.only != "default":
        problems += check_synthetic(args.folder, progress=progress)
    return problems


if __name__ == "__main__":
    sys.exit(main())
