"""The table of all settings, in the groups that the help shows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from accel.user_folders import user_folder
from contract.dtypes import DEFAULT_KV, KV_DTYPES
from contract.types import MIN_TEMPERATURE
from harness.server_settings import SERVER
from harness.setting_kinds import (
    ADAPTER_FILES,
    DIR,
    DISK_CACHE_BYTES,
    INT32_MAX,
    MEGABYTE,
    UINT64_MAX,
    Setting,
    choice,
    integer,
    number,
    size,
    text,
    tokens,
)

TIERS = ("auto", "cpu", "native", "opencl", "vulkan", "cuda", "metal", "t1", "t2", "intel")


MODEL = (
    Setting(
        "model",
        text("NAME"),
        None,
        "a GGUF file, a name of `zinc-rt model list`, or hf.co/ORG/REPO[:QUANT]",
        "the model of `zinc-rt model use`, else smollm2-135m-instruct",
        common=True,
        aliases=("-m",),
    ),
    Setting("cache_dir", DIR, partial(user_folder, "cache"), "folder of the downloaded models"),
)
ADAPTERS = (
    Setting(
        "lora",
        ADAPTER_FILES,
        None,
        "a LoRA adapter of the model, a GGUF file, as [NAME=]FILE[:SCALE]: requests call it NAME, "
        "and SCALE multiplies what it adds. May be given several times",
        "none",
        repeats=True,
    ),
)
DEVICE = (
    Setting(
        "tier",
        choice(*TIERS),
        "auto",
        "what computes: auto takes the fastest tier of this machine, see `zinc-rt devices`",
        common=True,
    ),
    Setting(
        "threads",
        integer(1, 4096),
        None,
        "most processor threads to use",
        "all that this process may use",
        aliases=("-t",),
    ),
    Setting(
        "device",
        text("NAME|N"),
        "",
        "part of the name of the tier's device; for cuda also its number, or several for one "
        "model: 0,1 or all",
        "the tier's first device",
    ),
    Setting(
        "opencl_mode",
        choice("auto", "persistent", "launch"),
        "auto",
        "OpenCL runs a step as one kernel (persistent) or as one kernel for each op (launch)",
    ),
    Setting(
        "opencl_device",
        text("NAME"),
        "",
        "part of the name of an OpenCL device",
        "what --device says",
    ),
)
SAMPLING = (
    Setting(
        "temperature",
        number(MIN_TEMPERATURE, 100, or_zero=True),
        0.0,
        "0 always takes the likeliest token, so the same prompt gives the same text; above 0 "
        "tokens are drawn at random",
        common=True,
        aliases=("--temp",),
    ),
    Setting("top_k", integer(0, INT32_MAX), 40, "draw among the K likeliest tokens; 0 is off"),
    Setting(
        "top_p",
        number(0, 1),
        0.95,
        "draw among the likeliest tokens that have this probability together; 1 is off",
    ),
    Setting(
        "min_p",
        number(0, 1),
        0.05,
        "drop tokens less probable than this share of the likeliest one; 0 is off",
    ),
    Setting(
        "repeat_penalty",
        number(0.01, 100),
        1.0,
        "above 1 makes recent tokens less likely; 1 is off",
        aliases=("--repetition-penalty",),
    ),
    Setting("repeat_last_n", integer(0, INT32_MAX), 64, "number of tokens that count as recent"),
    Setting(
        "seed",
        integer(0, UINT64_MAX),
        0,
        "start of the random numbers; the same seed gives the same text",
        common=True,
        aliases=("-s",),
    ),
)
MEMORY = (
    Setting(
        "context",
        tokens(16, INT32_MAX),
        None,
        "most tokens of a prompt and its answer together",
        "what the model was made for, or less where memory is short",
        common=True,
        aliases=("-c", "--ctx-size", "--num-ctx", "--max-model-len"),
    ),
    Setting(
        "memory_budget",
        size(MEGABYTE),
        None,
        "most memory to use: of the graphics card, or of the machine where a tier uses that",
        "what is free now, less a margin",
    ),
    Setting(
        "kv_dtype",
        choice(*sorted(dtype.name for dtype in KV_DTYPES)),
        DEFAULT_KV.name,
        "how the keys and values of the context are stored; i12 gives the bits of f32 in 3/8 of "
        "its memory, q8_0 takes a quarter; less exact are i4r, 0.3 of f16, and i3r, 0.24",
    ),
    Setting(
        "prefix_cache",
        size(0),
        None,
        "part of the memory budget for prompts seen before: a prompt that begins in the same way "
        "is then read faster; 0 stores none",
        "all that running requests leave free",
    ),
    Setting(
        "host_cache",
        size(0),
        0,
        "memory of the machine, besides the budget, for prompts that the prefix cache has no "
        "room for",
    ),
    Setting(
        "state_cache",
        size(0),
        None,
        "part of the memory budget for saved states of recurrent layers: a prompt that begins in "
        "the same way goes on from there",
        "one state for each slot; with one slot two where there is a disk cache, else none",
    ),
    Setting(
        "disk_cache",
        DIR,
        None,
        "folder for what was computed for prompts: after a restart, too, a prompt that begins in "
        "the same way is read faster; several processes may share it",
        "none",
    ),
    Setting(
        "disk_cache_size",
        size(MEGABYTE),
        DISK_CACHE_BYTES,
        "most bytes in the folder of --disk-cache; what was used least recently is deleted first",
    ),
)
SPEED = (
    Setting(
        "chunk",
        tokens(1, 1 << 20),
        None,
        "most prompt tokens that a step reads; changes speed and memory, never the answer",
        "the tier's fastest, and 256 while other requests are being answered",
    ),
    Setting(
        "draft",
        integer(0, 63),
        11,
        "most tokens guessed ahead: from text that repeats itself, by the draft block of the file "
        "or by the draft model; changes speed, never the answer; 0 guesses none",
    ),
    Setting(
        "draft_model",
        text("NAME"),
        None,
        "smaller model of the same vocabulary, or EAGLE-3 or DFlash head of the model, that "
        "guesses ahead: a file or a name, as for --model; changes speed, never the answer",
        "none: the draft block of the file guesses, or the prompt",
        aliases=("--model-draft", "-md"),
    ),
)
OUTPUT = (
    Setting(
        "max_tokens",
        integer(1, INT32_MAX),
        512,
        "most tokens of an answer",
        common=True,
        aliases=("-n", "--n-predict", "--predict", "--num-predict", "--max-new-tokens"),
    ),
    Setting(
        "system",
        text(),
        None,
        "system prompt: the instructions before the conversation",
        "what the model's chat template says",
        common=True,
        aliases=("-sys", "--system-prompt"),
    ),
    Setting(
        "thinking",
        choice("auto", "on", "off", "low", "medium", "high"),
        "auto",
        "whether a model that can think before it answers does so, or how much",
        common=True,
    ),
)
GROUPS: Mapping[str, tuple[Setting, ...]] = {
    "model": MODEL,
    "adapters": ADAPTERS,
    "device": DEVICE,
    "sampling": SAMPLING,
    "memory": MEMORY,
    "speed": SPEED,
    "output": OUTPUT,
    "server": SERVER,
}
"""The settings by group, in the order of the help."""
SETTINGS: Mapping[str, Setting] = {
    setting.name: setting for group in GROUPS.values() for setting in group
}
GROUP_OF: Mapping[str, str] = {
    setting.name: name for name, group in GROUPS.items() for setting in group
}


def names_in(*groups: str) -> tuple[str, ...]:
    """The names of the settings of these groups."""
    return tuple(setting.name for group in groups for setting in GROUPS[group])
