"""Chat templates for tests, none of which says what is generated.

They do what published templates do that makes answers hard to find: trim, drop thoughts, show tools
at the last question, merge turns, ignore that an answer is asked for.
"""

import re

from pliant.data.named_templates import SOURCES


def unmarked(source: str) -> str:
    """A template without its generation markers."""
    return re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)


BARE = {f"{name}, unmarked": unmarked(source) for name, source in SOURCES.items()}

LLAMA31 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) + "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content | tojson }}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""

THINKING = """\
{{ bos_token }}{% for message in messages %}\
{% if message.role == 'assistant' %}\
{{ '<Assistant>' + message.content.split('</think>')[-1] + '<end>' }}\
{% else %}{{ '<User>' + message.content }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<Assistant><think>\\n' }}{% endif %}
"""
"""Drops the thoughts of every answer, and asks for them."""

EMPTY_THOUGHTS = """\
{{ bos_token }}{% for message in messages %}\
{% if message.role == 'assistant' %}\
{% set thoughts = message.reasoning_content if loop.last and message.reasoning_content %}\
<|im_start|>assistant
<think>{{ '\\n' + thoughts + '\\n' if thoughts }}</think>{{ message.content }}\
{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}\
<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}\
{# tools are known #}
"""
"""Leaves a trace of the thoughts that it drops, and asks for them."""

END_OF_ALL = """\
{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}
"""
"""Ends the whole chat once more."""

RETURNING = """\
{% for message in messages %}\
{% if message.role == 'tool' %}<result>{{ message.content }}</result>\
{% else %}<|turn>{{ message.role }}
{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}<turn|>
{% endif %}{% endfor %}\
{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>assistant
{% endif %}
"""
"""Does not ask after a tool's result. There are no tools in it otherwise."""

TOOLS_LAST = """\
{{ bos_token }}{% for message in messages %}\
{% if message.role == 'assistant' %}\
{% if message.tool_calls %}[CALLS] \
{{ message.tool_calls | map(attribute='function') | list | tojson }}\
{% else %}{{ message.content }}{% endif %}</s>\
{% elif message.role == 'tool' %}[RESULT] {{ message.content }}[/RESULT]\
{% else %}\
{% set later = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}\
{% if tools and not later %}[TOOLS] {{ tools | tojson }}[/TOOLS]{% endif %}\
[INST] {{ message.content }}[/INST]{% endif %}{% endfor %}
"""
"""Shows the tools before the last question, and has no header to ask with."""

HEADLESS = """\
{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<end>
{% endfor %}
"""
"""Has headers, and no way to ask for an answer."""

MERGING = """\
{% for message in messages %}\
{% if loop.previtem is undefined or loop.previtem.role != message.role %}\
{{ '<end>' if not loop.first }}<{{ message.role }}>{% endif %}{{ message.content }}\
{% endfor %}{{ '<end>' }}{{ '<assistant>' if add_generation_prompt }}
"""
"""Puts turns of one role into one turn."""

FORGETFUL = """\
{% for message in messages if message.role != 'system' %}\
<{{ message.role }}>{{ message.content }}<end>{% endfor %}\
{{ '<assistant>' if add_generation_prompt }}
"""
"""Leaves out system prompts."""

MACRO = """\
{% macro said(message) %}<{{ message.role }}>{% if message.role == 'assistant' %}\
{% generation %}{{ message.content }}<end>{% endgeneration %}\
{% else %}{{ message.content }}<end>{% endif %}{% endmacro %}\
{% for message in messages %}{{ said(message) | trim }}{% endfor %}\
{{ '<assistant>' if add_generation_prompt }}
"""
"""Marks what is generated, within a macro and a filter."""
