"""Routes that return a tenant's receipts, and the public keys."""

from __future__ import annotations

from harness.serve.answers import Json
from harness.serve.errors import ApiError
from harness.serve.http_request import HttpRequest
from harness.serve.receipts.keys import HISTORY
from harness.serve.receipts.store import ReceiptStore
from harness.serve.route import Route

MAX_LISTED = 1000


def receipts(incoming: HttpRequest) -> Json:
    """Numbers of the tenant's receipts. Raises ApiError."""
    after = incoming.query.get("after", "0")
    if not (after.isascii() and after.isdecimal() and len(after) < 16):
        raise ApiError(400, "after is the number of a receipt", param="after")
    data = _store(incoming).listed(incoming.account.tenant, int(after), MAX_LISTED)
    return {"object": "list", "data": data}


def receipt(incoming: HttpRequest, receipt: str) -> Json:
    """A receipt of the tenant. Raises ApiError."""
    found = _store(incoming).find(incoming.account.tenant, receipt)
    if found is None:
        raise ApiError(404, "there is no such receipt, or it is another's", param="receipt")
    return found


def receipt_keys(incoming: HttpRequest) -> bytes:
    """The public keys. Raises ApiError."""
    return (_store(incoming).folder / HISTORY).read_bytes()


def _store(incoming: HttpRequest) -> ReceiptStore:
    store = incoming.service.receipts
    if store is None:
        raise ApiError(404, "this server makes no receipts; start it with --receipts")
    return store


RECEIPT_ROUTES = (
    Route("GET", "/v1/receipts", receipts, "Numbers of one's receipts behind ?after=N."),
    Route(
        "GET", "/v1/receipts/keys", receipt_keys, "The public keys that sign receipts, one a line.",
        produces="application/jsonl",
    ),
    Route(
        "GET", "/v1/receipts/<receipt>", receipt,
        "The receipt of an answer, by its id, or `latest`.",
    ),
)  # fmt: skip
