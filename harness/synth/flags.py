"""The flags of ``zinc-rt synth``: one for every field of a specification."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from harness.cli.parser import Parser, real_number, whole_number
from harness.settings import group_of
from harness.synth.architectures import ARCHITECTURES
from harness.synth.spec import GROUPS, QUANTS, ROPE_SCALINGS, SSM_PACKINGS, SynthSpec

COMMON = ("architecture", "quant", "seed", "layers", "hidden", "heads", "vocab", "context")
"""The fields whose flags the short help shows."""
TITLES: Mapping[str, str] = {
    "experts": "feed-forward networks chosen by token (mixture of experts)",
    "recurrent": "gated delta-net layers (Qwen 3.5, Qwen3-Next)",
    "short_conv": "short convolutions (LFM 2)",
    "mamba": "Mamba-2 layers (Granite 4, Nemotron, Falcon-H1)",
    "latent": "attention over latent rows (DeepSeek)",
    "gemma": "Gemma only",
    "scales": "factors of Granite",
}
HELP: Mapping[str, str] = {
    "architecture": f"family of the model: one of {', '.join(ARCHITECTURES)}",
    "quant": f"how matrices are stored: one of {', '.join(QUANTS)}",
    "seed": "start of the random numbers; the same seed gives the same bytes",
    "layers": "number of layers",
    "hidden": "width of the residual stream",
    "heads": "query heads of a layer",
    "kv_heads": "key and value heads of a layer",
    "head_dim": "channels of a head",
    "feed_forward": "width of the feed-forward network: one, or one for each layer",
    "vocab": "number of tokens in the vocabulary",
    "context": "most positions of the model",
    "tied": "use the embedding as the output matrix",
    "qkv_bias": "biases of queries, keys and values",
    "attention_output_bias": "a bias of the attention's output projection",
    "fused_qkv": "store queries, keys and values as one matrix",
    "rope_freqs": "a tensor of rotary frequency divisors, as Llama 3 and EXAONE 4 have",
    "rope_base": "base of the rotary frequencies",
    "rope_scaling": "how the rotary frequencies are scaled",
    "rope_factor": "factor of --rope-scaling",
    "rope_original_context": "positions before --rope-scaling",
    "query_growth": "growth of the queries with their position (mistral3); 0 is none",
    "yarn_log_multiplier": "factor of YaRN's logarithm (mistral3, deepseek2); 0 is no key",
    "leading_dense": "number of first layers without experts (lfm2moe, glm4moe, deepseek2)",
    "expert_groups": "groups of experts, of which a token chooses half (bailingmoe2)",
    "head_norms": "norms of the heads of queries and keys (glm4moe)",
    "logit_scale": "factor of the logits (cohere2)",
    "long_rope": "two tensors of frequency divisors, as Phi 3 has",
    "window": "positions that layers with a window attend to; 0 is no window",
    "expand_to_f32": "write the same weights as F32",
    "nextn_layers": "prediction blocks after the last layer",
    "parallel": "attention and feed forward read the same input (stablelm, gptneox, falcon)",
    "key_outliers": "size of two outlier channels of every key head; 0 is none",
    "mtp_agreement": "share of the predictions of these blocks that are right, 0 to 1",
    "eagle_agreement": "share of the predictions of written heads that are right, 0 to 1",
    "draft_agreement": "share of the predictions that are right if this model drafts for another "
    "one with an agreement and as many tokens, 0 to 1",
    "experts.count": "experts of a layer",
    "experts.used": "experts that a token uses",
    "experts.width": "width of an expert",
    "experts.shared_width": "width of the expert that every token uses; 0 is none",
    "experts.fused": "store an expert's gate and up matrices as one",
    "experts.every": "one layer of this many has experts (llama4)",
    "recurrent.interval": "one layer of this many is full attention instead",
    "recurrent.state": "channels of a key and of a value",
    "recurrent.key_heads": "key heads",
    "recurrent.value_heads": "value heads",
    "recurrent.kernel": "tokens of the convolution",
    "recurrent.packing": "how the projections are stored",
    "recurrent.listed": "list the recurrent layers in the metadata, not their interval",
    "short_conv.interval": "one layer of this many is full attention instead",
    "short_conv.kernel": "tokens of the convolution",
    "mamba.interval": "one layer of this many is full attention instead",
    "mamba.state": "size of the state of a channel",
    "mamba.heads": "heads of all values together",
    "mamba.groups": "groups of heads that share their inputs and outputs of the state",
    "mamba.kernel": "tokens of the convolution",
    "mamba.inner": "width of all values; 0 is twice the residual stream",
    "mamba.normed": "a norm of all values, which only falcon-h1 may lack",
    "latent.rank": "channels of a row that do not rotate",
    "latent.query_rank": "channels that queries are made of; 0 is the residual stream",
    "latent.unrotated": "channels of a query that do not rotate",
    "latent.rotated": "channels of rows and queries that rotate",
    "latent.value": "channels of a value",
    "latent.groups": "groups of experts",
    "latent.groups_used": "groups of which a token uses experts",
    "latent.softmax": "weight experts by a softmax, as DeepSeek V2 does",
    "gemma.window": "positions that layers with a window attend to",
    "gemma.period": "one layer of this many attends to all positions",
    "gemma.rope_base": "base of the rotary frequencies of layers with a window",
    "gemma.softcap": "bound of the logits",
    "gemma.head_dim": "channels of a head in layers with a window (gemma4)",
    "gemma.kv_heads": "key and value heads of layers with a window (gemma4)",
    "gemma.values_from_keys": "full layers have no value projection (gemma4)",
    "gemma.shared_kv_layers": "last layers without keys and values of their own (gemma4)",
    "gemma.per_layer_width": "width of the embeddings of each layer; 0 is none (gemma4)",
    "gemma.output_scale": "a factor of every layer's output (gemma4)",
    "scales.embedding": "factor of the embeddings",
    "scales.residual": "factor of what a layer adds to the residual stream",
    "scales.attention": "factor of the attention scores",
    "scales.logits": "divisor of the logits",
}
"""Help text of each field."""


def widths(text: str) -> int | tuple[int, ...]:
    """One width, or several with commas."""
    found = tuple(map(whole_number, text.split(",")))
    return found if len(found) > 1 else found[0]


CHOSEN: Mapping[str, dict[str, Any]] = {
    "architecture": {"choices": ARCHITECTURES, "required": True, "metavar": "NAME"},
    "quant": {"choices": QUANTS, "metavar": "TYPE"},
    "rope_scaling": {"choices": ROPE_SCALINGS},
    "recurrent.packing": {"choices": SSM_PACKINGS},
    "feed_forward": {"type": widths, "metavar": "WIDTH[,WIDTH]"},
    "expand_to_f32": {"action": "store_true"},
}
"""Options of flags that the type of their field does not determine."""


def add_fields(parser: Parser) -> None:
    """Add a flag for every field: ``--layers N``, ``--experts-count N`` and so on."""
    _add(parser, group_of(parser, "model"), SynthSpec, "", "")
    for name, kind in GROUPS.items():
        _add(parser, group_of(parser, TITLES[name]), kind, f"{name}-", f"{name}.")


def _add(
    parser: Parser, group: argparse._ArgumentGroup, kind: type, flags: str, names: str
) -> None:
    types = get_type_hints(kind)
    for field in fields(kind):
        if field.name in GROUPS:
            continue
        name = f"{names}{field.name}"
        (value_type, *_) = get_args(types[field.name]) or (types[field.name],)
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if value_type is not bool:
            how = {"type": whole_number, "metavar": "N"}
        if value_type is float:
            how = {"type": real_number, "metavar": "NUMBER"}
        short = "arch" if field.name == "architecture" else field.name
        flag = f"--{flags}{short}".replace("_", "-")
        # The group's underscore is accepted too.
        spelled = (flag, f"--{flags}{short.replace('_', '-')}")
        how = CHOSEN.get(name, how)
        group.add_argument(*dict.fromkeys(spelled), dest=name, help=HELP.get(name, ""), **how)
        if name not in COMMON:
            parser.rare.add(name)
