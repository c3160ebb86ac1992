"""Calls in JSON, in the notations of Hermes, Llama and others, and Python calls of Llama."""

from __future__ import annotations

from tests.server.conditions.condition import LS, PWD, called, condition, hermes, tagged, xml

JSON = [
    condition("JSON", "hermes", tagged(hermes("ls")), LS),
    condition("JSON in one line", "hermes", f"<tool_call>{hermes('ls')}</tool_call>", LS),
    condition("JSON with text around", "hermes", f"So: {tagged(hermes('ls'))}\nDone", LS, content="So:Done"),
    condition("two JSON calls", "hermes", tagged(hermes("ls")) + tagged(hermes("pwd")), LS, PWD),
    condition("JSON list", "hermes", f"<tool_call>[{hermes('ls')}, {hermes('pwd')}]</tool_call>", LS, PWD),
    condition("two objects in one", "hermes", tagged(f"{hermes('ls')}\n{hermes('pwd')}"), LS, PWD),
    *(
        condition(
            f"example calls in a string: {name}",
            "hermes",
            f"{tagged(hermes(value))}\n{tagged(hermes('pwd'))}",
            called("run", command=value),
            PWD,
        )
        for name, value in {
            "one": f"so: {tagged(hermes('ls'))}",
            "two": f"<tool_call>{hermes('ls')}</tool_call><tool_call>{hermes('pwd')}</tool_call>",
            "two of tags": f"<tool_call>{xml('ls')}</tool_call> <tool_call>{xml('pwd')}</tool_call> so",
        }.items()
    ),
    condition(
        "no closing between JSON calls", "hermes", f"<tool_call>\n{hermes('ls')}\n{tagged(hermes('pwd'))}", LS, PWD
    ),
    condition("JSON without closing", "hermes", f"<tool_call>\n{hermes('ls')}", LS),
    condition("no tags at all", "hermes", hermes("ls"), LS),
    condition("arguments first", "hermes", tagged('{"arguments": {"command": "ls"}, "name": "run"}'), LS),
    condition("parameters", "hermes", tagged('{"name": "run", "parameters": {"command": "ls"}}'), LS),
    condition("other white space", "hermes", tagged(hermes("ls").replace(" ", "\u2028\xa0")), LS),
    condition("no arguments", "hermes", tagged('{"name": "now"}'), called("now")),
    condition("null arguments", "hermes", tagged('{"name": "now", "arguments": null}'), called("now")),
    condition("empty arguments", "hermes", tagged('{"name": "now", "arguments": {}}'), called("now")),
    condition(
        "arguments in a string", "granite4", tagged('{"name": "run", "arguments": "{\\"command\\": \\"ls\\"}"}'), LS
    ),
    condition("empty arguments in a string", "granite4", tagged('{"name": "now", "arguments": "{}"}'), called("now")),
    condition("an empty string of arguments", "hermes", tagged('{"name": "now", "arguments": ""}'), called("now")),
    condition(
        "null in a string",
        "hermes",
        tagged('{"name": "now", "arguments": "null"}'),
        content=tagged('{"name": "now", "arguments": "null"}'),
    ),
    condition(
        "members before the name",
        "hermes",
        tagged('{"id": "c1", "type": "function", "name": "run", "arguments": {"command": "ls"}}'),
        LS,
    ),
    condition(
        "members behind the arguments", "hermes", tagged('{"name": "run", "arguments": {"command": "ls"}, "id": 7}'), LS
    ),
    condition(
        "nested function",
        "hermes",
        tagged('{"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}'),
        LS,
    ),
    condition("no white space", "hermes", '<tool_call>{"name":"run","arguments":{"command":"ls"}}</tool_call>', LS),
    condition(
        "raw line end in a string",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "a\nb\tc"}}'),
        called("run", command="a\nb\tc"),
    ),
    condition(
        "escapes",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "a\\nb \\"q\\" \\u00e9 \\\\"}}'),
        called("run", command='a\nb "q" \u00e9 \\'),
    ),
    condition(
        "escapes that JSON does not know",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "it\\\'s \\d+"}}'),
        called("run", command="it's \\d+"),
    ),
    condition(
        "braces in a string",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "a } ] { b"}}'),
        called("run", command="a } ] { b"),
    ),
    condition(
        "tags in a string",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "x </tool_call> <tool_call> y"}}'),
        called("run", command="x </tool_call> <tool_call> y"),
    ),
    condition(
        "unescaped quotes",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "echo "hi" there"}}'),
        called("run", command='echo "hi" there'),
    ),
    condition(
        "Python's words and quotes",
        "hermes",
        tagged("{'name': 'opt', 'arguments': {'flag': True, 'maybe': None}}"),
        called("opt", flag=True, maybe=None),
    ),
    condition("a comma too many", "hermes", tagged('{"name": "run", "arguments": {"command": "ls",}}'), LS),
    condition(
        "doubled brackets",
        "hermes",
        tagged('{{"name": "run", "arguments": {{"command": "ls"}}}}') + "Done",
        LS,
        content="Done",
    ),
    condition(
        "doubled brackets of the call", "hermes", tagged('{{"name": "run", "arguments": {"command": "ls"}}}'), LS
    ),
    condition(
        "brackets where a key belongs",
        "hermes",
        tagged('{"name": "run", "arguments": {"command": "ls", {"note": "a"} {}, [}}'),
        called("run", command="ls", note="a"),
    ),
    condition("a bracket missing", "hermes", tagged('{"name": "run", "arguments": {"command": "ls"}'), LS),
    condition("two brackets missing", "hermes", tagged('{"name": "run", "arguments": {"command": "ls"'), LS),
    condition(
        "the end of a string missing", "hermes", "<tool_call>\n" + '{"name": "run", "arguments": {"command": "ls', LS
    ),
    condition(
        "a string that does not end takes no other call",
        "hermes",
        f'<tool_call>\n{{"name": "run", "arguments": {{"command": "ls</tool_call>\n{tagged(hermes("pwd"))}',
        LS,
        PWD,
    ),
    condition(
        "a bracket too many",
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"]}}</tool_call>',
        called("weather", city="Ulm"),
    ),
    condition(
        "nested values",
        "hermes",
        tagged('{"name": "opt", "arguments": {"object": {"a": [1, {"b": null}]}, "array": []}}'),
        called("opt", object={"a": [1, {"b": None}]}, array=[]),
    ),
    condition("unknown function in JSON", "hermes", tagged(hermes("ls", "other")), called("other", command="ls")),
    condition(
        "broken JSON of an unknown function",
        "hermes",
        '<tool_call>{"name": "other", "arguments": {"a": 1</tool_call>',
        content='<tool_call>{"name": "other", "arguments": {"a": 1</tool_call>',
    ),
    condition("no JSON", "hermes", "<tool_call>{not json}</tool_call>", content="<tool_call>{not json}</tool_call>"),
    condition(
        "no name",
        "hermes",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        content='<tool_call>{"arguments": {"a": 1}}</tool_call>',
    ),
    condition(
        "arguments are no object",
        "hermes",
        '<tool_call>{"name": "run", "arguments": [1]}</tool_call>',
        content='<tool_call>{"name": "run", "arguments": [1]}</tool_call>',
    ),
    condition(
        "bad JSON and a good call",
        "hermes",
        f"<tool_call>{{x}}</tool_call>{tagged(hermes('ls'))}",
        LS,
        content="<tool_call>{x}</tool_call>",
    ),
    condition(
        "bad item and a good one",
        "nemotron_json",
        f'<TOOLCALL>[{{"name": 5}}, {hermes("ls")}]</TOOLCALL>',
        LS,
        content='<TOOLCALL>[{"name": 5},',
    ),
    condition(
        "JSON that is no call", "hermes", 'The answer is {"name": "run"}.', content='The answer is {"name": "run"}.'
    ),
    condition("a JSON answer", "hermes", '{"name": "Ann", "age": 3}', content='{"name": "Ann", "age": 3}'),
    condition("XML where JSON is usual", "hermes", tagged(xml("ls")), LS),
    condition("Granite 3", "granite", f"<|tool_call|>[{hermes('ls')}]", LS),
    condition(
        "Granite 3, several", "granite", f"So.<|tool_call|>[{hermes('ls')}, {hermes('pwd')}]", LS, PWD, content="So."
    ),
    condition(
        "Nemotron Nano 2",
        "nemotron_json",
        f"So.<TOOLCALL>[{hermes('ls')}, {hermes('pwd')}]</TOOLCALL>",
        LS,
        PWD,
        content="So.",
    ),
    condition("Nemotron Nano 2, no list", "nemotron_json", f"<TOOLCALL>{hermes('ls')}</TOOLCALL>", LS),
    condition("Nemotron Nano 2, no end", "nemotron_json", f"<TOOLCALL>[{hermes('ls')}", LS),
    condition("Jamba", "jamba", f" <tool_calls>[\n    {hermes('ls')},\n    {hermes('pwd')}\n]</tool_calls>", LS, PWD),
    condition(
        "Jamba, text before", "jamba", f"So.<tool_calls>[\n    {hermes('ls')}\n]</tool_calls>", LS, content="So."
    ),
    condition("Mistral", "mistral", f"[TOOL_CALLS] [{hermes('ls')}, {hermes('pwd')}]", LS, PWD),
    condition("Mistral, text before", "mistral", f"So[TOOL_CALLS][{hermes('ls')}]", LS, content="So"),
    condition(
        "Mistral, arguments first", "mistral", '[TOOL_CALLS] [{"arguments": {"command": "ls"}, "name": "run"}]', LS
    ),
    condition(
        "Mistral, later", "mistral", '[TOOL_CALLS]run{"command": "ls"}[TOOL_CALLS]run{"command": "pwd"}', LS, PWD
    ),
    condition(
        "Mistral, with the mark of arguments", "mistral", '[TOOL_CALLS]run[CALL_ID]x1[ARGS]{"command": "ls"}', LS
    ),
    condition("Mistral, prose", "mistral", "The mark [TOOL_CALLS] is one.", content="The mark [TOOL_CALLS] is one."),
    condition("Llama", "llama3_json", '{"name": "run", "parameters": {"command": "ls"}}', LS),
    condition("Llama, marked", "llama3_json", '<|python_tag|>{"name": "run", "parameters": {"command": "ls"}}', LS),
    condition(
        "Llama, type first", "llama3_json", '{"type": "function", "name": "run", "parameters": {"command": "ls"}}', LS
    ),
    condition(
        "Llama, in prose",
        "llama3_json",
        'Here: {"name": "run", "parameters": {"command": "ls"}} and so on',
        LS,
        content="Here:and so on",
    ),
    condition(
        "Llama, several",
        "llama3_json",
        '{"name": "run", "parameters": {"command": "ls"}}; {"name": "run", "parameters": {"command": "pwd"}}',
        LS,
        PWD,
    ),
    condition("Llama, no arguments", "llama3_json", '{"name": "now"}', content='{"name": "now"}'),
    condition(
        "Llama, an unknown function",
        "llama3_json",
        '{"name": "x", "parameters": {}}',
        content='{"name": "x", "parameters": {}}',
    ),
    condition("Llama, braces in prose", "llama3_json", "A set {1, 2} and {x}.", content="A set {1, 2} and {x}."),
    condition("Llama, Python", "pythonic", "[run(command='ls'), run(command=\"pwd\")]", LS, PWD),
    condition("Llama, a link", "pythonic", "[run](http://x) and [1]", content="[run](http://x) and [1]"),
]
