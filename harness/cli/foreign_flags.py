"""Flags of other programs: taken where they mean the same, or answered with what to do instead."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from contract.errors import ConfigError
from harness.cli.parser import commands, flags_of, nearest

ONE_DEVICE = "one device runs the whole model: choose it with --tier, see zinc-rt devices"
NOT_NEEDED = "nothing needs to be switched on for this: leave it out"
TEMPLATE = "the model file says how conversations, calls and reasoning are written: leave it out"
WEIGHTS = "the model file determines how weights are stored"
PARALLEL = "--device 0,1 runs one model on several devices"
HUB_ACCESS = "a model file that is there is never fetched; no account of the hub is used"
ROPE = "the model file says how positions are encoded: leave it out"
SAMPLERS = "there are --temperature, --top-k, --top-p, --min-p and --repeat-penalty"
REQUESTS = "requests to zinc-rt serve, and SamplingParams in Python, have this field"
PROMPTS = "the whole prompt is read, as it is and without a notice: leave it out"
THINKING = "write --thinking on or off"
ADVICE: Mapping[str, str] = {
    flag: advice
    for flags, advice in (
        ("-ngl --ngl --n-gpu-layers --gpu-layers --main-gpu -mg", ONE_DEVICE),
        ("-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -nkvo", ONE_DEVICE),
        ("-fa --flash-attn --mlock --mmap --no-mmap -cb --cont-batching", NOT_NEEDED),
        ("--metrics --embedding --embeddings --no-warmup --simple-io -co -st", NOT_NEEDED),
        ("--enable-prefix-caching --enable-chunked-prefill --enforce-eager", NOT_NEEDED),
        ("--trust-remote-code --no-display-prompt --nowordwrap --stream", NOT_NEEDED),
        ("--jinja --chat-template --chat-template-file --tokenizer", TEMPLATE),
        ("--tool-call-parser --enable-auto-tool-choice", TEMPLATE),
        ("--reasoning-parser --reasoning-format", TEMPLATE),
        ("--dtype --quantization", WEIGHTS),
        ("-hff --hf-file", "write --model hf.co/ORG/REPO/FILE.gguf"),
        ("-hft --hf-token --offline", HUB_ACCESS),
        ("--rope-freq-base --rope-freq-scale --rope-scaling --rope-scale", ROPE),
        ("--hf-overrides --override-kv --yarn-orig-ctx --rope-theta", ROPE),
        ("--mirostat --typical --typical-p --tfs --dry-multiplier --dry-base", SAMPLERS),
        ("--xtc-probability --xtc-threshold --top-nsigma --samplers --dynatemp-range", SAMPLERS),
        ("--presence-penalty --frequency-penalty --ignore-eos --logit-bias", REQUESTS),
        ("--color --perf --no-perf --numa --prio -e --escape --log-colors", NOT_NEEDED),
        ("--verbose-prompt --in-prefix --in-suffix --ctx-shift --context-shift", PROMPTS),
        ("--keep", PROMPTS),
        ("--reranking --rerank --pooling --enable-lora --max-logprobs --props", NOT_NEEDED),
        ("--swa-full --kv-unified -kvu --cache-reuse --no-slots", NOT_NEEDED),
        ("--disable-log-requests --no-webui --no-ui --single-turn --no-context-shift", NOT_NEEDED),
        ("--reasoning-budget --reasoning --chat-template-kwargs --nothink", THINKING),
        ("--default-chat-template-kwargs --enable-thinking --no-thinking", THINKING),
        ("--hidethinking", THINKING),
        ("--reasoning-effort", "write --thinking low, medium or high"),
        ("--lora-scaled --lora-modules", "write --lora [NAME=]FILE[:SCALE]"),
        ("--models-dir --models-preset", "--beside names further models of a server"),
        ("--sleep-idle-seconds --models-max", "--memory-budget bounds what stays loaded"),
        ("--workers --data-parallel-size -dp", "--ray N answers with several engines"),
        ("--speculative-config --spec-type", "--draft-model and --draft guess ahead"),
        ("--root-path --api-prefix", "a proxy in front can change paths"),
        ("--log-file", "write 2> FILE"),
        ("-dev", "write --device"),
        ("-mu --model-url", "download the file and name it with --model"),
        ("-b -ub --batch-size --ubatch-size", "--chunk sets the most prompt tokens of a step"),
        ("--max-num-batched-tokens", "--chunk sets the most prompt tokens of a step"),
        ("-i -it -cnv --interactive --conversation -mli", "use zinc-rt chat for a conversation"),
        ("-no-cnv --no-conversation", "--raw continues a text without a conversation"),
        (
            "-ctk -ctv --cache-type-k --cache-type-v --kv-cache-dtype",
            "--kv-dtype sets how keys and values are stored",
        ),
        ("-cram --cache-ram", "--host-cache sets the memory for prompts seen before"),
        ("--prompt-cache --slot-save-path", "--disk-cache names a folder for prompts seen before"),
        ("-tp --tensor-parallel-size -sm --split-mode -ts --tensor-split", PARALLEL),
        ("-tb --threads-batch", "--threads is for prompts and answers"),
        ("--mmproj -mm --image --audio", "only text is understood, no images or sound"),
        ("-r --reverse-prompt", "--stop ends an answer before a text"),
        ("-sysf --system-prompt-file", 'write --system "$(cat FILE)"'),
        ("--think", THINKING),
        ("--gpu-memory-utilization", "--memory-budget sets the most memory, such as 20GB"),
        ("--download-dir", "--cache-dir is the folder of downloaded models"),
        ("--generation-config", "--temperature and its like set what requests leave out"),
        ("--log-level --uvicorn-log-level --log-disable", "--quiet logs problems only"),
        (
            "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file",
            "a proxy in front speaks TLS",
        ),
        ("--list-devices", "use zinc-rt devices"),
        ("--logprobs --top-logprobs", "zinc-rt score --top N lists the likeliest tokens"),
        ("--api-key", "keys belong to tenants: see zinc-rt tenants add"),
        ("-v -lv --verbose", "the last line of an answer has the timings; --debug explains errors"),
        ("--keepalive", "a served model stays in memory: leave it out"),
    )
    for flag in flags.split()
}
"""Flags of other programs without an equivalent here, and what to do instead."""
GLUED = re.compile(r"-[ncst][a-z-]")
"""A flag of one letter that takes a number, with what is none: a flag of several letters."""
NEAR = 0.75
"""Likeness of two flags from which on one is suggested for the other."""
SHORTEST_BEGINNING = 4
"""Characters from which on the beginning of a flag, dashes included, is that flag."""
HUB_REPOSITORIES = ("-hf", "-hfr", "--hf-repo")
HUB_FILES = ("-hff", "--hf-file")
HUB = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/")
Root = Callable[[], argparse.ArgumentParser]


def own_spelling(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The command line with ``--max_tokens`` as ``--max-tokens``, and llama.cpp's ``-hf ORG/REPO``
    as ``--model hf.co/ORG/REPO``."""
    known = flags_of(parser)
    own: list[str] = []
    hub: dict[bool, str] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            own.append(word)
            break
        flag, equals, value = word.partition("=")
        if flag in (*HUB_REPOSITORIES, *HUB_FILES) and "--model" in known:
            hub[flag in HUB_FILES] = value if equals else next(rest, "")
        elif flag not in known and (dashed := flag.replace("_", "-")) in known:
            own.append(dashed + equals + value)
        else:
            own.append(word)
    if False in hub:
        name = f"hf.co/{HUB.sub('', hub[False])}" + (f"/{hub[True]}" if True in hub else "")
        own += ["--model", name]
    elif hub:
        own.append(HUB_FILES[-1])
    return [*own, *rest]


def advice_about(word: str) -> list[str]:
    """Lines about the flag of another program that ``word`` names, with or without dashes."""
    flags = [flag for flag in (word, f"-{word}", f"--{word}") if flag in ADVICE]
    return [f"{flag}  (of other programs)\n    {ADVICE[flag]}" for flag in flags]


def refuse_foreign_flags(parser: argparse.ArgumentParser, words: Sequence[str], root: Root) -> None:
    """Raise ConfigError that names every flag which the command does not have, with advice.

    ``root`` gives the parser of all commands. This runs before the words are parsed: ``-ngl 99``
    would else be ``-n`` with the value "gl"."""
    hints: dict[str, list[str]] = {}
    for flag in dict.fromkeys(_unknown(flags_of(parser), words)):
        if flag in ADVICE:
            hints.setdefault(ADVICE[flag], []).append(flag)
        else:
            hints[flag_hint(flag, parser, root)] = [f"unknown flag {flag}"]
    if hints:
        text = "; ".join(f"{', '.join(flags)}: {hint}" for hint, flags in hints.items())
        raise ConfigError(f"{text}; see {parser.prog} --help")


def _unknown(known: Mapping[str, str], words: Sequence[str]) -> Iterator[str]:
    """The flags among the words that are not ``known``."""
    for word in words:
        flag = word.partition("=")[0]
        if word == "--":
            return
        # What has a space is a text for argparse, too.
        if flag in known or not re.match(r"-[^\d.\s]", flag) or " " in word:
            continue
        glued = flag[:2] in known and not GLUED.match(flag)
        if flag in ADVICE or flag.startswith("--") or f"-{flag}" in known or not glued:
            yield flag


def flag_hint(flag: str, parser: argparse.ArgumentParser, root: Root) -> str:
    """What to do instead of giving a flag that neither the command has nor ADVICE."""
    own = flags_of(parser)
    if f"-{flag}" in own:
        return f"did you mean -{flag}?"
    begun = [known for known in own if len(flag) >= SHORTEST_BEGINNING and known.startswith(flag)]
    near = begun[0] if begun else nearest(flag, own, NEAR)
    if near is not None:
        return f"did you mean {own[near]}?"
    others = [command.prog for command in commands(root()) if flag in flags_of(command)]
    return f"it is a flag of {' and '.join(others[:3])}" if others else "no command has it"
