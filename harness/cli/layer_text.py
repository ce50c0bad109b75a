"""Describes the layers of a model in a few lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contract.amounts import format_bytes


def layer_rows(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of label and text from ``run_facts``; only the first row of a kind has the label."""
    count = run["layers"]
    rows = [("layers", f"{count} of width {run['hidden']:,}"), ("drafts", _drafts(run["drafts"]))]
    for label, name, describe in (
        ("attention", "attention", _attention),
        ("", "recurrent", _recurrent),
        ("feed-forward", "feed_forward", _feed_forward),
    ):
        for index, entry in enumerate(run[name]):
            which = _which(entry["layers"], count)
            shown = "" if index else label or entry["kind"]
            rows.append((shown, f"{which}: {describe(entry)}"))
    return rows


def head_rows(head: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of label and text from ``head_facts``."""
    layers, tokens = ", ".join(map(str, head["target_layers"])), head["tokens"]
    own = [name for name in ("embedding", "output") if head[f"own_{name}"]]
    return [
        ("use", f"{head['kind']}: give it with --draft-model beside its model"),
        ("reads", f"the inputs of layers {layers} of a model of width {head['target_hidden']:,}"),
        ("layers", f"{head['layers']} of width {head['hidden']:,}"),
        ("drafts", f"blocks of {head['block'] - 1} tokens" if head["block"] else "token by token"),
        ("tokens", "all of the model" if tokens is None else f"{tokens:,} of the model's"),
        ("matrices", f"its own {' and '.join(own)}" if own else "the model's"),
        ("weights", format_bytes(head["weights"])),
    ]


def _which(layers: Sequence[int], count: int) -> str:
    if len(layers) == count:
        return "all layers" if count > 1 else "the layer"
    first = ", ".join(map(str, layers[:3]))
    return f"{len(layers)} of {count} layers ({first}{', ...' if len(layers) > 3 else ''})"


def _drafts(drafts: Mapping[str, Any]) -> str:
    """The ways to draft tokens for the model."""
    others = "repeated text or a smaller model"
    if drafts["problem"] is not None:
        return f"by {others}; its draft block cannot be used: {drafts['problem']}"
    if not drafts["blocks"]:
        return f"by {others}"
    parts = (
        f"by its draft block: {format_bytes(drafts['total'])} more memory",
        f"{format_bytes(drafts['weights'])} of it weights",
        f"{drafts['kv_per_token']:,} bytes a token",
        f"a draft reads {format_bytes(drafts['read'])} for one of the first "
        f"{drafts['frequent']:,} tokens, {format_bytes(drafts['read_for_all'])} for one of all",
    )
    return ", ".join(parts)


def _attention(entry: Mapping[str, Any]) -> str:
    parts = [f"{_heads(entry)} of {entry['head_dim']}"]
    if entry["window"]:
        parts.append(f"{'chunks of' if entry['chunked'] else 'window'} {entry['window']:,}")
    if not entry["owns_kv"]:
        parts.append("keys and values of an earlier layer")
    else:
        parts.append(f"{entry['kv_per_token']:,} bytes a token in each")
    return ", ".join([*parts, _rope(entry["rope"])])


def _heads(entry: Mapping[str, Any]) -> str:
    heads, kv_heads = entry["heads"], entry["kv_heads"]
    return f"{heads} heads" if heads == kv_heads else f"{heads} heads ({kv_heads} for keys, values)"


def _rope(rope: Mapping[str, Any]) -> str:
    text = f"rotates {rope['channels']} channels in {rope['pairs']}, base {rope['base']:,.0f}"
    if rope["scaling"]:
        text += f", {rope['scaling']} scaling {rope['factor']:g}"
    if rope["divisors"]:
        text += f", divided by {' or '.join(rope['divisors'])}"
    return text


def _recurrent(entry: Mapping[str, Any]) -> str:
    if entry["kind"] == "short convolution":
        return f"gated convolution of {entry['taps']} tokens"
    if entry["kind"] == "mamba":
        return (
            f"{entry['heads']} heads of {entry['head_dim']} with states of "
            f"{entry['state_size']}, convolution of {entry['taps']} tokens"
        )
    return (
        f"{entry['value_heads']} value heads and {entry['key_heads']} key heads of "
        f"{entry['head_dim']}, convolution of {entry['taps']} tokens"
    )


def _feed_forward(entry: Mapping[str, Any]) -> str:
    parts = [f"width {entry['width']:,}"] if entry["width"] else []
    if "experts" in entry:
        parts.append(
            f"{entry['experts_used']} of {entry['experts']} experts of width "
            f"{entry['expert_width']:,}"
        )
        if entry["shared_expert_width"]:
            parts.append(f"a shared one of {entry['shared_expert_width']:,}")
    return " and ".join(parts)
