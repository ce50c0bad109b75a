"""Hold a conversation of two turns: each answer goes back into the list of messages."""

from zinc_rt import LLM, SamplingParams

QUESTIONS = ["Why is the sky blue?", "Say it in one short sentence."]

with LLM(progress=False) as llm:
    messages = [{"role": "system", "content": "You answer briefly."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (answer,) = llm.chat(messages, SamplingParams(max_tokens=64))
        messages.append({"role": "assistant", "content": answer.text})
        print(f"> {question}\n{answer.text}")
        print(f"({answer.cached_tokens} of {len(answer.prompt_tokens)} prompt tokens were cached)")
