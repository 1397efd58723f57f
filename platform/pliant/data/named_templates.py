"""Chat templates for the formats that many models speak, by name.

Each marks what the assistant generates: the answer and its end marker. They follow the published
formats; a model's own template, where its tokenizer has one, comes before them.
"""

LLAMA3 = """\
{{- bos_token -}}
{%- set opener = 'Given the following functions, please respond with a JSON for a function call \
with its proper arguments that best answers the given prompt.\\n\\nRespond in the format \
{"name": function name, "parameters": dictionary of argument name and its value}. \
Do not use variables.\\n\\n' -%}
{%- set offered = namespace(left=tools or []) -%}
{%- for message in messages -%}
  {%- set role = 'ipython' if message.role == 'tool' else message.role -%}
  {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}
    {%- if message.tool_calls -%}
      {%- if message.tool_calls | length > 1 -%}
        {{- raise_exception('it shows one function call at a time') -}}
      {%- endif -%}
      {%- set call = message.tool_calls[0].function -%}
      {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' -}}
    {%- else -%}
      {{- message.content | trim -}}
    {%- endif -%}
    {{- '<|eot_id|>' -}}
    {%- endgeneration -%}
  {%- else -%}
    {%- if message.role == 'user' and offered.left -%}
      {{- opener -}}
      {%- for tool in offered.left -%}
        {{- tool | tojson(indent=4) + '\\n\\n' -}}
      {%- endfor -%}
      {%- set offered.left = [] -%}
    {%- endif -%}
    {{- message.content | trim + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

QWEN3 = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') -}}
  {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
  {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
  {%- for tool in tools -%}
    {{- '\\n' + tool | tojson -}}
  {%- endfor -%}
  {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and ' -}}
  {{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' -}}
  {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' -}}
{%- elif system -%}
  {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set query = namespace(last=messages | length - 1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- set query.last = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {%- set content = message.content or '' -%}
    {%- set thoughts = message.reasoning_content or '' -%}
    {%- if not thoughts and '</think>' in content -%}
      {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- generation -%}
    {%- if loop.index0 > query.last and (loop.last or thoughts) -%}
      {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
    {%- else -%}
      {{- content -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n' if content or not loop.first else '' -}}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user' if loop.previtem is undefined or loop.previtem.role != 'tool' -}}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' -}}
  {%- elif message.role == 'user' or not loop.first -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

GEMMA = """\
{{- bos_token -}}
{%- set system = messages[0].role == 'system' -%}
{%- for message in (messages[1:] if system else messages) -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) or message.tool_calls -%}
    {{- raise_exception('it shows user and assistant in turns, and no function calls') -}}
  {%- endif -%}
  {%- if message.role == 'assistant' -%}
    {{- '<start_of_turn>model\\n' -}}
    {%- generation -%}
    {{- message.content | trim + '<end_of_turn>' -}}
    {%- endgeneration -%}
    {{- '\\n' -}}
  {%- else -%}
    {{- '<start_of_turn>user\\n' -}}
    {{- messages[0].content | trim + '\\n\\n' if system and loop.first -}}
    {{- message.content | trim + '<end_of_turn>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

MISTRAL = """\
{{- bos_token -}}
{%- set system = messages[0].role == 'system' -%}
{%- for message in (messages[1:] if system else messages) -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) or message.tool_calls -%}
    {{- raise_exception('it shows user and assistant in turns, and no function calls') -}}
  {%- endif -%}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}
    {{- ' ' + message.content | trim + '</s>' -}}
    {%- endgeneration -%}
  {%- else -%}
    {{- '[INST] ' -}}
    {{- messages[0].content + '\\n\\n' if system and loop.first -}}
    {{- message.content + ' [/INST]' -}}
  {%- endif -%}
{%- endfor -%}
"""

SOURCES = {"llama3": LLAMA3, "qwen3": QWEN3, "gemma": GEMMA, "mistral": MISTRAL}
