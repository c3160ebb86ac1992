"""Chat templates in the styles of published models: what they refuse, leave out and reorder is what those do."""

from __future__ import annotations

from typing import Final

# ChatML that shows everything that a message can have, in its place.
OPEN: Final = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# ChatML that reads content as parts alone.
PARTS: Final = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% for part in m.content %}{{ part['text'] }}{% endfor %}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Qwen3.5: the system message comes first, some user must ask, reasoning is shown since the last question alone,
# arguments are mappings, and neighbouring results share a user's turn.
QWEN35: Final = """
{%- if not messages %}{{ raise_exception('No messages provided.') }}{% endif %}
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Reply as <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
{%- if messages[0].role == 'system' %}

{{ messages[0].content | trim }}{% endif %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content | trim }}<|im_end|>
{% endif %}
{%- set ns = namespace(searching=true, query=-1) %}
{%- for m in messages[::-1] %}
{%- if ns.searching and m.role == 'user' %}
{%- set text = m.content | trim %}
{%- if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
{%- set ns.searching = false %}{% set ns.query = messages | length - loop.index %}
{%- endif %}{% endif %}{% endfor %}
{%- if ns.searching %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for m in messages %}
{%- set text = m.content | trim %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- elif m.role == 'user' %}<|im_start|>user
{{ text }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.query %}<think>
{{ (m.reasoning_content or '') | trim }}
</think>

{% endif %}{{ text }}
{%- for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ text }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}{{ raise_exception('Unexpected message role.') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

# Mistral 7B v0.3: user and assistant alternate (calls and results do not count), the system message is shown with the
# last user's, ids have nine characters, content next to calls is not shown.
MISTRAL: Final = """
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = none, messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for m in rest %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
{%- endif %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}[INST] {{ system + '\n\n' if loop.last and system else '' }}{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
[TOOL_RESULTS] {"content": {{ m.content }}}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

# Mistral 7B v0.1: nothing but users and assistants, which alternate.
MISTRAL_OLD: Final = """{{ bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

# Llama 3.1: one call a message, whose content is not shown; a first message that is not the system's is taken for a
# user's where there are tools; any role is shown by its name.
LLAMA3: Final = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' + system + '<|eot_id|>' }}
{%- if tools %}
{%- if not rest %}
{{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}{% endif %}
<|start_header_id|>user<|end_header_id|>

{{ tools | tojson }}

{{ rest[0].content | trim }}<|eot_id|>
{%- set rest = rest[1:] %}{% endif %}
{%- for m in rest %}
{%- if not (m.role == 'ipython' or m.role == 'tool' or m.tool_calls) %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson if m.content is mapping or m.content is iterable else m.content }}<|eot_id|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Gemma 2: no system messages, strict alternation, the assistant is called model.
GEMMA: Final = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# LFM2.5: any role by its name, results in tags, calls not at all.
LFM2: Final = """{{ bos_token }}
{%- set system, rest = '', messages %}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}{% endif %}
{%- if tools %}{% set system = system + '\nList of tools: <|tool_list_start|>' + tools | tojson + '<|tool_list_end|>' %}
{%- endif %}
{%- if system %}{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}{% endif %}
{%- for m in rest %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'tool' %}{{ '<|tool_response_start|>' + m.content + '<|tool_response_end|>' }}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{#- calls are written between <|tool_call_start|> and its end -#}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Granite 4: results are a user's, neighbouring ones in one turn, and unknown roles leave no trace.
GRANITE: Final = """
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = 'You are a helpful assistant.', messages %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system }}{{ tools | tojson if tools }}<|end_of_text|>
{% for m in rest %}
{%- if m.role == 'user' or m.role == 'system' %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|start_of_role|>assistant<|end_of_role|>' + m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end_of_text|>
{% elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}<|start_of_role|>user<|end_of_role|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|end_of_text|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

# Jamba 1.5: arguments are texts, which are concatenated; system messages only at the beginning.
JAMBA: Final = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{{- '<|bom|><|system|> ' + system }}{{ tools | tojson if tools }}<|eom|>
{%- for m in rest %}
{%- if m.role == 'user' %}{{ '<|bom|><|user|> ' + m.content + '<|eom|>' }}
{%- elif m.role == 'assistant' %}<|bom|><|assistant|> {{ m.content }}
{%- if m.tool_calls %}<tool_calls>[
{%- for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}' }}
{%- endfor %}]</tool_calls>{% endif %}<|eom|>
{%- elif m.role == 'tool' %}{{ '<|bom|><|tool|> ' + m.content + '<|eom|>' }}
{%- else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|bom|><|assistant|>{% endif %}"""

# Kimi K2: a call is shown by its id and its arguments.
KIMI: Final = """
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{% endif %}
{%- if m.role == 'system' %}<|im_system|>{% elif m.role == 'user' %}<|im_user|>
{%- elif m.role == 'assistant' %}<|im_assistant|>{% else %}<|im_system|>{% endif %}{{ m.role }}<|im_middle|>
{%- if m.tool_calls %}{{ m.content }}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{{ m.content }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

# Nemotron Nano 2: one system message, before all others; results in a list; whatever role is left is the assistant's.
NEMOTRON_H: Final = """
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{{- '<SPECIAL_10>System\n' + system.strip() }}
{%- if tools %}{{ '<AVAILABLE_TOOLS>' + tools | tojson + '</AVAILABLE_TOOLS>' }}{% endif %}
{%- for m in rest %}
{%- if m.role == 'user' %}{{ '\n<SPECIAL_11>User\n' + m.content.strip() }}
{%- elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '\n<SPECIAL_11>User\n<TOOL_RESPONSE>[' }}{% endif %}
{{- m.content }}{{ ', ' if not loop.last and loop.nextitem.role == 'tool' else ']</TOOL_RESPONSE>' }}
{%- else %}
{%- set text = m.content.split('</think>')[-1].strip() %}
{{- '\n<SPECIAL_11>Assistant\n' + text }}
{%- if m.tool_calls %}{{ '<TOOLCALL>[' }}
{%- for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- endfor %}]</TOOLCALL>{% endif %}{{ '\n<SPECIAL_12>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '\n<SPECIAL_11>Assistant\n' }}{% endif %}"""

# gpt-oss: one developer message at the beginning, results only right behind calls, one call a message.
HARMONY: Final = """<|start|>system<|message|>Knowledge cutoff: 2024-06<|end|>
{%- if messages[0].role in ['developer', 'system'] %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{%- if system or tools %}<|start|>developer<|message|>{{ '# Instructions\n\n' + system if system }}
{{- tools | tojson if tools }}<|end|>{% endif %}
{%- set last = namespace(name=none) %}
{%- for m in rest %}
{%- if m.role == 'assistant' %}
{%- if m.tool_calls %}
{%- if m.content or m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content + (m.thinking or '')) + '<|end|>' }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}{% set last.name = call.name %}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- set last.name = none %}{% endif %}
{%- elif m.role == 'tool' %}
{%- if last.name is none %}
{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}
{%- endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|message|>' + m.content | tojson + '<|end|>' }}
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

STYLES: Final = {
    "open": OPEN,
    "parts": PARTS,
    "qwen35": QWEN35,
    "mistral": MISTRAL,
    "mistral_old": MISTRAL_OLD,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "lfm2": LFM2,
    "granite": GRANITE,
    "jamba": JAMBA,
    "kimi": KIMI,
    "nemotron_h": NEMOTRON_H,
    "harmony": HARMONY,
}
