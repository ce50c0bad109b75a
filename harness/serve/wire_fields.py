"""Handles unknown fields of bodies: misspelt and unsupported fields are refused, others are
ignored. A null counts as a missing field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec.inspect
from msgspec import Struct

from harness.serve.errors import ApiError, unsupported
from harness.serve.strict_json import known_type

MAX_UNKNOWN = 64
"""Most different unknown fields of one body."""
LONGEST_NAME = 64
"""Longest name in characters that is checked for a misspelling."""
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    **{
        name: values
        for values, names in (
            (
                (),
                "allowed_token_ids audio chat_template compaction conversation guided_json "
                "json_schema kv_transfer_params logit_gate logprob_token_ids output_format "
                "prompt_embeds prompt_token_ids repetition_detection thread",
            ),
            (
                (False,),
                "_debug_render_only echo include_stop_str_in_output packed_top_logprobs "
                "post_sampling_probs return_tokens_as_token_ids use_beam_search",
            ),
            (("",), "ebnf format grammar guided_grammar guided_regex regex suffix"),
            (([],), "bad_words functions guided_choice logits_processors previous_input_messages"),
            (
                (True,),
                "include_reasoning normalize parse_tool_calls separate_reasoning use_activation",
            ),
            (
                (-1,),
                "reasoning_budget_tokens thinking_budget_tokens thinking_token_budget "
                "truncate_prompt_tokens",
            ),
        )
        for name in names.split()
    },
    "best_of": (1,),
    "n_cmpl": (1,),
    "chat_template_kwargs": ({},),
    "structured_outputs": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "function_call": ("none",),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prompt": ("", []),
    "reasoning_format": ("auto", "deepseek"),
    "response_format": ({"type": "text"},),
}
"""Unsupported fields that would change the answer, each with the values that change nothing."""
INSTEAD: Mapping[str, str] = {
    "function_call": "use tool_choice",
    "functions": "use tools",
    "prompt": "give messages, or ask /v1/completions",
}
"""What to do instead of sending an unsupported field."""
FOREIGN = frozenset(
    (
        *("top_a", "top_n", "min_p_keep", "n_probs", "n_keep", "n_ctx", "images"),
        *("return_tokens", "speed", "store"),
        *("skip_special_tokens", "add_special_tokens", "truncate", "priority", "id", "status"),
    )
)
"""Fields of other servers that look like misspellings of this server's fields, but are not."""
FULFILLED: Mapping[str, Any] = {"store": False}
"""Unknown fields with the value that is true here anyway; they are not reported as ignored."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a value: of an object, by its ``tag_field``, the fields, each with what is
    known of its value and whether it may be null; of a list, what is known of its items."""

    tag_field: str | None = None
    objects: Mapping[object, _Fields] = field(default_factory=dict)
    item: _Known | None = None


_Fields = Mapping[str, tuple[_Known | None, bool]]


@dataclass(slots=True)
class _Found:
    """The unknown fields that were found: the first path of each, by the path without indices."""

    strict: bool
    known: dict[str, str] = field(default_factory=dict)
    problems: list[ApiError] = field(default_factory=list)

    def note(self, path: str, general: str, fields: Mapping[str, object]) -> None:
        """Record an unknown field of an object that has ``fields``."""
        if general in self.known:
            return
        self.known[general] = path
        if len(self.known) > MAX_UNKNOWN:
            raise ApiError(
                400, f"the body has more than {MAX_UNKNOWN} unknown fields", code="invalid_value"
            )
        name = general.rpartition(".")[2]
        meant = _meant(name, fields)
        if meant or self.strict:
            problem = f"{path}: unknown field `{name}`"
            problem += f"; did you mean {' or '.join(meant)}?" if meant else ""
            self.problems.append(ApiError(400, problem, param=path, code="unknown_parameter"))


def served_fields(
    value: dict[str, Any], kind: type[Struct], ignored: list[str] | None
) -> dict[str, Any]:
    """``value`` with only the known fields of ``kind``; names of others go to ``ignored``. Raises
    ApiError 400 that names all fields that look misspelt or are not supported; without ``ignored``,
    all unknown fields."""
    found = _Found(strict=ignored is None)
    fields = _fields_of(kind)
    foreign = [name for name in value if name in UNSERVED and name not in fields]
    unserved = [
        unsupported(name, f"{name} is not served here; {INSTEAD.get(name, 'leave it out')}")
        for name in sorted(foreign)
        if value[name] is not None and value[name] not in UNSERVED[name]
        # The server returns all choices, so best_of equal to n changes nothing.
        if name != "best_of" or value[name] != value.get("n")
    ]
    own = {key: given for key, given in value.items() if key not in foreign} if foreign else value
    served = _served_object(own, fields, "", "", found)
    problems = found.problems + unserved
    if problems:
        first = problems[0]
        text = "; ".join(problem.message for problem in problems)
        raise ApiError(400, text, param=first.param, code=first.code)
    if ignored is not None:
        ignored += [name for name in found.known if name not in ignored]
    return served


def _served(value: Any, known: _Known, path: str, general: str, found: _Found) -> Any:
    if isinstance(value, list) and known.item is not None:
        return [
            _served(item, known.item, f"{path}[{index}]", f"{general}[]", found)
            for index, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    objects = known.objects
    # Without others to tell it from, an object may lack its tag.
    tag = next(iter(objects)) if len(objects) == 1 else value.get(known.tag_field)
    fields = objects.get(tag) if isinstance(tag, str | None) else None
    return value if fields is None else _served_object(value, fields, path, general, found)


def _served_object(
    value: dict[str, Any], fields: _Fields, path: str, general: str, found: _Found
) -> dict[str, Any]:
    served: dict[str, Any] = {}
    for name, given in value.items():
        known, may_be_null = fields.get(name, (None, False))
        if given is None:
            if may_be_null:
                served[name] = None
            continue
        if known is None and name in fields:
            served[name] = given
            continue
        at = f"{path}.{name}" if path else name
        of = f"{general}.{name}" if general else name
        if known is not None:
            served[name] = _served(given, known, at, of, found)
        elif given is not FULFILLED.get(name):
            found.note(at, of, fields)
    return served


@cache
def _fields_of(kind: type[Struct]) -> _Fields:
    info = msgspec.inspect.type_info(known_type(kind))
    assert isinstance(info, msgspec.inspect.StructType)
    return _fields(info)


def _fields(info: msgspec.inspect.StructType) -> _Fields:
    fields = {
        one.encode_name: (_known(one.type), one.required or _may_be_null(one.type))
        for one in info.fields
    }
    return fields if info.tag_field is None else {**fields, info.tag_field: (None, True)}


def _known(info: msgspec.inspect.Type) -> _Known | None:
    """What is known of values of a type; None if they have no objects with known fields."""
    types = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    structs = [one for one in types if isinstance(one, msgspec.inspect.StructType)]
    lists = [one for one in types if isinstance(one, msgspec.inspect.ListType)]
    items = [item for one in lists if (item := _known(one.item_type)) is not None]
    if not structs and not items:
        return None
    tag_field = structs[0].tag_field if structs else None
    return _Known(tag_field, {one.tag: _fields(one) for one in structs}, *items[:1])


def _may_be_null(info: msgspec.inspect.Type) -> bool:
    types = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return any(isinstance(t, msgspec.inspect.NoneType | msgspec.inspect.AnyType) for t in types)


def _meant(name: str, fields: Mapping[str, object]) -> list[str]:
    """The known fields that ``name`` may be a misspelling of."""
    if len(name) > LONGEST_NAME or name in FOREIGN:
        return []
    plain = _plain(name)
    max_edits = 0 if len(plain) < 4 else 1 if len(plain) < 7 else 2
    return [known for known in fields if _edits(plain, _plain(known)) <= max_edits]


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _edits(text: str, other: str) -> int:
    """The Damerau-Levenshtein distance of two texts: insertions, deletions, replacements and
    swaps."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(text, 1):
        above, row, earlier = row, [i], before
        for j, b in enumerate(other, 1):
            best = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and text[i - 2] == b:
                best = min(best, earlier[j - 2] + 1)
            row.append(best)
        before = above
    return row[-1]
