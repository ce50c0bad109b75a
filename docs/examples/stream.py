"""Print text as it is generated, then what the finished answer holds."""

from zinc_rt import LLM, SamplingParams

with LLM(progress=False) as llm:
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=48))
    for piece in stream:
        print(piece.text, end="", flush=True)
    completion = stream.output.completion
    print(f"\n({len(completion.tokens)} tokens, finish reason {completion.finish_reason})")
