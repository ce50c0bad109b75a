"""Score a text: the log-probability of each token after those before it, and the perplexity."""

from zinc_rt import LLM

TEXT = "The sky is blue."

with LLM(progress=False) as llm:
    (score,) = llm.score(TEXT, top=1)
    for position, token in enumerate(score.tokens[1:], 1):
        log = score.log_probabilities[position]  # binary32, the same bits on every device
        likeliest = llm.detokenize(score.top_tokens[position])
        print(f"{log:9.4f}  {llm.detokenize([token])!r}, likeliest {likeliest!r}")
    print(f"sum {score.total!r}, perplexity {score.perplexity:.3f}")
