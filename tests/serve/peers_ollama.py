"""The tests of Ollama's server (integration, server, middleware) as requests."""

from __future__ import annotations

from tests.serve.peers import (
    CHAT,
    EMBEDDINGS,
    FUNCTION,
    MEDIA,
    MESSAGES,
    MUST,
    RESPONSES,
    TALK,
    TEXT,
    TOOL,
    TURN,
    WEATHER,
    Row,
    absent,
    passes,
    refused,
)

SHORT = {"num_predict": 8, "seed": 1, "temperature": 0}
ASKED = {"model": "tiny", "prompt": "The sky is", "options": SHORT, "think": False}
TALKED = {"model": "tiny", "messages": [TURN], "options": SHORT, "think": False}
WHOLE = {"stream": False}
LONG = {"options": {"num_predict": 60, "seed": 1}, **WHOLE}
FILES = "models are files of the catalog or the hub; the server makes and copies none"
CLOUD = "the server asks no other server"
PICTURE = {**TURN, "images": ["AAAA"]}
PICTURE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [
    {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}  # fmt: skip
RESULT = {"role": "tool", "tool_name": "weather", "content": "Sunny."}
PAST_CALL = {"role": "assistant", "tool_calls": [
    {"id": "call_1", "type": "function",
     "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]}  # fmt: skip
PAST_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}
ITEM_CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
ITEM_RESULT = {"type": "function_call_output", "call_id": "c", "output": "Sunny."}
ANTHROPIC = {"model": "tiny", "max_tokens": 8, "messages": [TURN], "seed": 1}
OWN_TOOL = {"name": "weather", "input_schema": WEATHER}
USED = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}}
GAVE = {"type": "tool_result", "tool_use_id": "call_1", "content": "Sunny."}
SHORT_RESPONSE = {"max_output_tokens": 8, "reasoning": {"effort": "none"}}
STREAM = {"stream": True}
LISTED = {"logprobs": True, "top_logprobs": 5}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def used(block: dict[str, object]) -> dict[str, object]:
    turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [GAVE]}]
    return {**ANTHROPIC, "messages": [TURN, *turns]}


# fmt: off
ROWS: tuple[Row, ...] = (
    passes("integration/api::generate[stream]", "/api/generate", ASKED,
           **{"0__response": ..., "last__done": True, "last__eval_count": 8}),
    passes("integration/api::generate[whole]", "/api/generate", {**ASKED, **WHOLE}, done=True,
           done_reason="length", prompt_eval_count=..., eval_duration=...),
    passes("integration/api::chat[stream]", "/api/chat", TALKED,
           **{"0__message__role": "assistant", "last__done": True}),
    passes("integration/api::chat[whole]", "/api/chat", {**TALKED, **WHOLE}, eval_count=8,
           message__content=...),
    passes("integration/api::list_models", "GET /api/tags", models__0__name=...),
    passes("integration/api::show_model", "/api/show", {"model": "tiny"}, details=...,
           capabilities=...),
    passes("integration/api::ps", "GET /api/ps", models=...),
    passes("integration/api::version", "GET /api/version", version=...),
    *(passes("integration/api::logprobs", path, {**body, **more, **LISTED},
             logprobs__7__top_logprobs__4__logprob=..., logprobs__0__bytes=...)
      for path, body in (("/api/generate", ASKED), ("/api/chat", TALKED))
      for more in (WHOLE, {**WHOLE, "raw": True} if body is ASKED else {**WHOLE, "think": True})),
    *(passes("integration/api::logprobs[stream]", path, {**body, **LISTED},
             **{"0__logprobs__0__top_logprobs__4__token": ..., "last__done": True})
      for path, body in (("/api/generate", ASKED), ("/api/chat", TALKED))),
    passes("integration/api::logprobs[none]", "/api/chat",
           {**TALKED, **WHOLE, "logprobs": True}, logprobs__7__top_logprobs=[]),
    passes("integration/context::unload", "/api/generate", {"model": "tiny", "keep_alive": 0},
           done=True),
    refused("integration/context::long_input",
            "a prompt is never cut: one that is too long is refused", "/api/generate",
            {**ASKED, "prompt": "abcdefgh" * 400}, error=...),
    refused("integration/context::generate_with_context", "the text is the prompt", "/api/generate",
            {**ASKED, "context": [1, 2]}, error=...),
    absent("integration/create::create", FILES, "/api/create", {"model": "x"}),
    refused("integration/llm_image::vision", MEDIA, "/api/chat", {**TALKED, "messages": [PICTURE]},
            error=...),
    passes("integration/embed::embed[one]", "/api/embed", {"model": "tiny", "input": "a"},
           embeddings__0__0=..., prompt_eval_count=...),
    passes("integration/embed::embed[many]", "/api/embed", {"model": "tiny", "input": ["a", "b"]},
           embeddings__1__0=...),
    passes("integration/embed::embeddings[old]", "/api/embeddings",
           {"model": "tiny", "prompt": "a"}, embedding__0=...),
    refused("integration/embed::empty_list", "nothing to embed is an error on every route",
            "/api/embed", {"model": "tiny", "input": []}, error=...),
    refused("integration/embed::truncate", "a text is never cut: one that is too long is refused",
            "/api/embed", {"model": "tiny", "input": "abcdefgh" * 400}, error=...),
    passes("integration/embed::truncate_error", "/api/embed",
           {"model": "tiny", "input": "abcdefgh" * 400, "truncate": False}, 400, error=...),
    passes("integration/thinking::disabled", "/api/chat", {**TALKED, **WHOLE}, done=True),
    passes("integration/thinking::enabled", "/api/chat", {**TALKED, **WHOLE, "think": True},
           done=True),
    passes("integration/tools_routes::ollama", "/api/chat", {**TALKED, **LONG, "tools": [TOOL]},
           message__role="assistant"),
    passes("integration/tools_routes::openai_chat_completions", CHAT, {**TALK, **MUST},
           choices__0__message__tool_calls__0__function__name="weather"),
    passes("integration/tools_routes::openai_responses", RESPONSES,
           {"input": "Go.", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required",
            "reasoning": {"effort": "none"}, "max_output_tokens": 200},
           output__0__name="weather"),
    passes("integration/tools_routes::anthropic_messages", MESSAGES,
           {**ANTHROPIC, "max_tokens": 200, "tools": [OWN_TOOL], "tool_choice": {"type": "any"}},
           stop_reason="tool_use"),
    passes("server/routes_generate::messages_with_system", "/api/chat",
           {**TALKED, **WHOLE, "messages": [{"role": "system", "content": "x"}, TURN]}, done=True),
    passes("server/routes_generate::messages_with_tools", "/api/chat",
           {**TALKED, **WHOLE, "messages": [TURN, CALLED, RESULT], "tools": [TOOL]}, done=True),
    passes("server/routes_generate::missing_body", "/api/chat", None, 400, error=...),
    passes("server/routes_generate::missing_model", "/api/chat", {**TALKED, "model": "absent"},
           404, error=...),
    passes("server/routes_generate::load_model", "/api/chat", {"model": "tiny", "messages": []},
           done=True, done_reason="load"),
    passes("server/routes_generate::prompt_with_system", "/api/generate",
           {**ASKED, **WHOLE, "system": "Be brief."}, done=True),
    refused("server/routes_generate::prompt_with_template", "the model's own template is used",
            "/api/generate", {**ASKED, "template": "{{ .Prompt }}"}, error=...),
    passes("server/routes_generate::raw", "/api/generate", {**ASKED, **WHOLE, "raw": True},
           prompt_eval_count=...),
    passes("server/routes_generate::format", "/api/generate",
           {**ASKED, **LONG, "format": {"const": "42"}}, response='"42"'),
    passes("server/routes_generate::format[json]", "/api/generate",
           {**ASKED, **WHOLE, "format": "json"}, done=True),
    passes("server/routes_generate::format[invalid]", "/api/generate", {**ASKED, "format": "xml"},
           400, error=...),
    passes("server/routes_options::options", "/api/generate",
           {**ASKED, **WHOLE, "options": {**SHORT, "num_ctx": 64, "num_gpu": 1, "top_k": 3}},
           eval_count=8),
    passes("server/routes_parse_error::thinking", "/api/generate",
           {**ASKED, **WHOLE, "think": "high"}, done=True),
    passes("server/routes::version_handler", "GET /api/version", version=...),
    passes("server/routes::openai_list_models", "GET /v1/models", object="list"),
    passes("server/routes::openai_retrieve_model", "GET /v1/models/tiny", id="tiny"),
    passes("server/routes::show_unknown", "/api/show", {"model": "absent"}, 404, error=...),
    passes("server/routes::method_not_allowed", "GET /api/show", None, 405, error=...),
    absent("server/routes::create_model_handler", FILES, "/api/create", {"model": "x"},
           error="POST /api/create: Not Found; GET /openapi.json lists the routes"),
    absent("server/routes::copy_model_handler", FILES, "/api/copy", {"source": "a"}),
    absent("server/routes_delete::delete", "DELETE /v1/models/NAME, for admins",
           "DELETE /api/delete", {"model": "absent"}),
    absent("server/auth::push", FILES, "/api/push", {"model": "x"}),
    passes("middleware/openai::chat_handler", CHAT, TALK, object="chat.completion"),
    passes("middleware/openai::chat_handler_with_options", CHAT,
           {**TALK, "stop": ["\n", "stop"], "frequency_penalty": 1.0, "presence_penalty": 1.0,
            "top_p": 0.5, "temperature": 0.3}, choices=...),
    passes("middleware/openai::chat_handler_with_streaming_usage", CHAT,
           {**TALK, **STREAM, "stream_options": {"include_usage": True}},
           last__usage__completion_tokens=8),
    refused("middleware/openai::chat_handler_with_image_content", MEDIA, CHAT,
            {"messages": [{"role": "user", "content": [PICTURE_PART]}]}, error__code="unsupported"),
    passes("middleware/openai::chat_handler_with_tools", CHAT,
           {**TALK, "tools": [TOOL], "messages": [TURN, PAST_CALL, PAST_RESULT]}, choices=...),
    passes("middleware/openai::chat_handler_with_tools_and_thinking", CHAT,
           {**TALK, "tools": [TOOL],
            "messages": [TURN, {**PAST_CALL, "reasoning_content": "hm"}, PAST_RESULT]},
           choices=...),
    passes("middleware/openai::tool_response_with_name", CHAT,
           {**TALK, "messages": [TURN, PAST_CALL, {"role": "tool", "name": "weather",
                                                   "content": "Sunny."}]}, choices=...),
    passes("middleware/openai::chat_handler_error", CHAT, {"messages": [{"role": "user",
           "content": 2}]}, 400, error=...),
    passes("middleware/openai::completions_handler", TEXT,
           {"prompt": "a", "max_tokens": 2, "suffix": None}, object="text_completion"),
    refused("middleware/openai::completions_suffix",
            "only where the vocabulary has tokens for it", TEXT,
            {"prompt": "a", "suffix": "b"}, error__param="suffix"),
    passes("middleware/openai::completions_error", TEXT, {"prompt": {}}, 400, error=...),
    passes("middleware/openai::embed_handler", EMBEDDINGS, {"input": ["a", "b"]},
           data__1__embedding=...),
    passes("middleware/openai::embed_error", EMBEDDINGS, {"input": {}}, 400, error=...),
    passes("middleware/openai_encoding_format::base64", EMBEDDINGS,
           {"input": "a", "encoding_format": "base64"}, data__0__embedding=...),
    passes("middleware/openai_encoding_format::invalid", EMBEDDINGS,
           {"input": "a", "encoding_format": "zstd"}, 400, error__param="encoding_format"),
    *(passes("openai/openai::reasoning_effort", CHAT, {**TALK, "reasoning_effort": effort},
             choices=...) for effort in ("high", "medium", "low", "minimal", "xhigh", "none")),
    *(refused("openai/openai::reasoning_effort[unknown]", "efforts are OpenAI's", CHAT,
              {**TALK, "reasoning_effort": effort}, error__param="reasoning_effort")
      for effort in ("max", "ultra", "extreme")),
    *(passes("openai/openai::top_logprobs_range", CHAT,
             {**TALK, "logprobs": True, "top_logprobs": count}, choices=...)
      for count in (0, 1, 20)),
    *(passes("openai/openai::top_logprobs_range[invalid]", CHAT,
             {**TALK, "logprobs": True, "top_logprobs": count}, 400, error=...)
      for count in (-1, 21)),
    passes("openai/responses::message_item", RESPONSES,
           {**SHORT_RESPONSE, "input": [{"type": "message", "role": "user", "content": "a"}]},
           object="response"),
    passes("openai/responses::function_call_merge", RESPONSES,
           {**SHORT_RESPONSE, "input": [TURN, ITEM_CALL, ITEM_RESULT]}, object="response"),
    passes("openai/responses::function_call_output_with_content_array", RESPONSES,
           {**SHORT_RESPONSE, "input": [TURN, ITEM_CALL, {**ITEM_RESULT, "output": [
               {"type": "input_text", "text": "Sunny."}]}]}, object="response"),
    refused("openai/responses::image", MEDIA, RESPONSES,
            {"input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": "data:image/png;base64,AA"}]}]},
            error__code="unsupported"),
    passes("openai/responses::unknown_item_type", RESPONSES, {"input": [{"type": "unknown"}]}, 400,
           error=...),
    passes("openai/responses::web_search_tool", RESPONSES,
           {**SHORT_RESPONSE, "input": "a", "tools": [{"type": "web_search"}]},
           object="response"),
    passes("openai/responses::stream", RESPONSES, {**SHORT_RESPONSE, **STREAM, "input": "a"},
           **{"0__type": "response.created"}),
    passes("middleware/anthropic::basic", MESSAGES, ANTHROPIC, type="message"),
    passes("middleware/anthropic::system_array", MESSAGES,
           {**ANTHROPIC, "system": [{"type": "text", "text": "x"}]}, type="message"),
    passes("middleware/anthropic::options", MESSAGES,
           {**ANTHROPIC, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "stop_sequences": ["\n"]},
           type="message"),
    passes("middleware/anthropic::streaming", MESSAGES, {**ANTHROPIC, **STREAM},
           **{"0__type": "message_start", "last__type": "message_stop"}),
    passes("middleware/anthropic::tools", MESSAGES, {**ANTHROPIC, "tools": [OWN_TOOL]},
           type="message"),
    passes("middleware/anthropic::tool_result", MESSAGES, used(USED), type="message"),
    passes("middleware/anthropic::thinking", MESSAGES,
           {**ANTHROPIC, "thinking": {"type": "enabled", "budget_tokens": 1024}}, type="message"),
    *(passes("middleware/anthropic::missing", MESSAGES,
             {key: value for key, value in ANTHROPIC.items() if key != name}, 400, type="error")
      for name in ("model", "max_tokens", "messages")),
    *(passes("middleware/anthropic::tool_use_missing", MESSAGES,
             used({key: value for key, value in USED.items() if key != name}), 400, type="error")
      for name in ("id", "name")),
    passes("middleware/anthropic::invalid_json", MESSAGES, "{", 400, type="error"),
    passes("middleware/anthropic::unknown_model", MESSAGES, {**ANTHROPIC, "model": "absent"}, 404,
           type="error"),
    passes("middleware/anthropic::web_search_is_left_out", MESSAGES,
           {**ANTHROPIC, "tools": [OWN_TOOL, SEARCH]}, type="message"),
    passes("anthropic/anthropic::output_config_effort", MESSAGES,
           {**ANTHROPIC, "output_config": {"effort": "high"}}, type="message"),
    refused("anthropic/anthropic::image", MEDIA, MESSAGES,
            {**ANTHROPIC, "messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                             "data": "AA"}}]}]}, type="error"),
)
