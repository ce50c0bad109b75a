"""The receipt of ``zinc-rt run``: that of a server for the same request."""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.cached_files import writing
from contract.errors import system_errors_as
from contract.types import LOCAL_TENANT, Request
from harness.cli.outputs import check_output
from harness.cli.prompt import opening, thinking_fields, user
from harness.cli.receipts_command import default_folder
from harness.digest import RowDigests
from harness.file_digests import opened_digest
from harness.leaves import digest_of_spans
from harness.settings import Settings
from reference.runner import ROW_DIGEST

if TYPE_CHECKING:
    from harness.cli.answer_format import AnswerFormat
    from harness.host.generation import TextGeneration
    from harness.host.session import Session


@dataclass(frozen=True)
class RunReceipt:
    """The receipt of one run in the making: ``messages`` are its conversation where the model has a
    template, else it is a text; ``thinking`` is the fields that say whether to think, ``form``
    those that hold the answer to a format."""

    path: Path
    thinking: Mapping[str, object]
    messages: list[dict[str, object]] | None
    prompt: str
    form: Mapping[str, object]
    output: str = ROW_DIGEST
    digests: RowDigests = field(default_factory=lambda: RowDigests(digest_of_spans))

    def write(self, generation: TextGeneration, session: Session) -> None:
        """Write the receipt of an answer that has ended. Raises ConfigError."""
        from harness.serve.receipts.document import signed_document
        from harness.serve.receipts.keys import open_key
        from harness.serve.receipts.make import answer_payload, model_facts, user_facts

        request, finish = generation.request, generation.finish_reason
        model, template, opened = session.model, session.template, session.model.adapters
        leaves = self.digests.first(len(generation.sampled))
        chat = self.messages is not None and template is not None
        assert finish is not None
        adapters = [
            {"sha256": opened.opened[n].digest, "scale": scale}
            for n, scale in opened.used(request.adapters)
        ]
        files = [opened_digest(shard) for shard in model.file.shards]
        facts = model_facts(model.config.name, model, session.runner.limits, files, adapters)
        facts |= user_facts(LOCAL_TENANT, template, {})
        payload = answer_payload(
            "run-" + secrets.token_hex(12),
            "chat" if chat else "completion",
            facts | {"number": 1, "previous": None},
            json.dumps(self._as_server_request(request, chat)),
            [(request, generation.sampled, finish.value, leaves)],
        )
        document = signed_document(payload, [leaves], open_key(default_folder()))
        with system_errors_as(f"{self.path}: cannot write"), writing(self.path) as file:
            file.write(f"{json.dumps(document)}\n".encode())

    def _as_server_request(self, request: Request, chat: bool) -> dict[str, Any]:
        """The request that a server would be sent for the same answer."""
        sampling = asdict(request.sampling)
        # Requests have signed seeds, which count modulo 2^64.
        sampling["seed"] -= (sampling["seed"] >> 63) << 64
        fields = sampling | dict(self.form)
        fields |= {"max_tokens": request.max_tokens, "stop": list(request.stop)}
        if not chat:
            return fields | {"prompt": self.prompt, "parse_special": False}
        return fields | dict(self.thinking) | {"messages": self.messages}


def receipt_of_run(
    args: argparse.Namespace, settings: Settings, prompt: str, held: AnswerFormat | None
) -> RunReceipt:
    """The receipt of a run of the command line. Raises ConfigError before anything is computed."""
    from harness.cli.serve_command import need_server_extra
    from harness.serve.receipts.keys import open_key

    need_server_extra()
    check_output("--receipt", args.receipt, args.file, args.trace, args.timeline)
    open_key(default_folder())
    messages = None if args.raw else [*opening(settings["system"]), user(prompt)]
    form = {} if held is None else held.fields
    return RunReceipt(args.receipt, thinking_fields(settings["thinking"]), messages, prompt, form)
