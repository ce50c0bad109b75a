"""Continue several prompts at once. The same seed gives the same text on every device."""

from zinc_rt import LLM, SamplingParams

PROMPTS = ["The sky is", "Water is", "Once upon a time"]

with LLM(progress=False) as llm:  # the default model; LLM("model.gguf") takes a file of your own
    sampled = SamplingParams(max_tokens=32, temperature=0.8, seed=7)
    for output in llm.generate(PROMPTS, sampled):
        print(PROMPTS[output.index] + output.text)
        print("--")
