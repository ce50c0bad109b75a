"""The tokenizer keys of a synthetic model: a small byte-level BPE, or those of another file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from contract.errors import ConfigError
from harness.synth.spec import SynthSpec
from reference.model.gguf.file import open_gguf
from reference.model.tokenizer import TokenKind
from reference.model.tokenizer.byte_alphabet import LETTER_OF_BYTE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "Ġ t", "Ġ a", "h e", "i n", "r e", "o n", "Ġt he", "e r",
    "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t", "i s",
)  # fmt: skip
PRE_TOKENIZER = {
    **dict.fromkeys(("llama", "ernie4_5", "granite", "granitemoe", "granitehybrid"), "smollm"),
    **dict.fromkeys(("internlm2", "minicpm", "ernie4_5-moe"), "smollm"),
    "exaone4": "exaone4",
    **dict.fromkeys(("baichuan", "mamba2"), "gpt-2"),
    **{name: name for name in ("exaone", "falcon", "bailingmoe")},
    "arcee": "llama-bpe",
    "gpt2": "gpt-2",
    "hy_v3": "hunyuan-dense",
    "mistral4": "tekken",
    **dict.fromkeys(("starcoder", "mellum"), "starcoder"),
    "smallthinker": "qwen2",
    "maincoder": "llama-bpe",
    "jais2": "llama-bpe",
    "codeshell": "starcoder",
    "orion": "llama-bpe",
    "pangu-embedded": "llama-bpe",
    "xverse": "llama-bpe",
    "qwen": "qwen2",
    "nemotron": "dbrx",
    "chatglm": "chatglm-bpe",
    "deepseek": "deepseek-llm",
    "olmo": "olmo",
    "falcon-h1": "falcon-h1",
    **{name: name for name in ("minimax-m2", "bailingmoe2", "exaone-moe", "afmoe")},
    "deepseek2": "deepseek-v3",
    "kimi-linear": "kimi-k2",
    "apertus": "tekken",
    "starcoder2": "starcoder",
    "stablelm": "stablelm2",
    "phi2": "phi-2",
    "gptneox": "olmo",
    "llama4": "llama4",
    "mistral3": "tekken",
    "seed_oss": "seed-coder",
    "smollm3": "llama-bpe",
    **dict.fromkeys(("lfm2", "lfm2moe"), "lfm2"),
    **dict.fromkeys(("glm4", "glm4moe"), "glm4"),
    **dict.fromkeys(("phi3", "olmo2"), "dbrx"),
    "olmoe": "olmo",
    "hunyuan-dense": "hunyuan-dense",
    "hunyuan-moe": "hunyuan",
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "pixtral"),
    **dict.fromkeys(("dots1", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen3next"), "qwen2"),
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe"), "qwen2"),
    **dict.fromkeys(("qwen35", "qwen35moe"), "qwen35"),
    "gpt-oss": "gpt-4o",
    **dict.fromkeys(("command-r", "cohere2"), "command-r"),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TURNS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3n"), ("<start_of_turn>", "<end_of_turn>")),
    "gemma4": ("<|turn>", "<turn|>"),
}
GEMMA_TEMPLATE = (
    "{{{{ bos_token }}}}{{% for message in messages %}}{start}"
    "{{{{ 'model' if message['role'] == 'assistant' else message['role'] }}}}\n"
    "{{{{ message['content'] }}}}{end}\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}{start}model\n{{% endif %}}"
)
GEMMA_SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
GEMMA_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
GEMMA_SCORE = -1000.0
"""The score of every token of a gemma4 vocabulary, whose merges have ranks instead."""
TOKENS_KEY = "tokenizer.ggml.tokens"
TYPES_KEY = "tokenizer.ggml.token_type"
SCORES_KEY = "tokenizer.ggml.scores"


def own_tokenizer(spec: SynthSpec) -> dict[str, Any]:
    """A tokenizer of 256 bytes, a few special tokens and sixteen merges, padded to
    ``spec.vocab``."""
    keys = _gemma_keys(spec) if spec.gemma is not None else _byte_level_keys(spec)
    return padded(keys, spec.vocab)


def _byte_level_keys(spec: SynthSpec) -> dict[str, Any]:
    tokens = [*LETTER_OF_BYTE, *SPECIAL_TOKENS, *(merge.replace(" ", "") for merge in MERGES)]
    first_special = len(LETTER_OF_BYTE)
    kinds = np.full(len(tokens), TokenKind.NORMAL, np.int32)
    kinds[first_special : first_special + len(SPECIAL_TOKENS)] = TokenKind.CONTROL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZER[spec.architecture],
        TOKENS_KEY: [token.encode() for token in tokens],
        TYPES_KEY: kinds,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": first_special + 1,
        "tokenizer.ggml.eos_token_id": first_special + 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _gemma_keys(spec: SynthSpec) -> dict[str, Any]:
    """Keys of a vocabulary merged by score, or by rank (gemma4), with a token for every
    byte."""
    start, end = GEMMA_TURNS[spec.architecture]
    control = [*GEMMA_SPECIAL_TOKENS, start, end]
    merges = [merge.replace("Ġ", GEMMA_SPACE) for merge in MERGES]
    pieces = [*(merge.replace(" ", "") for merge in merges), GEMMA_SPACE]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = np.full(len(tokens), TokenKind.NORMAL, np.int32)
    kinds[: len(control)] = TokenKind.CONTROL
    kinds[control.index("<unk>")] = TokenKind.UNKNOWN
    kinds[len(control) : len(tokens) - len(pieces)] = TokenKind.BYTE
    ranked = spec.architecture == "gemma4"
    scores = np.full(len(tokens), GEMMA_SCORE if ranked else 0.0, np.float32)
    if not ranked:
        scores[-len(pieces) :] = -np.arange(len(pieces), dtype=np.float32)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4" if ranked else "llama",
        TOKENS_KEY: [token.encode() for token in tokens],
        SCORES_KEY: scores,
        TYPES_KEY: kinds,
        "tokenizer.ggml.bos_token_id": control.index("<bos>"),
        "tokenizer.ggml.eos_token_id": control.index("<eos>"),
        "tokenizer.ggml.unknown_token_id": control.index("<unk>"),
        "tokenizer.ggml.padding_token_id": control.index("<pad>"),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": GEMMA_TEMPLATE.format(start=start, end=end),
    }
    return keys | ({"tokenizer.ggml.merges": merges} if ranked else {})


def copied_tokenizer(path: Path, vocab: int | None) -> dict[str, Any]:
    """Every ``tokenizer.*`` key of ``path``, padded to ``vocab`` tokens (None: unchanged). Raises
    ModelFileError for a file that is not a model, ConfigError when it has no vocabulary or more
    than ``vocab`` tokens."""
    with open_gguf(path) as file:
        keys: dict[str, Any] = {}
        for key, value in file.metadata.items():
            if key.startswith("tokenizer."):
                keys[key] = value.to_list() if hasattr(value, "to_list") else value
        keys = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in keys.items()}
    if TOKENS_KEY not in keys:
        raise ConfigError(f"{path}: has no {TOKENS_KEY}; name a file with a vocabulary")
    return keys if vocab is None else padded(keys, vocab)


def padded(keys: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Tokenizer keys with unused ``[PADn]`` tokens up to ``vocab``."""
    tokens = keys[TOKENS_KEY]
    missing = vocab - len(tokens)
    if missing < 0:
        raise ConfigError(f"synthetic model: vocab is {vocab}, the tokenizer has {len(tokens)}")
    keys = {**keys, TOKENS_KEY: [*tokens, *(b"[PAD%d]" % n for n in range(len(tokens), vocab))]}
    for key, filler in ((TYPES_KEY, TokenKind.UNUSED), (SCORES_KEY, 0)):
        if key in keys:
            keys[key] = np.append(keys[key], np.full(missing, filler, keys[key].dtype))
    return keys
