"""Calls that a model makes freely match the schemas of strict tools and the grammars of custom ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import httpx2
import jsonschema
import pytest

from forkpoint.engine.call_writing import WRITERS, NotationName
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import InvalidParamsError
from forkpoint.params import CallsParams, SamplingParams, StructuredOutputsParams, Thinking
from forkpoint.server.answer import AnswerParser, CallPart, Content, joined
from forkpoint.server.body import validated
from forkpoint.server.calls.call_formats import CallRule, call_formats
from forkpoint.server.chat.body import ChatBody
from forkpoint.server.chat.held_calls import Constraint, constraint_of
from forkpoint.server.chat.tools import plan_tools
from forkpoint.server.notations import NOTATIONS
from forkpoint.server.texts import Texts
from tests.engine.tokenizers import byte_level
from tests.grammar.test_grammar import BYTES, Setup, takes
from tests.scripted import CHAT_TEMPLATE, SERVED_NAME, scripted_server
from tests.server.running import RunningServer

NOTATION_NAMES: Final[Sequence[NotationName]] = (
    *("hermes", "qwen_xml", "ling", "kimi", "granite", "nemotron", "jamba", "mistral"),
)
SPOT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9}, "inner": {"$ref": "#/$defs/Spot"}},
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"enum": [1, 2, 3]},
        "unit": {"anyOf": [{"enum": ["°C", "°F"]}, {"type": "null"}]},
        "spot": {"$ref": "#/$defs/Spot"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "hot": {"type": "boolean"},
    },
    "required": ["city", "days", "unit", "hot"],
    "additionalProperties": False,
    "$defs": {"Spot": SPOT},
}
ARGUMENTS: dict[str, Any] = {"city": "Bad <Tölz>\n&", "days": 2, "unit": "°C", "hot": True}


def tagged() -> Tokenizer:
    """A tokenizer with tokens that open calls, and begin and end thinking."""
    tokenizer = byte_level()
    tokenizer.hf.add_tokens(["<tool_call>", "<think>", "</think>"])
    return Tokenizer.wrap(tokenizer.hf)


TAGGED = tagged()
LARK = 'start: "go" (" " WORD)+\nWORD: /[xy]{2}/'


def written(notation: NotationName, *calls: tuple[str, Any]) -> str:
    """An answer with calls as models of this notation write them."""
    told = [
        {"id": f"functions.{name}:{number}", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return WRITERS[notation](told)


def structured(notation: NotationName, *rules: CallRule) -> dict[str, Any]:
    formats = call_formats(notation, rules)
    assert formats is not None
    return {"structural_tag": {"format": formats.alone()}, "disable_any_whitespace": True}


@pytest.mark.parametrize("notation", NOTATION_NAMES)
def test_calls_as_models_write_them_are_held_to_their_schemas(notation: NotationName) -> None:
    wanted = structured(notation, CallRule("look", SCHEMA), CallRule("look_up"))
    free = {"anything": ["goes", 1]}
    some = [
        {**ARGUMENTS, "unit": None},
        {**ARGUMENTS, "spot": {"x": 1.5, "inner": {"x": 2}}, "hot": False},
        {**ARGUMENTS, "unit": None, "limit": None, "hot": False},
    ]
    for arguments in (ARGUMENTS, {**ARGUMENTS, "limit": 7}, *some):
        ordered = {name: arguments[name] for name in SCHEMA["properties"] if name in arguments}
        text = written(notation, ("look", ordered), ("look_up", free))
        assert takes(BYTES, text, **wanted), text
    for wrong in ({"days": 4}, {"days": "two"}, {"unit": "K"}, {"hot": "maybe"}, {"limit": 1.5}, {"spot": {"x": "1"}}):
        arguments = {**ARGUMENTS, **wrong}
        ordered = {name: arguments[name] for name in SCHEMA["properties"] if name in arguments}
        assert not takes(BYTES, written(notation, ("look", ordered)), **wanted), wrong
    assert not takes(BYTES, written(notation, ("look", {"city": "x"})), **wanted)
    assert not takes(BYTES, written(notation, ("see", ARGUMENTS)), **wanted)


@pytest.mark.parametrize("notation", NOTATION_NAMES)
def test_what_the_grammar_lets_come_is_read_as_calls_that_match(notation: NotationName) -> None:
    simple = {**SCHEMA, "properties": {name: part for name, part in SCHEMA["properties"].items() if name != "city"}}
    simple["required"] = ["days", "hot"]
    wanted = structured(notation, CallRule("look", simple), CallRule("stop", {}))
    number = 0
    for seed in range(30):
        text = BYTES.walk(BYTES.start(**wanted), seed)
        if text is None:
            continue
        parser = AnswerParser(tools={"look": simple, "stop": {}}, notation=NOTATIONS[notation])
        pieces = joined([*parser.feed(text), *parser.finish()])
        calls = [piece for piece in pieces if isinstance(piece, CallPart)]
        assert calls and not any(isinstance(piece, Content) and piece.text.strip() for piece in pieces), text
        for call in calls:
            number += 1
            jsonschema.validate(json.loads(call.text), simple if call.name == "look" else {"type": "object"})
    assert number > 5


def constraint(notation: NotationName, tokenizer: Tokenizer = BYTES.tokenizer, **fields: Any) -> tuple[Any, list[str]]:
    """What an answer has to match, and the notices in the log."""
    notes: list[str] = []
    body = validated(ChatBody, {"messages": [{"role": "user", "content": "x"}], **fields})
    config = SimpleNamespace(tool_call_parser="auto")
    texts: Any = SimpleNamespace(
        notation_name=notation,
        config=config,
        inputs=SimpleNamespace(grammars=BYTES.compiler),
        require_tokenizer=lambda: tokenizer,
        notices=SimpleNamespace(add=notes.append),
        relaxed=lambda schema, matching: Texts.relaxed(texts, schema, matching),
    )
    return constraint_of(texts, body, plan_tools(texts, body)), notes


def test_values_of_an_enum_have_its_type() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x", None, 1]}}, "required": ["a"]}
    wanted = structured("qwen_xml", CallRule("look", schema))
    assert takes(BYTES, written("qwen_xml", ("look", {"a": "x"})), **wanted)
    assert not any(takes(BYTES, written("qwen_xml", ("look", {"a": value})), **wanted) for value in (None, 1))


def test_later_models_of_mistral_write_a_name_and_arguments() -> None:
    wanted = structured("mistral", CallRule("look", SCHEMA), CallRule("look_up"))
    call = f"[TOOL_CALLS]look[ARGS]{json.dumps(ARGUMENTS, ensure_ascii=False)}"
    for text in (call, f'{call}\n[TOOL_CALLS]look_up{{"a": 1}}', '[TOOL_CALLS] [{"name": "look_up", "arguments": {}}]'):
        assert takes(BYTES, text, **wanted), text
    assert not takes(BYTES, '[TOOL_CALLS]look[ARGS]{"city": 1}', **wanted)


@pytest.mark.parametrize("notation", ["qwen_xml", "ling"])
def test_a_free_call_of_a_custom_tool_matches_its_grammar(notation: NotationName) -> None:
    tool = {"type": "custom", "custom": {"name": "run", "format": {"syntax": "lark", "definition": LARK}}}
    found, notes = constraint(notation, TAGGED, tools=[tool])
    options = {"structural_tag": found.calls.structure.structural_tag, "disable_any_whitespace": True}
    assert takes(BYTES, written(notation, ("run", {"input": "go xy yx"})).removeprefix("<tool_call>"), **options)
    assert not takes(BYTES, written(notation, ("run", {"input": "go xz"})).removeprefix("<tool_call>"), **options)
    assert found.calls.opening == "<tool_call>" and not notes
    for others in (("hermes", TAGGED), ("lfm2", TAGGED), (notation, BYTES.tokenizer)):
        found, notes = constraint(*others, tools=[tool])
        assert found.calls is None and found.structured is None and len(notes) == 1 and "'run'" in notes[0]


def test_tools_that_are_not_strict_need_no_grammar() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": False}}]
    found, _ = constraint("hermes", tools=tools)
    assert found == Constraint(None)
    found, _ = constraint("hermes", tools=tools, response_format={"type": "json_object"})
    assert found == Constraint(StructuredOutputsParams(json_object=True))


@pytest.mark.parametrize("in_flight", ["", "\n{", "\n["])
def test_only_calls_are_held_and_only_if_what_came_unseen_fits(in_flight: str) -> None:
    wanted = call_formats("hermes", [CallRule("look", SCHEMA)])
    assert wanted is not None
    structure = StructuredOutputsParams(structural_tag={"format": wanted.after_opening()}, disable_any_whitespace=True)
    held = CallsParams(opening="<tool_call>", structure=structure)
    setup = Setup(TAGGED)
    rules = setup.compiler.start(SamplingParams(calls=held), {setup.eos})
    assert rules is not None and rules.is_free
    setup.follow(rules, "I think <tool_cal and ")
    for _ in range(2):
        assert rules.is_free and setup.eos in setup.allowed(rules)
        opening = setup.tokenizer.backend.token_to_id("<tool_call>")
        rules.accept(opening)
        for token in setup.spell(in_flight):
            rules.accept(token)
        if in_flight == "\n[":
            assert rules.is_free  # the model writes something else
            continue
        assert not rules.is_free and len(setup.allowed(rules)) == 1
        setup.follow(rules, written("hermes", ("look", ARGUMENTS)).removeprefix(f"<tool_call>{in_flight}"))
        setup.follow(rules, "\n")


@pytest.mark.parametrize("thinking", ["open", "optional", "none"])
def test_calls_within_the_thinking_are_not_held(thinking: Thinking) -> None:
    formats = call_formats("hermes", [CallRule("look", SCHEMA)])
    assert formats is not None
    structure = StructuredOutputsParams(structural_tag={"format": formats.after_opening()}, disable_any_whitespace=True)
    setup = Setup(TAGGED)
    think, end, opening = map(setup.tokenizer.backend.token_to_id, ("<think>", "</think>", "<tool_call>"))
    calls = CallsParams(opening="<tool_call>", structure=structure)
    rules = setup.compiler.start(SamplingParams(calls=calls, thinking=thinking), {setup.eos})
    assert rules is not None
    if thinking != "open":
        rules.accept(think)
    rules.accept(opening)
    assert rules.is_free == (thinking != "none")
    if rules.is_free:
        rules.accept(end)
        rules = rules.copy()
        rules.accept(opening)
    copied = rules.copy()
    rules.accept(setup.eos)  # as from a step in flight
    assert rules.is_free and not copied.is_free


def test_a_schema_of_many_choices_is_read_in_no_time() -> None:
    """Each reference doubles the choices."""
    parts = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": {**parts, "a60": {"const": "b"}}}
    assert call_formats("qwen_xml", [CallRule("f", schema)]) is not None


# --- through the server, with a model that writes what it should not

DAYS = {"type": "object", "properties": {"days": {"enum": [12, 13]}}, "required": ["days"]}
DAYS |= {"additionalProperties": False}
OTHERS = {"no call": ["nothing to ", "look for"], "format": ['"nothing', ' at all"']}
IN_XML = ["I look.\n", "<tool_call>", "\n<function=look>\n<parameter=days>\n", "many", "\n</parameter>\n</function>"]
IN_JSON = ["<tool_call>", '\n{"name": "look", "arguments": {"days": ', '"few"', "}}\n</tool_call>"]
XML = "\n{# <function= #}"  # shows the notation


DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})


@pytest.fixture(
    scope="module",
    params=[(XML, "--async-scheduling"), ("", "--speculative-config", DRAFTS)],
    ids=["qwen_xml, early steps", "hermes, drafts"],
)
def scripted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("strict")
    shown, *flags = request.param
    script = {"xml": IN_XML} if shown else {"json": IN_JSON}
    with scripted_server(folder, {**script, **OTHERS}, *flags, template=shown + CHAT_TEMPLATE) as running:
        running.model = "xml" if shown else "json"
        yield running


def chat(http: httpx2.Client, script: str, *, strict: bool, **fields: Any) -> list[tuple[str, Any]]:
    function = {"name": "look", "parameters": DAYS, "strict": strict}
    body = {"messages": [{"role": "user", "content": script}], "tools": [{"type": "function", "function": function}]}
    body |= {"max_tokens": 100, "parallel_tool_calls": False, **fields}
    reply = http.post("/v1/chat/completions", json={"model": SERVED_NAME, **body})
    assert reply.status_code == 200, reply.text
    message = reply.json()["choices"][0]["message"]
    calls = message["tool_calls"] or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls] or [("", message["content"])]


def responses(http: httpx2.Client, script: str, *, strict: bool) -> list[tuple[str, Any]]:
    tool = {"type": "function", "name": "look", "parameters": DAYS, "strict": strict}
    body = {"model": SERVED_NAME, "input": script, "tools": [tool], "parallel_tool_calls": False}
    items = http.post("/v1/responses", json={**body, "max_output_tokens": 100}).json()["output"]
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return calls or [("", items[0]["content"][0]["text"])]


def messages(http: httpx2.Client, script: str, *, strict: bool) -> list[tuple[str, Any]]:
    tool = {"name": "look", "input_schema": DAYS, "strict": strict}
    body = {"messages": [{"role": "user", "content": script}], "tools": [tool], "max_tokens": 100}
    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    blocks = http.post("/v1/messages", json={"model": SERVED_NAME, **body}).json()["content"]
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    return calls or [("", blocks[0]["text"])]


@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_the_server_holds_free_calls_of_strict_tools(scripted: RunningServer, ask: Any) -> None:
    with scripted.client() as http:
        [(name, arguments)] = ask(http, scripted.model, strict=True)
        assert name == "look" and json.loads(arguments)["days"] in (12, 13)
        [(name, arguments)] = ask(http, scripted.model, strict=False)
        assert name == "look" and json.loads(arguments)["days"] in ("many", "few")
        assert ask(http, "no call", strict=True) == [("", "nothing to look for")]


def test_an_answer_has_the_format_or_a_strict_call(scripted: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["nothing at all"]}}}
    with scripted.client() as http:
        assert chat(http, "format", strict=True, response_format=form) == [("", '"nothing at all"')]
        if scripted.model == "json":  # the other script begins with text
            [(name, arguments)] = chat(http, "json", strict=True, response_format=form)
            assert name == "look" and json.loads(arguments)["days"] in (12, 13)


@pytest.mark.parametrize("strict", [None, False, True])
def test_forced_calls_match_what_can_be_enforced(strict: bool | None) -> None:
    """Tools of MCP servers have such schemas. OpenAI's and Anthropic's servers enforce none unless a tool is strict."""
    parts = {"days": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 1}}
    parameters = {"type": "object", "properties": parts, "required": ["days"], "additionalProperties": False}
    function = {"name": "look", "parameters": parameters, "strict": strict}
    found, notes = constraint("hermes", tools=[{"type": "function", "function": function}], tool_choice="required")
    if strict:
        with pytest.raises(InvalidParamsError, match="'uniqueItems' at /properties/arguments/properties/days"):
            BYTES.compiler.check(found.structured)
        assert not notes
        return
    wanted = {"json": found.structured.json, "disable_any_whitespace": True}
    assert takes(BYTES, '{"name": "look", "arguments": {"days": [1, 1]}}', **wanted)
    assert not takes(BYTES, '{"name": "look", "arguments": {"days": []}}', **wanted)
    assert (
        len(notes) == 1 and "tool 'look' may not match the whole schema: the JSON schema uses 'uniqueItems'" in notes[0]
    )


def test_a_schema_that_cannot_be_enforced_is_refused(scripted: RunningServer) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "not": {}}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters, "strict": True}}
    body = {"model": SERVED_NAME, "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    with scripted.client() as http:
        reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "'not'" in reply.json()["error"]["message"], reply.text
