"""Enforced calls of every syntax: whatever the grammar lets through is read as calls that obey."""

import json
import random
from typing import Any

import jsonschema
import pytest

from harness.host.dialect import REASONING, Dialect, dialect_of
from harness.host.dialect.calls import CallSyntax, Function
from harness.host.dialect.gemma_calls import FUNCTION_GEMMA, GemmaCalls
from harness.host.dialect.json_calls import (
    COMMAND_CALLS,
    JsonListCalls,
    JsonObjectCalls,
    KeyedJsonCalls,
    MistralCalls,
)
from harness.host.dialect.python_calls import OLMO_CALLS, LlamaCalls, PythonAnswer, PythonCalls
from harness.host.dialect.section_calls import DEEPSEEK_CALLS, FENCED_CALLS, KIMI_CALLS
from harness.host.dialect.tagged_calls import ON_ONE_LINE, GlmCalls, InvokeCalls
from harness.host.dialect.xml_calls import SEED_CALLS, XmlCalls
from harness.host.reply import ReplyForm, ReplyParser
from harness.host.reply_parts import CallArguments, CallBegin, Content
from harness.host.structured.schema_tree import SchemaRefused
from reference.model.gguf.file import open_gguf
from reference.model.tokenizer import TokenKind, load_tokenizer
from tests.needs import need_file
from tests.paths import CHAT_TEMPLATES, VOCAB
from tests.serve.speaking_models import templated_model
from tests.serve.test_structured import allowed, walk

SYNTAXES: dict[str, CallSyntax] = {
    "hermes": JsonObjectCalls("<tool_call>", "</tool_call>", before="\n", after="\n"),
    "xml": XmlCalls(), "seed": SEED_CALLS, "glm": GlmCalls(),
    "glm on one line": GlmCalls(form=ON_ONE_LINE), "minimax": InvokeCalls(),
    "deepseek": DEEPSEEK_CALLS, "fenced deepseek": FENCED_CALLS, "kimi": KIMI_CALLS,
    "gemma": GemmaCalls(), "function gemma": FUNCTION_GEMMA,
    "nemotron": JsonListCalls("<TOOLCALL>", "</TOOLCALL>"), "command": COMMAND_CALLS,
    "apertus": KeyedJsonCalls(), "lfm2": PythonCalls(), "llama": LlamaCalls(),
    "llama in Python": PythonAnswer(), "olmo": OLMO_CALLS,
    "falcon": JsonListCalls("<tool_call>", "</tool_call>", blank="\n"),
    "granite": JsonListCalls("<|tool_call|>", None), "mistral": MistralCalls(),
    "new mistral": MistralCalls(named=True),
}  # fmt: skip
PYTHON_MARKS = (PythonCalls.begin, PythonCalls.end)
CLOSED = {"type": "object", "additionalProperties": False}
PARAMETERS: dict[str, dict[str, Any]] = {
    "nothing": {**CLOSED, "properties": {}},
    "scalars": {**CLOSED,
                "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9},
                               "exact": {"type": "boolean"}, "how": {"enum": ["fast", "slow"]}},
                "required": ["exact"]},
    "texts": {**CLOSED, "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
              "required": ["b"]},
    "choices": {**CLOSED, "$defs": {"unit": {"enum": ["C", "F"]}},
                "properties": {"unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
                               "most": {"anyOf": [{"type": "integer", "minimum": 3},
                                                  {"type": "null"}]}},
                "required": ["unit", "most"]},
    "nested": {**CLOSED,
               "properties": {"at": {**CLOSED,
                                     "properties": {"x": {"type": "integer"},
                                                    "y": {"type": "integer"}},
                                     "required": ["y"]},
                              "of": {"type": "array", "items": {"enum": ["p", "q"]}}},
               "required": ["at", "of"]},
    "linked": {**CLOSED, "x-order": 1,
               "properties": {"at": {**CLOSED,
                                     "properties": {"x": {"type": "integer", "format": "int32",
                                                          "example": 3}},
                                     "required": ["x"]},
                              "x": {"$ref": "#/properties/at/properties/x"},
                              "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}],
                                       "nullable": True},
                              "same": {"$ref": "#/properties/unit/anyOf/0"},
                              "within": {"type": "array", "items": {"$ref": "#/properties/at"}}},
               "required": ["x", "same", "within"]},
}  # fmt: skip
MARKS = [
    *(
        b"</parameter>", b"</arg_value>", b"<arg_value>", b'<|"|>', b"<escape>", b"<parameter=b>\n",
        b'</parameter>\n<parameter name="b">', b"</invoke>", b"</function>", b"</tool_call>",
    ),
    *(b"<|tool_call_end|>", b"', b='", b"<tool"),
]  # fmt: skip
"""What a text may hold that means something else elsewhere."""
FUNCTIONS = {name: Function(name, parameters) for name, parameters in PARAMETERS.items()}


def calls_in(form: ReplyForm, text: str, seed: int) -> list[tuple[str, str]]:
    """The calls of a text that comes in random pieces, which must be nothing else."""
    parser, rng = ReplyParser(form), random.Random(seed)
    parts = []
    while text:
        size = rng.randint(1, 9)
        parts.extend(parser.feed(text[:size]))
        text = text[size:]
    parts.extend(parser.finish())
    calls: list[tuple[str, str]] = []
    for part in parts:
        assert not isinstance(part, Content), part
        if isinstance(part, CallBegin):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return calls


@pytest.mark.parametrize("requested", [*PARAMETERS, "all"])
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_what_is_enforced_is_read_as_calls_that_obey(model, grammars, syntax, requested):
    dialect = Dialect(SYNTAXES[syntax])
    functions = FUNCTIONS if requested == "all" else {requested: FUNCTIONS[requested]}
    form = ReplyForm(dialect, functions, enforced=True)
    rules = dialect.forced_calls(list(functions.values()), many=requested == "all")
    ended = 0
    for seed, masks in enumerate(grammars.masks(f"start: body\n{rules}", 8)):
        text = walk(model, masks, seed, MARKS)
        if text is None:
            continue
        ended += 1
        calls = calls_in(form, text.decode(), seed)
        assert len(calls) == 1 or (calls and requested == "all"), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), PARAMETERS[name])
    assert ended


@pytest.mark.parametrize(
    ("syntax", "parameters", "keyword"),
    [
        ("xml", {"properties": {"a": {"type": "string", "pattern": "b"}}}, "pattern"),
        ("xml", {"properties": {"a": {"type": "string", "minLength": 2}}}, "minLength"),
        ("xml", {"properties": {"a<b": {"type": "integer"}}}, "'a<b'"),
        ("xml", {"properties": {"a": {"enum": ["1", "2"]}}}, "a choice"),
        ("xml", {"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ("xml", {"required": ["a"]}, "required"),
        ("gemma", {"properties": {"a": {"type": "string", "maxLength": 2}}}, "maxLength"),
        ("gemma", {"properties": {"a": {}}}, "type"),
        ("gemma", {"properties": {"a b": {"type": "integer"}}}, "'a b'"),
        ("gemma", {"properties": {"a": {"type": "array"}}}, "items"),
        ("gemma", {"properties": {"a": {"enum": [{}]}}}, "enum"),
        ("hermes", {"properties": {"a": {"not": {}}}}, "not"),
        ("mistral", {"uniqueItems": True}, "uniqueItems"),
        ("lfm2", {"properties": {"a b": {"type": "integer"}}}, "'a b'"),
        ("lfm2", {"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ("lfm2", {"required": ["a"]}, "required"),
        ("hermes", {"properties": {"a": {"const": 2**53 + 1}}}, "const"),
        ("xml", {"properties": {"a": {"enum": [0, 2**63]}}}, "enum"),
        ("xml", {"properties": {"a": {"type": "integer", "maximum": 2**64 - 1}}}, "maximum"),
        ("gemma", {"properties": {"a": {"type": "integer", "minimum": -(2**63)}}}, "minimum"),
        ("llama", {"properties": {"a": {"$ref": "#/properties/b"}}}, "$ref"),
    ],
)
def test_parameters_a_syntax_cannot_hold_to_are_refused(syntax, parameters, keyword):
    function = Function("f", {"type": "object", **parameters})
    with pytest.raises(SchemaRefused) as refused:
        Dialect(SYNTAXES[syntax]).forced_calls([function], many=True)
    assert refused.value.keyword == keyword


@pytest.mark.parametrize(
    ("template", "vocabulary", "calls", "reasoning"),
    [
        ("Qwen-Qwen3-0.6B", "qwen35", JsonObjectCalls, "<think>"),
        ("Qwen3.5-4B", "qwen35", XmlCalls, "<think>"),
        ("google-gemma-4-31B-it", "gemma-4", GemmaCalls, "<|channel>thought"),
        ("google-gemma-2-2b-it", "gemma-4", None, None),
    ],
)
def test_a_template_shows_its_dialect(template, vocabulary, calls, reasoning):
    """Real ones, with real vocabularies."""
    text = need_file(CHAT_TEMPLATES / f"{template}.jinja").read_text()
    path = need_file(VOCAB / f"ggml-vocab-{vocabulary}.gguf")
    with open_gguf(path) as file:
        dialect = dialect_of(text, load_tokenizer(file.metadata, str(path)))
    assert type(dialect.calls) is (type(None) if calls is None else calls)
    assert (dialect.reasoning and dialect.reasoning.open) == reasoning


def test_marks_that_are_control_tokens_are_named_by_number(model):
    """Text never stands for them, and their text is shown to the parser."""
    listed = "{{ tools }}<TOOLCALL>[{{ calls }}]</TOOLCALL>"
    assert type(dialect_of(listed, model.tokenizer).calls) is JsonListCalls
    command = "{{ tools }}<|START_THINKING|><|END_THINKING|><|START_ACTION|>[<|END_ACTION|>"
    spoken = dialect_of(command, model.tokenizer)
    assert spoken.calls == COMMAND_CALLS
    assert spoken.reasoning is not None
    for mark in ("<|eot_id|>", "<|header_start|>"):
        bare = dialect_of(mark + '{{ tools }}{"name": "", "parameters": {}}', model.tokenizer)
        assert bare.calls == LlamaCalls()
    asked = "<|header_start|>{{ tools }}[func_name1(param1=value1)]"
    assert dialect_of(asked, model.tokenizer).calls == PythonAnswer()
    granite = "{{ tools }} Respond with <|tool_call|> and a list."
    assert dialect_of(granite, model.tokenizer).calls == JsonListCalls("<|tool_call|>", None)
    keyed = "{{ tools }}<|inner_prefix|><|inner_suffix|><|tools_prefix|>[<|tools_suffix|>"
    spoken = dialect_of(keyed, model.tokenizer)
    assert spoken.calls == KeyedJsonCalls()
    assert spoken.reasoning is not None
    bare = "{{ tools }}<start_function_call>call:{{ name }}<end_function_call>"
    assert dialect_of(bare, model.tokenizer).calls == FUNCTION_GEMMA
    python = "{{ tools }}<|tool_call_start|>[{{ calls }}]<|tool_call_end|>"
    assert type(dialect_of(python, model.tokenizer).calls) is PythonCalls
    assert dialect_of("List of tools: {{ tools }}", model.tokenizer).calls is None
    glm = "{{ tools }}<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}"
    assert dialect_of(glm, model.tokenizer).calls == GlmCalls()
    one_line = dialect_of(glm.replace("\n", ""), model.tokenizer)
    assert one_line.calls == GlmCalls(form=ON_ONE_LINE)
    for syntax, between in ((GlmCalls(), '"\\n" '), (one_line.calls, "")):
        forced = Dialect(syntax).forced_calls([FUNCTIONS["nothing"]], many=True)
        assert f'body: "<tool_call>" calls ({between}"<tool_call>" calls)*' in forced
    seed = "{{ tools }}<seed:think></seed:think><seed:tool_call><function=f><parameter=p>"
    spoken = dialect_of(seed, model.tokenizer)
    assert (spoken.calls, spoken.reasoning) == (SEED_CALLS, REASONING[-1])
    invoked = "{{ tools }}<minimax:tool_call><invoke name={{ name }}>{{ arguments }}</invoke>"
    assert dialect_of(invoked, model.tokenizer).calls == InvokeCalls()
    for syntax, more in ((DEEPSEEK_CALLS, ""), (FENCED_CALLS, "```json"), (KIMI_CALLS, "")):
        section = f"{{{{ tools }}}}{syntax.begin}{{{{ name }}}}{more}{syntax.end}"
        assert dialect_of(section, model.tokenizer).calls == syntax
    template = "{{ tools }}[TOOL_CALLS][THINK][/THINK]<|im_start|>"
    dialect = dialect_of(template, model.tokenizer)
    assert isinstance(dialect.calls, MistralCalls)
    assert dialect.markers == {}
    control = model.tokenizer.encode("<|im_start|>", parse_special=True)[0]
    marked = Dialect(MistralCalls(begin="<|im_start|>"), None, {"<|im_start|>": control})
    assert marked.shown == {control}
    assert f"body: <[{control}]> calls" in marked.forced_calls([FUNCTIONS["nothing"]], False)


def test_a_vocabulary_shows_calls_that_a_template_does_not(tmp_path):
    """LFM 2's templates list tools and show no call; its vocabulary has the tokens."""
    path = templated_model(tmp_path, "lfm2", "", PYTHON_MARKS, TokenKind.CONTROL)
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file.metadata, str(path))
    dialect = dialect_of("{{ 'List of tools: [' }}{{ tools }}", tokenizer)
    assert type(dialect.calls) is PythonCalls
    assert dialect.markers.keys() == set(PYTHON_MARKS)
    assert dialect_of("{{ messages }}", tokenizer).calls is None


def test_all_marks_of_a_call_may_be_control_tokens(model, grammars):
    """Then they alone open, quote and close, and their texts do not."""
    begin, end, quote = 280, 281, 282
    syntax = FUNCTION_GEMMA
    markers = {syntax.begin: begin, syntax.end: end, syntax.quote: quote}
    dialect = Dialect(syntax, None, markers)
    rules = dialect.forced_calls([FUNCTIONS["texts"], FUNCTIONS["choices"]], many=False)
    text = [begin, b"call:texts{b:", quote, b"<escape>", quote, b"}", end]
    choice = [begin, b"call:choices{most:null,unit:", quote, b"C", quote, b"}", end]
    for body in (text, choice):
        (masks,) = grammars.masks(f"start: body\n{rules}", 1)
        so_far: list[int] = []
        for part in body:
            if isinstance(part, int):
                assert part in allowed(masks, so_far)
                so_far.append(part)
                continue
            while part:
                follow = [t for t in allowed(masks, so_far) if t < begin]
                spelled = {model.tokenizer.token_bytes(token): token for token in follow}
                word = max(filter(part.startswith, spelled), key=len)
                so_far.append(spelled[word])
                part = part.removeprefix(word)
        assert model.tokenizer.eog_ids.intersection(allowed(masks, so_far))
    assert allowed(grammars.masks(f"start: body\n{rules}", 1)[0], []) == [begin]


def test_references_may_be_described():
    described = {"$ref": "#/$defs/unit", "description": "of degrees"}
    parameters = {**PARAMETERS["choices"], "properties": {"unit": described}, "required": ["unit"]}
    for syntax in (XmlCalls(), GemmaCalls()):
        rules = Dialect(syntax).forced_calls([Function("f", parameters)], many=False)
        assert '"C"' in rules
        assert '"F"' in rules
        broken = {**parameters, "properties": {"unit": {**described, "minLength": 3}}}
        with pytest.raises(SchemaRefused):
            Dialect(syntax).forced_calls([Function("f", broken)], many=False)
