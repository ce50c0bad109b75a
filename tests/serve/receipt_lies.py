"""What a server could change in a receipt of a text, and what a verification says of it."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from harness.host.engine_thread import EngineThread
from harness.host.session import SessionOptions
from harness.serve.model import ModelOptions, ServedModel, open_model
from harness.serve.receipts.document import Receipt, parse_receipt
from harness.serve.receipts.verify import ReceiptDemands, verify_receipts
from tests.needs import need_device
from tests.serve.conftest import ALL_TOKENS

Json = dict[str, Any]


def verifiers(folder: Path, usual: Path, **sizes: int) -> Iterator[Callable[..., ServedModel]]:
    """``opened(tier, path)``: a model that verifies. Leaves are made of rows by the rule on
    the CPU tier, by the tier on others. Skips without its device."""
    known: dict[tuple[str, Path], ServedModel] = {}
    with ExitStack() as owned:

        def opened(tier: str = "cpu", path: Path = usual) -> ServedModel:
            if (tier, path) not in known:
                session = SessionOptions(tier=tier, digests=tier != "cpu", **sizes)
                options = ModelOptions(
                    session, "other", folder / "digests.json", sampling=ALL_TOKENS
                )
                engine = owned.enter_context(EngineThread())
                known[tier, path] = need_device(lambda: open_model(path, options, engine, owned))
            return known[tier, path]

        yield opened


def parsed(document: Json) -> Receipt:
    return parse_receipt(json.dumps(document).encode(), "the receipt")


def problems(document: Json, model: ServedModel, sample: int | None = None) -> list[str]:
    """What a verification finds in a receipt, of so many sampled steps or of all."""
    (verdict,) = verify_receipts([parsed(document)], model, ReceiptDemands(sample=sample))
    return list(verdict.problems)


def change(document: Json, changes: Mapping[str, Any]) -> None:
    """Put values at places of a document, or what functions make of the values there."""
    for place, value in changes.items():
        *way, last = (int(word) if word.isdigit() else word for word in place.split("."))
        inner: Any = reduce(getitem, way, document)
        inner[last] = value(inner[last]) if callable(value) else value


def asked(**fields: object) -> Callable[[str], str]:
    """A request with other values of fields."""
    return lambda request: json.dumps({**json.loads(request), **fields})


def cut(values: list[Any]) -> list[Any]:
    return values[:-1]


def one_less(count: int) -> int:
    return count - 1


CHOICE, USAGE, REQUEST = "payload.choices.0", "payload.usage", "payload.request"
OTHER = json.dumps({"prompt": "abd", "max_tokens": 24, "seed": 5})
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "one token replaced": ({f"{CHOICE}.tokens.7": lambda it: it ^ 1}, "tokens: choice 0: step 7"),
    "a step's digest replaced, the tree consistent":
        ({"leaves.0.7": "5" * 64}, "bits: choice 0: step 7"),
    "the seed, in request and record":
        ({f"{CHOICE}.seed": "6", REQUEST: asked(seed=6)}, "tokens: choice 0: step"),
    "the temperature, in request and record":
        ({f"{CHOICE}.sampling.temperature": 1.6, REQUEST: asked(temperature=1.6)},
         "tokens: choice 0: step"),
    "a parameter in the record alone":
        ({f"{CHOICE}.sampling.temperature": 0.7}, "parameters: choice 0: temperature"),
    "the seed in the request alone": ({REQUEST: asked(seed=6)}, "parameters: choice 0: seed"),
    "the prompt cut":
        ({"payload.prompts.0": cut, f"{USAGE}.prompt_tokens": one_less,
          f"{USAGE}.total_tokens": one_less}, "prompt: choice 0"),
    "the counts": ({f"{USAGE}.completion_tokens": lambda it: it + 1}, "usage: completion_tokens"),
    "the answer cut":
        ({f"{CHOICE}.tokens": cut, "leaves.0": cut, f"{USAGE}.completion_tokens": one_less,
          f"{USAGE}.total_tokens": one_less}, "tokens: choice 0"),
    "the finish reason": ({f"{CHOICE}.finish": "stop"}, "finish: choice 0"),
    "the template": ({"payload.template": "0" * 64}, "template: "),
    "the arithmetic": ({"payload.arithmetic": 1}, "version: the arithmetic"),
    "the storage of keys and values": ({"payload.model.kv_dtype": "f16"}, "kv_dtype: f16"),
    "the model's family":
        ({"payload.model.architecture": "llama"}, "model: another model: llama"),
    "the model's layers":
        ({"payload.model.layers": 80}, "model: another model: qwen3 of 80 layers"),
    "the model's width": ({"payload.model.hidden": 8192}, "model: another model"),
    "the model's vocabulary": ({"payload.model.vocab": 151936}, "model: another model"),
    "the model's formats":
        ({"payload.model.types": ["bf16"]}, "model: another quantization: bf16"),
    "the request": ({REQUEST: OTHER}, "prompt: choice 0"),
}  # fmt: skip
"""What is changed, and what a verification says first; the answer cut is one that ended earlier."""
