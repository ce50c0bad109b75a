"""The tokenizer keys of a synthetic model: a small byte-level BPE, or those of another file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from contract.errors import ConfigError
from harness.synth.spec import SynthSpec
from reference.model.gguf import open_gguf
from reference.model.tokenizer import TokenKind
from reference.model.tokenizer.byte_alphabet import LETTER_OF_BYTE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "Ġ t", "Ġ a", "h e", "i n", "r e", "o n", "Ġt he", "e r",
    "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t", "i s",
)  # fmt: skip
PRE_TOKENIZER = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS_KEY = "tokenizer.ggml.tokens"
TYPES_KEY = "tokenizer.ggml.token_type"
SCORES_KEY = "tokenizer.ggml.scores"


def own_tokenizer(spec: SynthSpec) -> dict[str, Any]:
    """256 bytes, three special tokens and sixteen merges, padded to ``spec.vocab``."""
    tokens = [*LETTER_OF_BYTE, *SPECIAL_TOKENS, *(merge.replace(" ", "") for merge in MERGES)]
    first_special = len(LETTER_OF_BYTE)
    kinds = np.full(len(tokens), TokenKind.NORMAL, np.int32)
    kinds[first_special : first_special + len(SPECIAL_TOKENS)] = TokenKind.CONTROL
    keys = {
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
    return padded(keys, spec.vocab)


def copied_tokenizer(path: Path, vocab: int | None) -> dict[str, Any]:
    """Every ``tokenizer.*`` key of ``path``, padded to ``vocab`` tokens (None: as it is).

    Raises ModelFileError for a file that is not a model, ConfigError when it has no vocabulary
    or more than ``vocab`` tokens.
    """
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
