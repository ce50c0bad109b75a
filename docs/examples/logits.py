"""Score a text: the log-probability of each token after those before it, and the perplexity."""

import numpy as np

from zinc_rt import LLM

TEXT = "The sky is blue."

with LLM(progress=False) as llm:
    tokens = llm.tokenizer.encode(TEXT)
    rows = llm.logits(tokens).astype(np.float64)  # a row after every token: exact on every device
    largest = rows.max(axis=1, keepdims=True)
    log_p = rows - largest - np.log(np.exp(rows - largest).sum(axis=1, keepdims=True))
    scores = log_p[np.arange(len(tokens) - 1), tokens[1:]]
    for token, score in zip(tokens[1:], scores, strict=True):
        print(f"{score:9.4f}  {llm.tokenizer.decode_bytes([token])!r}")
    print(f"sum {scores.sum():.4f}, perplexity {np.exp(-scores.mean()):.3f}")
