"""OpenAI's Python client against `zinc-rt serve`: whole, streamed, and asked again."""

import os

from openai import OpenAI

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]

with OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    asked = {"model": model, "messages": QUESTION, "max_tokens": 32, "seed": 7}
    whole = client.chat.completions.create(**asked)
    text = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        text += chunk.choices[0].delta.content or ""
    print(text)
    print("fingerprint:", whole.system_fingerprint)
    print("streamed and whole are the same:", text == whole.choices[0].message.content)
