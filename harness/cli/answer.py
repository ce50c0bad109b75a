"""Shows one generation: the text on standard output, its statistics on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import ZincError
from contract.types import FinishReason
from harness.settings_table import names_in

if TYPE_CHECKING:
    from harness.host.generation import TextGeneration
    from harness.host.session import Session


def show_text(text: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def follow(generation: TextGeneration, show: Callable[[str], None]) -> bool:
    """Pass every piece of text to ``show`` as it comes; returns True when Ctrl-C ended it."""
    try:
        for piece in generation:
            if piece.text:
                show(piece.text)
    except KeyboardInterrupt:
        generation.cancel()
        return True
    return False


def show_answer(generation: TextGeneration) -> bool:
    """Stream the answer to standard output and end its line; returns True when Ctrl-C ended it."""
    try:
        interrupted = follow(generation, show_text)
    except ZincError:
        # The error is told on a line of its own.
        if generation.text:
            show_text("\n")
        raise
    if not generation.text.endswith("\n"):
        show_text("\n")
    return interrupted


def closing_line(generation: TextGeneration, session: Session) -> str:
    """The closing line: tokens, rates, drafts, tier and arithmetic, how tokens were drawn, and why
    a text was cut. Cached prompt tokens are not part of the rate."""
    stats, info, drawn = generation.stats, session.tier.info, generation.sampling
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    parts = [
        f"{stats.prompt_tokens} prompt tokens{cached} {stats.prompt_rate:.1f} tok/s",
        f"{len(generation.tokens)} tokens {stats.decode_rate:.1f} tok/s",
        *([f"{stats.accepted} of {stats.drafted} drafts accepted"] if stats.drafted else []),
        info.name,
        info.arithmetic,
        *([f"temperature {drawn.temperature:g}, seed {drawn.seed}"] if drawn.temperature else []),
        *_cut_notes(generation, session),
    ]
    return f"[{' · '.join(parts)}]"


def record(generation: TextGeneration, session: Session, digests: Path) -> dict[str, Any]:
    """Everything about an answer as JSON values; times in seconds, rates in tokens per second.
    ``digests`` is the file that caches digests of model files."""
    from harness.file_digests import adapted_fingerprint, file_digests, system_fingerprint

    model = session.model
    alone = system_fingerprint(model, session.runner.limits, digests)
    stats, info, config = generation.stats, session.tier.info, model.config
    finish = generation.finish_reason
    completion = len(generation.tokens)
    return {
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": finish.value if finish else None,
        "stop_string": generation.stop_string,
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": stats.prompt_tokens + completion,
            "cached_tokens": stats.cached_tokens,
        },
        "timings": {
            "load_seconds": session.load_seconds,
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": stats.decode_seconds,
            "prompt_tokens_per_second": stats.prompt_rate,
            "decode_tokens_per_second": stats.decode_rate,
        },
        "drafts": {"drafted": stats.drafted, "accepted": stats.accepted},
        "seed": generation.sampling.seed,
        "sampling": {
            name: getattr(generation.sampling, name)
            for name in names_in("sampling")
            if name != "seed"
        },
        "context": session.context,
        "tier": info.name,
        "device": info.device,
        "arithmetic": info.arithmetic,
        "system_fingerprint": adapted_fingerprint(alone, model, session.adapters),
        "model": {
            "name": config.name,
            "architecture": config.architecture,
            "files": [
                {"path": str(shard.path), "sha256": digest}
                for shard, digest in zip(
                    model.file.shards, file_digests(model, digests), strict=True
                )
            ],
        },
    }


def _cut_notes(generation: TextGeneration, session: Session) -> list[str]:
    if generation.finish_reason is FinishReason.CANCELLED:
        return ["interrupted"]
    if generation.finish_reason is not FinishReason.LENGTH:
        return []
    used = generation.stats.prompt_tokens + len(generation.tokens)
    return ["context is full" if used >= session.context else "cut at --max-tokens"]
