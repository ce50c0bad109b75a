"""A chat template from its source, rendered once."""

from reference.model.chat_template import ChatTemplate, RenderedChat

TURNS = [{"role": "user", "content": "Hi"}]


def render(source: str, messages=None, **options) -> RenderedChat:
    with ChatTemplate(source, source="m.gguf", bos_token="<s>", eos_token="</s>") as template:
        return template.render(messages or [{"role": "user", "content": "hi"}], **options)
