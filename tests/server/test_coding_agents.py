"""Coding agents against a server: first request, a tool that runs, and a second turn from the cache.

The released programs run where npm has installed them: on the path, globally, or in the folder that
AGENTS_NODE_MODULES names. Requests in the form that they send are tested without them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.scripted import SERVED_NAME, scripted_server
from tests.server.conftest import REQUEST_LOG
from tests.server.running import RunningServer
from tests.server.test_request_log import records

TIMEOUT_S = 240
COMMAND = "echo made it $((40 + 2)) > made.txt"


def call(function: str, **arguments: str) -> list[str]:
    """The tokens of a call as Qwen3.5 writes it."""
    inside = [f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items()]
    return [f"<tool_call>\n<function={function}>\n", *inside, "</function>\n</tool_call>"]


SCRIPTS = {
    "title": ["A ", "title"],
    "Bash": call("Bash", command=COMMAND, description="Make a file"),
    "exec_command": call("exec_command", cmd=COMMAND),
    "bash": call("bash", command=COMMAND, description="Make a file."),
    "run_shell_command": call("run_shell_command", command=COMMAND, is_background="false"),
    "agents__spawn": call("agents__spawn", task="look"),
    "done": ["It is ", "done."],
}
# Strict, as Qwen3.5's is: one system message, at the beginning, and a question of the user. It shows the beginning of
# texts, since these programs send tens of thousands of characters. After a question a tool is called, if there is one.
TEMPLATE = """
{%- set found = namespace(question=false, tool='title') %}
{%- for tool in tools or [] %}{% if tool.function.name in markers %}{% set found.tool = tool.function.name %}{% endif %}
{%- endfor %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name + ' ' }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
{%- elif m.role == 'user' %}{% set found.question = true %}
{%- elif m.role not in ('assistant', 'tool') %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content[:200] }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if not found.question %}{{ raise_exception('there is no question of the user') }}{% endif %}
{%- if (messages | last).role == 'tool' %}{% set marker = markers['done'] %}
{%- else %}{% set marker = markers[found.tool] %}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ marker }}{% endif %}"""


@pytest.fixture(scope="module")
def agents_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("agents")
    flags = ["--log-requests", str(folder / REQUEST_LOG)]
    with scripted_server(folder, SCRIPTS, *flags, template=TEMPLATE, num_positions=16384) as running:
        yield running


@pytest.fixture
def http(agents_server: RunningServer) -> Iterator[httpx2.Client]:
    with agents_server.client() as client:
        yield client


def program(name: str) -> str:
    """The path of a program that npm installs. Skips the test where it is not there."""
    folders = [os.environ.get("AGENTS_NODE_MODULES", "")]
    if shutil.which("npm"):
        folders.append(subprocess.run(["npm", "root", "-g"], capture_output=True, text=True).stdout.strip())
    places = os.pathsep.join(str(Path(folder) / ".bin") for folder in folders if folder)
    found = shutil.which(name) or shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"needs {name} of npm (in the folder that AGENTS_NODE_MODULES names)")
    return found


def run(command: Sequence[str], home: Path, **variables: str) -> str:
    """The output of a program that runs in `home` and finds no settings but those."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
    done = subprocess.run(
        command,
        cwd=home,
        env={**kept, "HOME": str(home), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_turns(server: RunningServer, home: Path, first: Sequence[str], second: Sequence[str], **env: str) -> None:
    """Two turns, each of which runs the tool; from the second request on, prompts come from the cache."""
    log = server.log_path.parent / REQUEST_LOG
    before = len(log.read_text().splitlines())
    for command in (first, second):
        assert "It is done." in run(command, home, **env)
        assert (home / "made.txt").read_text() == "made it 42\n"
        (home / "made.txt").unlink()
    turns = [record for record in records(log, 4, before) if record["num_cached_tokens"] > 0]
    assert len(turns) >= 3, turns
    for record in turns:
        assert record["num_cached_tokens"] > record["num_prompt_tokens"] // 2, turns


def test_claude_code(agents_server: RunningServer, tmp_path: Path) -> None:
    claude = [program("claude"), "--allowedTools", "Bash"]
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    env = {**dict.fromkeys(names, SERVED_NAME), "ANTHROPIC_BASE_URL": agents_server.url, "ANTHROPIC_API_KEY": "unused"}
    env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    first, second = [*claude, "-p", "Make a file"], [*claude, "-c", "-p", "And again"]
    check_turns(agents_server, tmp_path, first, second, **env)


def test_codex(agents_server: RunningServer, tmp_path: Path) -> None:
    codex = [program("codex"), "exec"]
    (tmp_path / ".codex").mkdir()
    provider = f'name = "own"\nbase_url = "{agents_server.url}/v1"\nwire_api = "responses"\n'
    config = f'model = "{SERVED_NAME}"\nmodel_provider = "own"\n[model_providers.own]\n{provider}'
    (tmp_path / ".codex" / "config.toml").write_text(config)
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    first, second = [*codex, *flags, "Make a file"], [*codex, "resume", "--last", *flags, "And again"]
    check_turns(agents_server, tmp_path, first, second)


def test_opencode(agents_server: RunningServer, tmp_path: Path) -> None:
    opencode = [program("opencode"), "run"]
    options = {"baseURL": f"{agents_server.url}/v1", "apiKey": "unused"}
    model = {"name": SERVED_NAME, "limit": {"context": 16384, "output": 1024}, "tool_call": True}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {SERVED_NAME: model}}
    name = f"own/{SERVED_NAME}"
    config = {"model": name, "small_model": name, "provider": {"own": provider}, "permission": {"bash": "allow"}}
    (tmp_path / "opencode.json").write_text(json.dumps({**config, "share": "disabled", "autoupdate": False}))
    check_turns(agents_server, tmp_path, [*opencode, "Make a file"], [*opencode, "-c", "And again"])


def test_qwen_code(agents_server: RunningServer, tmp_path: Path) -> None:
    qwen = [program("qwen"), "--auth-type", "openai", "--yolo"]
    env = {"OPENAI_BASE_URL": f"{agents_server.url}/v1", "OPENAI_API_KEY": "unused", "OPENAI_MODEL": SERVED_NAME}
    check_turns(agents_server, tmp_path, [*qwen, "-p", "Make a file"], [*qwen, "-c", "-p", "And again"], **env)


@pytest.mark.parametrize("wire_api", ["completions", "responses", "anthropic"])
def test_copilot(agents_server: RunningServer, tmp_path: Path, wire_api: str) -> None:
    copilot = [program("copilot"), "--allow-all-tools"]
    env = {"COPILOT_OFFLINE": "true", "COPILOT_MODEL": SERVED_NAME, "COPILOT_PROVIDER_API_KEY": "unused"}
    if wire_api == "anthropic":
        env |= {"COPILOT_PROVIDER_TYPE": wire_api, "COPILOT_PROVIDER_BASE_URL": agents_server.url}
    else:
        env |= {"COPILOT_PROVIDER_WIRE_API": wire_api, "COPILOT_PROVIDER_BASE_URL": f"{agents_server.url}/v1"}
    first, second = [*copilot, "-p", "Make a file"], [*copilot, "--continue", "-p", "And again"]
    check_turns(agents_server, tmp_path, first, second, **env)


@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
def test_pi(agents_server: RunningServer, tmp_path: Path, api: str) -> None:
    pi = [program("pi"), "--provider", "own", "--model", SERVED_NAME]
    url = agents_server.url if api == "anthropic-messages" else f"{agents_server.url}/v1"
    provider = {"baseUrl": url, "api": api, "apiKey": "unused", "models": [{"id": SERVED_NAME, "contextWindow": 16384}]}
    (tmp_path / ".pi" / "agent").mkdir(parents=True)
    (tmp_path / ".pi" / "agent" / "models.json").write_text(json.dumps({"providers": {"own": provider}}))
    first, second = [*pi, "-p", "Make a file"], [*pi, "-c", "-p", "And again"]
    check_turns(agents_server, tmp_path, first, second, PI_OFFLINE="1")


def test_continue(agents_server: RunningServer, tmp_path: Path) -> None:
    model = {"name": "own", "provider": "openai", "model": SERVED_NAME, "apiKey": "unused", "roles": ["chat"]}
    model |= {"apiBase": f"{agents_server.url}/v1", "capabilities": ["tool_use"]}
    config = {"name": "own", "version": "1.0.0", "schema": "v1", "models": [model]}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    cn = [program("cn"), "--config", "config.yaml", "--auto"]
    check_turns(agents_server, tmp_path, [*cn, "-p", "Make a file"], [*cn, "--resume", "-p", "And again"])


# --- requests in the form of these programs

TEXT: Any = {"type": "text", "text": "You help with code. " * 40, "cache_control": {"type": "ephemeral"}}


def claude_code(turns: Sequence[dict[str, Any]], billing: str) -> dict[str, Any]:
    """A request of Claude Code 2.1."""
    line = f"x-anthropic-billing-header: cc_version=2.1.197.{billing}; cc_entrypoint=cli;"
    properties = {"command": {"type": "string"}, "timeout": {"type": "number"}}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": properties}
    return {
        "model": SERVED_NAME,
        "messages": list(turns),
        "system": [{"type": "text", "text": line}, TEXT],
        "tools": [{"name": "Bash", "description": "Run a command", "input_schema": schema}],
        "metadata": {"user_id": '{"session_id": "s"}'},
        "max_tokens": 200,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 0,
    }


def test_requests_in_the_form_of_claude_code(http: httpx2.Client) -> None:
    reminder = {"type": "text", "text": "<system-reminder>\nIt is Monday.\n</system-reminder>"}
    question = {"role": "user", "content": [reminder, {"type": "text", "text": "Make a file"}]}
    turns: list[dict[str, Any]] = [question, {"role": "system", "content": "Agents: none."}]
    first = http.post("/v1/messages?beta=true", json=claude_code(turns, "1c0")).raise_for_status().json()
    [use] = first["content"]
    assert (use["name"], use["input"]["command"], first["stop_reason"]) == ("Bash", COMMAND, "tool_use")
    result = {
        "type": "tool_result",
        "tool_use_id": use["id"],
        "content": [{"type": "tool_reference", "tool_name": "B"}],
    }
    turns += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = http.post("/v1/messages?beta=true", json=claude_code(turns, "9f3")).raise_for_status().json()
    assert second["content"] == [{"type": "text", "text": "It is done."}] and second["stop_reason"] == "end_turn"
    assert second["usage"]["cache_read_input_tokens"] > second["usage"]["input_tokens"]


def test_a_tool_that_is_found_later_leaves_the_prefix_as_it_is(http: httpx2.Client) -> None:
    """Claude Code sends a tool once the model has searched for it, in its place in the alphabet."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Make a file"}]
    body = claude_code(turns, "1c0")
    [bash] = body["tools"]
    first = http.post("/v1/messages", json=body).raise_for_status().json()
    fetch = {"name": "AFetch", "description": "Fetch a page", "input_schema": {"type": "object"}, "defer_loading": True}
    found = [{"type": "tool_reference", "tool_name": "AFetch"}]
    [use] = first["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": found}
    turns += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    later = claude_code(turns, "1c0") | {"tools": [fetch, bash]}
    second = http.post("/v1/messages", json=later).raise_for_status().json()
    assert second["usage"]["cache_read_input_tokens"] > first["usage"]["input_tokens"] - 64
    searched = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    counts = [
        count_tokens(http, later | {"tools": tools}) for tools in ([bash], [fetch, bash], [fetch, bash, searched])
    ]
    assert counts[1] > counts[0]  # the result has the tool's schema
    assert counts[2] == count_tokens(http, later | {"tools": [{**fetch, "defer_loading": False}, bash]})


def count_tokens(http: httpx2.Client, body: dict[str, Any]) -> int:
    reply = http.post("/v1/messages/count_tokens", json=body).raise_for_status()
    return int(reply.json()["input_tokens"])


def codex(items: Sequence[dict[str, Any]], tool: dict[str, Any]) -> dict[str, Any]:
    """A request of Codex 0.171."""
    return {
        "model": SERVED_NAME,
        "input": list(items),
        "tools": [tool, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
        "client_metadata": {"session_id": "s"},
        "text": {"verbosity": "low"},
    }


def last_item(http: httpx2.Client, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last output item of a streamed response, and its usage."""
    lines = http.post("/v1/responses", json=body).raise_for_status().text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[-1]["type"] == "response.completed"
    [*_, item] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    return item, events[-1]["response"]["usage"]


@pytest.mark.parametrize("namespace", [None, "agents"])
def test_requests_in_the_form_of_codex(http: httpx2.Client, namespace: str | None) -> None:
    schema = {"type": "object", "properties": {"cmd": {"type": "string"}, "task": {"type": "string"}}}
    name = "exec_command" if namespace is None else "spawn"
    tool: dict[str, Any] = {"type": "function", "name": name, "strict": False, "parameters": schema}
    if namespace is not None:
        tool = {"type": "namespace", "name": namespace, "description": "Agents.", "tools": [tool]}
    texts = [("developer", "You help with code. " * 40), ("developer", "Rules."), ("user", "Monday"), ("user", "Do it")]
    items: list[dict[str, Any]] = [
        {"type": "message", "id": f"msg_{n}", "role": role, "content": [{"type": "input_text", "text": text}]}
        for n, (role, text) in enumerate(texts)
    ]
    item, _ = last_item(http, codex(items, tool))
    assert (item["type"], item["name"], item.get("namespace")) == ("function_call", name, namespace)
    output = {"type": "function_call_output", "id": "fco_1", "call_id": item["call_id"], "output": "Output:\nok\n"}
    item, usage = last_item(http, codex([*items, item, output], tool))
    assert item["content"][0]["text"] == "It is done."
    assert usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] // 2


@pytest.mark.parametrize("text", [None, "Attached image(s) from tool result:"])
def test_an_image_that_a_tool_returned_does_not_end_a_chat(http: httpx2.Client, text: str | None) -> None:
    """Results of chats are texts, so Cline and pi send the image as the user's next message, goose as several."""
    arguments = json.dumps({"command": "cat p.png"})
    use = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    parts = [*([{"type": "text", "text": text}] if text else []), picture]
    messages: list[Any] = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": None, "tool_calls": [use]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Read image file [image/png]"},
        {"role": "user", "content": parts},
    ]
    if text is None:
        messages.append({"role": "user", "content": parts})
    body = {"model": SERVED_NAME, "messages": messages}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == "A title"
    tokens = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
    prompt = http.post("/detokenize", json={"tokens": tokens}).raise_for_status().json()["prompt"]
    assert "part of the type image, which cannot be shown here" in prompt
    for between in ({"role": "assistant", "content": "No"}, {"role": "user", "content": "And this?"}):
        own = [*messages, between, {"role": "user", "content": [picture]}]
        refused = http.post("/v1/chat/completions", json={**body, "messages": own})
        assert refused.status_code == 400 and "reads no images" in refused.text
