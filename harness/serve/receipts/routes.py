"""Routes that return a tenant's receipts, and the public keys."""

from __future__ import annotations

from flask import g, request

from harness.serve.answers import Json
from harness.serve.errors import ApiError
from harness.serve.openapi import Route
from harness.serve.receipts.keys import HISTORY
from harness.serve.receipts.store import ReceiptStore

MAX_LISTED = 1000
LINES = "application/jsonl"
RECEIPT_ROUTES = (
    Route("GET", "/v1/receipts", "receipts", "Numbers of one's receipts behind ?after=N."),
    Route(
        "GET",
        "/v1/receipts/keys",
        "receipt_keys",
        "The public keys that sign receipts, one a line.",
        produces=LINES,
    ),
    Route(
        "GET",
        "/v1/receipts/<receipt>",
        "receipt",
        "The receipt of an answer, by its id, or `latest`.",
    ),
)


class ReceiptHandlers:
    """A method for each route of RECEIPT_ROUTES, by its name."""

    def receipts(self) -> Json:
        after = request.args.get("after", "0")
        if not (after.isascii() and after.isdecimal() and len(after) < 16):
            raise ApiError(400, "after is the number of a receipt", param="after")
        data = _store().listed(g.account.tenant, int(after), MAX_LISTED)
        return {"object": "list", "data": data}

    def receipt(self, receipt: str) -> Json:
        found = _store().find(g.account.tenant, receipt)
        if found is None:
            raise ApiError(404, "there is no such receipt, or it is another's", param="receipt")
        return found

    def receipt_keys(self) -> bytes:
        return (_store().folder / HISTORY).read_bytes()


def _store() -> ReceiptStore:
    store: ReceiptStore | None = g.service.receipts
    if store is None:
        raise ApiError(404, "this server makes no receipts; start it with --receipts")
    return store
