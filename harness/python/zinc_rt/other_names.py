"""The names here for methods, arguments and attributes of vLLM and llama-cpp-python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

Call = TypeVar("Call", bound=Callable[..., Any])
NEEDLESS = "leave it out"
OF_SAMPLING = "it is an argument of SamplingParams"
ARGUMENTS: Mapping[str, str] = {
    name: advice
    for names, advice in (
        ("trust_remote_code enforce_eager dtype quantization tokenizer_mode", NEEDLESS),
        ("enable_prefix_caching enable_chunked_prefill chat_format", NEEDLESS),
        ("skip_special_tokens spaces_between_special_tokens detokenize", NEEDLESS),
        ("tokenizer load_format n_gpu_layers n_batch use_mmap", NEEDLESS),
        ("tensor_parallel_size pipeline_parallel_size", "here it is device, such as '0,1'"),
        ("gpu_memory_utilization", "here it is memory_budget, such as '20GB'"),
        ("max_num_batched_tokens", "here it is chunk"),
        ("n_threads", "here it is 'threads'"),
        ("n_ctx", "here it is 'context'"),
        ("model_path", "here it is 'model'"),
        ("verbose disable_log_stats", "here it is progress=False"),
        ("max_tokens temperature top_k top_p min_p seed n stop stop_token_ids", OF_SAMPLING),
        ("repeat_penalty presence_penalty frequency_penalty", OF_SAMPLING),
        ("logprobs log_probabilities logit_bias min_tokens ignore_eos ignore_end", OF_SAMPLING),
        ("download_dir", "here it is 'cache_dir'"),
        ("speculative_config", "here it is 'draft_model'"),
        ("prompt_logprobs", "LLM.score has those of a text"),
        ("structured_outputs guided_decoding", "here it is response_format of LLM.chat"),
        ("guided_json guided_regex guided_choice", "here it is response_format of LLM.chat"),
        ("grammar json_schema", "here it is response_format of LLM.chat"),
        ("do_sample", "temperature=0 takes the likeliest token, above 0 tokens are drawn"),
        ("echo", "LLM.score has the log-probabilities of a prompt"),
        ("bad_words", "logit_bias makes tokens less likely"),
        ("enable_lora lora_path", "here it is lora=['FILE.gguf']"),
        ("best_of use_beam_search", "n continuations are sampled, and none is chosen"),
        ("max_length max_new_tokens", "here it is 'max_tokens'"),
        ("chat_template_kwargs", "here it is thinking=True or False"),
        ("add_generation_prompt continue_final_message", NEEDLESS),
        ("prompt_token_ids", "give the token ids as the prompt"),
        ("stream", "LLM.stream and LLM.stream_chat do that"),
    )
    for name in names.split()
}
"""Advice for arguments of other programs that do not exist here by that name."""
ATTRIBUTES: Mapping[str, str] = {
    "get_tokenizer": "tokenizer",
    "encode": "tokenize or embed",
    "beam_search": "generate with SamplingParams(n=...)",
    "create_completion": "generate",
    "create_chat_completion": "chat",
    "create_embedding": "embed",
    "apply_chat_template": "encode_chat, which gives token ids",
    "get_default_sampling_params": "SamplingParams()",
    "llm_engine": "model",
    "prompt_logprobs": "LLM.score",
    "reasoning_content": "message",
    "metrics": "nothing of that kind",
    "logprob": "log_probabilities",
    "generated_text": "text",
    "choices": "completions",
    "content": "text",
}
"""Methods and attributes of other programs, with their names here."""


def refuse_attribute(owner: object, name: str) -> NoReturn:
    """Raise AttributeError for a missing attribute of ``owner``, with its name here if there is
    one."""
    here = f"; here it is {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{here}")


def refuse_unknown_arguments(call: Call) -> Call:
    """The method, with a TypeError for unknown arguments that gives their name here."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*others: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                hint = f"; {ARGUMENTS[name]}" if name in ARGUMENTS else ""
                raise TypeError(f"{call.__name__} has no argument {name!r}{hint}")
        return call(*others, **given)

    return cast(Call, checked)
