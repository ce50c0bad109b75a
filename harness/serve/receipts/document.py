"""The contents of a receipt, and how it is read from an untrusted file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from contract.errors import ConfigError, system_errors_as
from contract.types import MAX_INT32
from harness.serve.receipts.canonical import canonical, canonical_digest
from harness.serve.receipts.keys import ReceiptKey, verifies
from harness.serve.strict_json import BadJson, known_type, loads

VERSION = 2
"""Version of new receipts, and of their leaves: see ``harness.leaves``."""
KNOWN_VERSIONS = (1, VERSION)
ALGORITHM = "ed25519"
MAX_BYTES = 32 << 20
"""Longest receipt that is read. It has room for a context of a million tokens."""
Token = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Hex64 = Annotated[str, Meta(pattern="^[0-9a-f]{128}$")]


class AdapterFacts(Struct, forbid_unknown_fields=True):
    """An adapter that an answer used: the SHA-256 of its file, and its scale."""

    sha256: Hex32
    scale: float


class ModelFacts(Struct, forbid_unknown_fields=True):
    """The model that answered. ``files``: SHA-256 of its files. ``types``: formats of its weights.
    ``kv_dtype``: format of keys and values. ``adapters``: those used. ``rope_factors``: the tensors
    of frequency factors for this context length."""

    name: str
    architecture: str
    layers: int
    hidden: int
    vocab: int
    types: list[str]
    kv_dtype: str
    files: list[Hex32]
    adapters: list[AdapterFacts] = []
    rope_factors: list[str] = []


class ReceiptTenant(Struct, forbid_unknown_fields=True):
    """The tenant that sent the request."""

    id: int
    name: str


class ChoiceFacts(Struct, forbid_unknown_fields=True):
    """One answer to prompt number ``prompt``: its sampling parameters, all its tokens, why it
    ended, and the Merkle root of its steps' digests. ``seed`` is a string, since JSON numbers are
    exact only to 2^53."""

    prompt: int
    sampling: dict[str, float]
    seed: Annotated[str, Meta(pattern="^[0-9]{1,20}$")]
    max_tokens: int
    tokens: list[Token]
    finish: str
    root: Hex32


class ReceiptPayload(Struct, forbid_unknown_fields=True):
    """The signed part of a receipt. ``request``: the request as JSON text, for the route ``kind``.
    ``results``: SHA-256 of results that are not tokens. ``number`` and ``previous``, the SHA-256 of
    the receipt before it, are its place in the tenant's chain."""

    receipt: int
    id: str
    kind: Literal["chat", "completion", "embedding", "score", "rerank"]
    time: str
    tenant: ReceiptTenant
    number: int
    previous: Hex32 | None
    arithmetic: int
    model: ModelFacts
    template: Hex32 | None
    sampling_defaults: dict[str, float]
    request: str
    prompts: list[list[Token]]
    choices: list[ChoiceFacts]
    results: list[Hex32]
    usage: dict[str, int]


class SignatureFacts(Struct, forbid_unknown_fields=True):
    """The signature of the canonical payload, and its key."""

    algorithm: Literal["ed25519"]
    key: Hex32
    value: Hex64


class Envelope(Struct, forbid_unknown_fields=True):
    """A receipt as it is stored. ``leaves``: the digests of each choice's steps."""

    payload: ReceiptPayload
    leaves: list[list[Hex32]]
    signature: SignatureFacts


@dataclass(frozen=True)
class Receipt:
    """A receipt that was read. ``raw`` is its payload as a JSON value, which is signed."""

    payload: ReceiptPayload
    leaves: Sequence[Sequence[str]]
    signature: SignatureFacts
    raw: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of the payload, hex. The next receipt of the chain has it as ``previous``."""
        return canonical_digest(self.raw)

    @property
    def is_signed(self) -> bool:
        """Whether the signature fits this payload and the key it names."""
        return verifies(self.signature.key, self.signature.value, canonical(self.raw))


def signed_document(payload: Mapping[str, Any], leaves: Any, key: ReceiptKey) -> dict[str, Any]:
    """A receipt as a JSON value, signed."""
    signature = {"algorithm": ALGORITHM, "key": key.public, "value": key.sign(canonical(payload))}
    return {"payload": payload, "leaves": leaves, "signature": signature}


def read_receipts(path: Path) -> list[Receipt]:
    """The receipts in a file: one JSON object, or one in each line. Raises ConfigError."""
    with system_errors_as(f"{path}: cannot read"), path.open("rb") as file:
        first = file.read(MAX_BYTES + 1)
        whole = len(first) <= MAX_BYTES
        if whole and (b"\n" not in first.strip() or not _is_lines(first)):
            return [parse_receipt(first, str(path))]
        file.seek(0)
        found: list[Receipt] = []
        while line := file.readline(MAX_BYTES + 1):
            where = f"{path}: line {len(found) + 1}"
            if len(line) > MAX_BYTES:
                raise ConfigError(f"{where}: is longer than {MAX_BYTES >> 20} MiB: no receipt")
            if line.strip():
                found.append(parse_receipt(line, where))
        return found


def _is_lines(data: bytes) -> bool:
    """Whether the first line is a complete JSON value."""
    try:
        loads(data.lstrip().partition(b"\n")[0])
    except BadJson:
        return False
    return True


def parse_receipt(data: bytes, where: str) -> Receipt:
    """The receipt in ``data``; ``where`` names it in errors. Raises ConfigError."""
    try:
        value = loads(data)
    except BadJson as error:
        raise ConfigError(f"{where}: {error}") from None
    payload = value.get("payload") if isinstance(value, dict) else None
    if not isinstance(payload, dict):
        raise ConfigError(f"{where}: is no receipt: it has no payload")
    if payload.get("receipt") not in KNOWN_VERSIONS or payload["receipt"] is True:
        version = str(payload.get("receipt"))[:32]
        raise ConfigError(f"{where}: version: receipts of version {version} are not known here")
    try:
        envelope = msgspec.convert(value, known_type(Envelope))
        canonical(payload)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: is no receipt: {error}") from None
    return Receipt(envelope.payload, envelope.leaves, envelope.signature, payload)
