"""What a server could change in a receipt of a text, and what a verification says of it."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.host.engine_thread import EngineThread
from harness.serve.model import ModelOptions, ServedModel, open_model
from harness.serve.receipts.document import Receipt, parse_receipt
from harness.serve.receipts.verify import ReceiptDemands, verify_receipts
from tests.needs import need_device

Json = dict[str, Any]


def open_verifier(path: Path, options: ModelOptions, owned: ExitStack) -> ServedModel:
    """A model that verifies receipts, open until ``owned`` is closed. Skips without its device."""
    engine = owned.enter_context(EngineThread())
    return need_device(lambda: open_model(path, options, engine, owned))


def parsed(document: Json) -> Receipt:
    return parse_receipt(json.dumps(document).encode(), "the receipt")


def problems(document: Json, model: ServedModel, sample: int | None = None) -> list[str]:
    """What a verification finds in a receipt, of so many sampled steps or of all."""
    (verdict,) = verify_receipts([parsed(document)], model, ReceiptDemands(sample=sample))
    return list(verdict.problems)


def change_token(document: Json) -> None:
    document["payload"]["choices"][0]["tokens"][7] ^= 1


def change_digest(document: Json) -> None:
    document["leaves"][0][7] = "5" * 64


def change_seed(document: Json) -> None:
    document["payload"]["choices"][0]["seed"] = "6"
    request = json.loads(document["payload"]["request"])
    document["payload"]["request"] = json.dumps({**request, "seed": 6})


def change_temperature(document: Json) -> None:
    document["payload"]["choices"][0]["sampling"]["temperature"] = 1.6
    request = json.loads(document["payload"]["request"])
    document["payload"]["request"] = json.dumps({**request, "temperature": 1.6})


def change_parameter(document: Json) -> None:
    document["payload"]["choices"][0]["sampling"]["temperature"] = 0.7


def change_choice_seed(document: Json) -> None:
    request = json.loads(document["payload"]["request"])
    document["payload"]["request"] = json.dumps({**request, "seed": 6})


def cut_prompt(document: Json) -> None:
    document["payload"]["prompts"][0].pop()
    usage = document["payload"]["usage"]
    usage["prompt_tokens"] -= 1
    usage["total_tokens"] -= 1


def change_usage(document: Json) -> None:
    document["payload"]["usage"]["completion_tokens"] += 1


def cut_answer(document: Json) -> None:
    """Tokens, digests and counts alike, as if the answer had ended earlier."""
    document["payload"]["choices"][0]["tokens"].pop()
    document["leaves"][0].pop()
    usage = document["payload"]["usage"]
    usage["completion_tokens"] -= 1
    usage["total_tokens"] -= 1


def change_finish(document: Json) -> None:
    document["payload"]["choices"][0]["finish"] = "stop"


def change_template(document: Json) -> None:
    document["payload"]["template"] = "0" * 64


def change_arithmetic(document: Json) -> None:
    document["payload"]["arithmetic"] = 1


def change_kv(document: Json) -> None:
    document["payload"]["model"]["kv_dtype"] = "f16"


def other_request(document: Json) -> None:
    document["payload"]["request"] = json.dumps({"prompt": "abd", "max_tokens": 24, "seed": 5})


LIES: dict[str, tuple[Callable[[Json], None], str]] = {
    "one token replaced": (change_token, "tokens: choice 0: step 7"),
    "a step's digest replaced, the tree consistent": (change_digest, "bits: choice 0: step 7"),
    "the seed, in request and record": (change_seed, "tokens: choice 0: step"),
    "the temperature, in request and record": (change_temperature, "tokens: choice 0: step"),
    "a parameter in the record alone": (change_parameter, "parameters: choice 0: temperature"),
    "the seed in the request alone": (change_choice_seed, "parameters: choice 0: seed"),
    "the prompt cut": (cut_prompt, "prompt: choice 0"),
    "the counts": (change_usage, "usage: completion_tokens"),
    "the answer cut": (cut_answer, "tokens: choice 0"),
    "the finish reason": (change_finish, "finish: choice 0"),
    "the template": (change_template, "template: "),
    "the arithmetic": (change_arithmetic, "version: the arithmetic"),
    "the storage of keys and values": (change_kv, "kv_dtype: f16"),
    "the request": (other_request, "prompt: choice 0"),
}
