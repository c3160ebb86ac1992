from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_model import CHAT_TEMPLATE
from forkpoint import LLM, SamplingParams
from forkpoint.engine.chat import ChatTemplate
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import ConfigError, InvalidPromptError
from forkpoint.obs.logs import LOGGER
from tests.engine.chat_templates import KIMI, STYLES
from tests.engine.tokenizers import byte_level, metaspace

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "[INST] {{ (system if loop.first else '') + message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }} </s>{% endif %}{% endfor %}"
)
USER_LAST = (  # refuses every conversation that a user does not end, and marks the last message
    "{% if messages[-1].role != 'user' %}{{ raise_exception('the last message must be from the user') }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if loop.last %} (last){% endif %}<|im_end|>\n{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "user_last": USER_LAST, "demo": CHAT_TEMPLATE}
TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace()}
MESSAGES = [
    {"role": "system", "content": "answer in one sentence, please"},
    {"role": "user", "content": "the quick brown fox"},
    {"role": "assistant", "content": "jumps over the lazy dog"},
    {"role": "user", "content": "naïve 🙂 and 東京"},
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
CASES = [(t, k) for t in TEMPLATES for k in TOKENIZERS]


def render(template: str, tokenizer: str = "byte_level", **options: Any) -> Any:
    return ChatTemplate(TOKENIZERS[tokenizer], TEMPLATES.get(template, template)).render(**options)


@pytest.mark.parametrize(("template", "tokenizer"), CASES)
def test_ids_are_those_of_transformers(template: str, tokenizer: str) -> None:
    prompt = render(template, tokenizer, messages=MESSAGES)
    expected = TOKENIZERS[tokenizer].hf.apply_chat_template(
        MESSAGES, chat_template=TEMPLATES[template], add_generation_prompt=True, return_dict=False
    )
    assert prompt.token_ids.tolist() == list(expected)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", ["chatml", "demo"])
def test_the_end_of_every_message_is_a_boundary(template: str, tokenizer: str) -> None:
    """A message prefix rendered and tokenised on its own gives exactly the ids before the boundary."""
    prompt = render(template, tokenizer, messages=MESSAGES)
    ids = prompt.token_ids.tolist()
    hf = TOKENIZERS[tokenizer].hf
    expected = []
    for count in range(1, len(MESSAGES) + 1):
        alone = hf.apply_chat_template(MESSAGES[:count], chat_template=TEMPLATES[template], return_dict=False)
        if tokenizer == "byte_level":
            assert ids[: len(alone)] == list(alone)
        expected.append(len(alone))
    assert set(expected) <= set(prompt.breakpoints)


@pytest.mark.parametrize(("template", "tokenizer"), CASES)
def test_conversations_that_part_share_their_ids_up_to_a_boundary(template: str, tokenizer: str) -> None:
    """Another last question: the boundary at the end of the third message is common ground, and the last such."""
    prompt = render(template, tokenizer, messages=MESSAGES)
    other = render(template, tokenizer, messages=[*MESSAGES[:3], {"role": "user", "content": "zebra"}])
    ids, others = prompt.token_ids.tolist(), other.token_ids.tolist()
    shared = next(i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    common = [position for position in prompt.breakpoints if position <= shared]
    assert common and shared - max(common) <= 8
    assert [p for p in other.breakpoints if p <= shared] == common


def test_finding_the_ends_of_many_messages_costs_a_bounded_number_of_renderings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat, counts = ChatTemplate(TOKENIZERS["byte_level"], CHATML), list[int]()
    text_of = ChatTemplate._text

    def counted(self: ChatTemplate, conversation: Any, options: Any) -> str:
        counts.append(len(conversation))
        return text_of(self, conversation, options)

    monkeypatch.setattr(ChatTemplate, "_text", counted)
    for num_messages, num_ends in ((300, 64), (1000, 28), (3000, 14)):
        counts.clear()
        messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "x"} for i in range(num_messages)]
        prompt = chat.render(messages)
        assert sum(counts) <= num_messages + 20_000 + 100
        assert num_ends - 2 <= len(prompt.breakpoints) <= num_ends
        end = TOKENIZERS["byte_level"].encode(chat.render(messages, add_generation_prompt=False).text or "")
        assert prompt.breakpoints[-1] == len(end)


@pytest.mark.parametrize("template", ["chatml", "llama", "user_last", "demo"])
def test_the_system_prompt_ends_at_a_boundary(template: str) -> None:
    prompt = render(template, messages=MESSAGES[:2])
    other = render(template, messages=[MESSAGES[0], {"role": "user", "content": "zebra"}])
    ids, others = prompt.token_ids.tolist(), other.token_ids.tolist()
    shared = next(i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    assert any(shared - 8 <= position <= shared for position in prompt.breakpoints)


def test_the_tool_list_ends_at_a_boundary() -> None:
    prompt = render("demo", messages=[MESSAGES[1]], tools=TOOLS)
    text = TOKENIZERS["byte_level"].decode(
        prompt.token_ids[: prompt.breakpoints[0]].tolist(), skip_special_tokens=False
    )
    assert '"find"' in text and "quick" not in text


def test_boundaries_ascend_and_lie_inside_the_prompt() -> None:
    for template, tokenizer in CASES:
        prompt = render(template, tokenizer, messages=MESSAGES)
        assert list(prompt.breakpoints) == sorted(set(prompt.breakpoints))
        assert prompt.breakpoints[0] > 0 and prompt.breakpoints[-1] < len(prompt.token_ids)


def test_text_parts_become_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "the quick"}, {"type": "text", "text": "fox"}]}]
    assert "the quick\nfox" in render("chatml", messages=parts).text


def test_a_template_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    assert render(str(file), messages=MESSAGES).text == render("chatml", messages=MESSAGES).text


def test_bad_conversations_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidPromptError, match="empty"):
        render("chatml", messages=[])
    with pytest.raises(InvalidPromptError, match="must be from the user"):
        render("user_last", messages=MESSAGES[:3])
    with pytest.raises(InvalidPromptError, match="'role' and 'content'"):
        render("chatml", messages=["hello"])
    with pytest.raises(InvalidPromptError, match=r"role 'user' needs 'content'; given .*'contents'"):
        render("chatml", messages=[{"role": "user", "contents": "hello"}])
    with pytest.raises(InvalidPromptError, match="only text parts"):
        render("chatml", messages=[{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(InvalidPromptError, match="no chat template"):
        ChatTemplate(Tokenizer.wrap(TOKENIZERS["byte_level"].hf)).render(MESSAGES)
    with pytest.raises(ConfigError, match="neither a file nor a Jinja template"):
        render("missing.jinja", messages=MESSAGES)


def test_a_template_that_is_none_is_told_before_a_model_is_loaded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its file and the line that is wrong."""
    monkeypatch.setattr("forkpoint.engine.build.build_worker", None)
    wrong, binary = tmp_path / "wrong.jinja", tmp_path / "binary.jinja"
    wrong.write_text("{{ messages }}\n{{ bad")
    binary.write_bytes(b"\xff")
    for given, says in (
        ("missing.jinja", "chat_template='missing.jinja' is neither a file nor a Jinja template"),
        (str(binary), f"chat_template='{binary}' cannot be read as UTF-8 text"),
        (str(wrong), f"chat_template='{wrong}' is not a Jinja template: unexpected end of template.*line 2"),
        (wrong.read_text(), "^chat_template is not a Jinja template: unexpected end of template.*line 2"),
        ("{{ messages | nonsense }}", "No filter named 'nonsense'"),
    ):
        for without in (False, True):
            with pytest.raises(ConfigError, match=says):
                LLM(str(tiny_model), log_level="warning", chat_template=given, skip_tokenizer_init=without)


def test_templates_by_name(tiny_model: Path, tmp_path: Path) -> None:
    """As in transformers: prompts with tools use `tool_use`, others `default`, and a call may name another."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "additional_chat_templates").mkdir()
    texts = {
        "default": "plain {{ messages[0].content }}",
        "tool_use": "\ufefftools {{ messages[0].content }} <tool_call>\n{{ tools }}",
        "rag": "found for {{ messages[0].content }}",
    }
    for name, text in texts.items():
        path = (
            folder / "chat_template.jinja" if name == "default" else folder / f"additional_chat_templates/{name}.jinja"
        )
        path.write_text(text)
    tokenizer = Tokenizer.load(str(folder))
    said, tool = [{"role": "user", "content": "hi"}], {"type": "function", "function": {"name": "f"}}
    chat = ChatTemplate(tokenizer)
    assert "<tool_call>\n{" in chat.source
    assert chat.render(said).text == "plain hi"
    assert str(chat.render(said, tools=[tool]).text).startswith("tools hi <tool_call>")
    assert chat.replaced("rag", "auto").render(said, tools=[tool]).text == "found for hi"
    assert ChatTemplate(tokenizer, "tool_use").render(said).text == "tools hi <tool_call>\nNone"
    with pytest.raises(ConfigError, match=r"give one of them\. The model's own templates are default, rag, tool_use\."):
        ChatTemplate(tokenizer, "rags")
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{% if %}")
    with pytest.raises(InvalidPromptError, match="the model's chat template tool_use is not a Jinja template"):
        ChatTemplate(Tokenizer.load(str(folder))).render(said, tools=[tool])


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_a_models_own_template_that_is_none_is_told_at_start_and_to_chats_alone(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    values = json.loads((folder / "tokenizer_config.json").read_text())
    wrong = "{{ messages }}\n{% if %}"
    values["chat_template"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    text = wrong if name.endswith(".jinja") else json.dumps({**values, "chat_template": wrong})
    (folder / name).write_text(text)
    says = f"{name} is not a Jinja template: Expected an expression.*, line 2; correct it"
    with LLM(str(folder), max_model_len=256, log_level="warning") as llm:
        assert re.search(f"WARNING.*{folder}.*{says}", capfd.readouterr().err)
        assert llm.generate("the quick", SamplingParams(max_tokens=1))[0].outputs[0].token_ids
        with pytest.raises(InvalidPromptError, match=says) as refused:
            llm.chat(MESSAGES)
        assert str(folder) not in str(refused.value)  # clients are told that


def test_a_template_of_kimis_is_given_ids_of_calls_that_name_the_function() -> None:
    """It shows a call by its id alone."""
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "1"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "g"}}]},
    ]
    text = render(KIMI, messages=messages).text
    for shown in ("begin|>functions.f:0<", "Return of functions.f:0\n1", "begin|>functions.g:1<"):
        assert text.count(shown) == 1


def chat_of(style: str) -> ChatTemplate:
    return ChatTemplate(TOKENIZERS["byte_level"], STYLES[style])


def call(name: str = "f", arguments: Any = '{"x": 1}', call_id: str = "call_0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def say(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def same(style: str, messages: list[dict[str, Any]], as_if: list[dict[str, Any]], **options: Any) -> None:
    """The prompt is what the template, without any help, makes of another conversation."""
    plain = TOKENIZERS["byte_level"].hf.apply_chat_template(
        as_if, chat_template=STYLES[style], tokenize=False, add_generation_prompt=True, **options
    )
    assert chat_of(style).render(messages, **options).text == plain


def test_system_messages_in_any_place() -> None:
    top, note, user, answer = say("system", "top"), say("system", "note"), say("user", "hi"), say("assistant", "yes")
    noted = say("user", "<system>\nnote\n</system>")
    both = say("system", "top\n\nnote")
    same("qwen35", [top, note, user], [both, user])
    same("qwen35", [top, say("developer", "note"), user], [both, user])
    same("qwen35", [top, user, note], [top, user, noted])
    same("qwen35", [top, user, answer, note, user], [top, user, answer, noted, user])
    same("granite", [top, note, user, answer, note, user], [top, note, user, answer, note, user])
    same("granite", [top, user, say("developer", "note")], [top, user, note])
    same("gemma", [top, user, note, answer], [say("user", "top\n\nhi\n\n<system>\nnote\n</system>"), answer])
    same("harmony", [say("developer", "top"), user], [say("developer", "top"), user])
    same("mistral", [top, user], [top, user])  # whose template would drop it once the last message is not a user's
    same("mistral", [top, user, answer, user], [say("user", "top\n\nhi"), answer, user])


def test_system_messages_between_calls_leave_the_reasoning_in_the_prompt() -> None:
    """A coding agent's loop: the template counts a user message as the next question and drops what came before."""
    messages = [say("user", "hi")]
    for number in range(3):
        thought = f"thought {number}"
        messages.append(say("assistant", None, reasoning_content=thought, tool_calls=[call(call_id=f"call_{number}")]))
        messages.append(say("tool", "1", tool_call_id=f"call_{number}"))
        messages.append(say("system", f"note {number}"))
    chat = chat_of("qwen35")
    texts = [chat.render(messages[:end], add_generation_prompt=False).text or "" for end in (4, 7, 10)]
    assert texts[2].startswith(texts[1]) and texts[1].startswith(texts[0])
    assert "<tool_response>\n1\n\n<system>\nnote 0\n</system>\n</tool_response>" in texts[0]
    assert all(f"thought {number}\n" in texts[2] for number in range(3))


def test_calls_and_results_that_a_template_does_not_show() -> None:
    user, result = say("user", "hi"), say("tool", "1", tool_call_id="call_0")
    given, shown = (
        say("assistant", None, tool_calls=[call()]),
        say("assistant", "", tool_calls=[call(arguments={"x": 1})]),
    )
    told = say("user", "<tool_response>\n1\n</tool_response>")
    text = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    same("open", [user, given, result], [user, shown, result])
    same(
        "lfm2", [user, given, result], [user, say("assistant", "<|tool_call_start|>[f(x=1)]<|tool_call_end|>"), result]
    )
    same("gemma", [user, given, result], [user, say("assistant", text), told])
    same("gemma", [user, {**given, "content": "so"}, result], [user, say("assistant", f"so\n{text}"), told])
    same("jamba", [user, given, result], [user, say("assistant", "", tool_calls=[call()]), result])
    numbered = say("assistant", "", tool_calls=[call(arguments={"x": 1}, call_id="000000000")])
    numbered_result = say("tool", "1", tool_call_id="000000000")
    same("mistral", [user, given, result], [user, numbered, numbered_result])
    answer = say("assistant", "")
    same("mistral", [user, given, result, user], [user, numbered, numbered_result, answer, user])
    two = say("assistant", "so", tool_calls=[call(), call("g")])
    split = [say("assistant", "so"), shown, say("assistant", "", tool_calls=[call("g", {"x": 1})])]
    same("llama3", [user, two, result], [user, *split, result])


@pytest.mark.parametrize("arguments", ['{"x": "cut', "[]", "no JSON", '"text"', "{" * 5000])
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    user, given = say("user", "hi"), say("assistant", None, tool_calls=[call(arguments=arguments)])
    same(
        "kimi",
        [user, given],
        [user, say("assistant", "", tool_calls=[call(arguments=arguments, call_id="functions.f:0")])],
    )
    wrapped = say("assistant", "", tool_calls=[call(arguments={"arguments": arguments})])
    same("qwen35", [user, given], [user, wrapped])


def test_neighbours_are_joined_only_where_the_template_refuses_them() -> None:
    user, other, answer = say("user", "hi"), say("user", "there"), say("assistant", "yes")
    same("open", [answer, user, other, answer, answer], [answer, user, other, answer, answer])
    joined = [say("user", ""), answer, say("user", "hi\n\nthere"), say("assistant", "yes\n\nyes")]
    same("gemma", [answer, user, other, answer, answer], joined)
    same("qwen35", [say("system", "top")], [say("system", "top"), say("user", "")])


def test_joined_messages_end_at_breakpoints_and_can_be_continued() -> None:
    chat = chat_of("gemma")
    messages = [say("system", "top"), say("user", "hi"), say("assistant", "yes"), say("user", "go"), say("user", "on")]
    prompt = chat.render(messages)
    ids = prompt.token_ids.tolist()
    shown = [TOKENIZERS["byte_level"].decode(ids[:end], skip_special_tokens=False) for end in prompt.breakpoints]
    ends = ("top\n\nhi<end_of_turn>\n", "yes<end_of_turn>\n", "go\n\non<end_of_turn>\n")
    assert all(any(text.endswith(end) for text in shown) for end in ends)
    for last in ("yes", "yes, <"):
        open_end = [*messages[:2], say("assistant", "well"), say("assistant", last)]
        text = chat.render(open_end, add_generation_prompt=False, continue_final_message=True).text
        assert text is not None and text.endswith(f"<start_of_turn>model\nwell\n\n{last}")


def test_a_refusal_names_the_message() -> None:
    messages = [say("system", "top"), say("user", "hi"), say("narrator", "once"), say("user", "go")]
    with pytest.raises(InvalidPromptError, match=r"at messages\[2\], of the role 'narrator': Unexpected message role"):
        chat_of("qwen35").render(messages)
    with pytest.raises(InvalidPromptError, match=r"at messages\[3\], of the role 'narrator': unknown role narrator"):
        chat_of("jamba").render([say("system", "a"), say("system", "b"), say("user", "hi"), *messages[2:]])


def test_each_kind_of_rewrite_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(LOGGER, "log", lambda _, form, *values: lines.append(form % values))
    chat = chat_of("qwen35")
    for _ in range(2):
        chat.render([say("system", "a"), say("system", "b"), say("user", "hi"), say("system", "c")])
    assert len(lines) == 2 and "one system message" in lines[0] and "<system> tags" in lines[1]


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
HUGE = (
    "{% set ns = namespace(x='a' * 10000000) %}{% for i in range(9) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    "{{ ns.x }}"
)


@pytest.mark.parametrize("template", [ENDLESS, HUGE, "{{ 'a' * 20000000000 }}"])
def test_a_template_without_end_is_stopped_at_start(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.engine.chat.PROBE_CPU_S", 1)
    tokenizer = byte_level()
    with pytest.raises(ConfigError, match=r"the given chat_template takes more than .* GiB of memory"):
        ChatTemplate(tokenizer, template)
    tokenizer.hf.chat_template = template
    with pytest.raises(InvalidPromptError, match=r"the model's chat_template .* takes more than .* --chat-template"):
        ChatTemplate(tokenizer).render([say("user", "hi")])


@pytest.mark.parametrize("template", ['{"architectures": []}', "{% for m in messages %}{{ m.text }}|{% endfor %}"])
def test_a_template_that_ignores_users_is_refused(template: str) -> None:
    tokenizer = byte_level()
    with pytest.raises(ConfigError, match="the given chat_template shows nothing of what a user says"):
        ChatTemplate(tokenizer, template)
    tokenizer.hf.chat_template = template
    with pytest.raises(InvalidPromptError, match=r"the model's chat_template .* shows nothing .* --chat-template"):
        ChatTemplate(tokenizer).render([say("user", "hi")])
