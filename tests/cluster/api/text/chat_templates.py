"""Chat templates, each of the kind that a family of public models has: which roles and calls they show, how, and what
they refuse. Their words are shorter."""

_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# Any role, and no calls: SmolLM2, Zephyr.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}" + _OPEN
)

# Only roles that it knows. Reasoning after the last question alone.
QWEN3 = (
    """{% if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools {{ tools | tojson }}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}
{% endif %}{% endfor %}
{% for m in messages %}{% set content = m.content if m.content is string else '' %}
{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content is string and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ content.split('</think>')[-1].lstrip('\n') }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}"""
    + _OPEN
)

# Refuses unknown roles, and a system message that is not the first.
QWEN35 = (
    """{% if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'system' %}
{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{% elif m.role == 'user' %}<|im_start|>user
{{ m.content | trim }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content | trim }}{% for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content | trim }}
</tool_response><|im_end|>
{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}"""
    + _OPEN
)

# One call in a message, which then has no text.
LLAMA3 = """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
<|start_header_id|>system<|end_header_id|>

{% if tools %}Environment: ipython <|python_tag|> {{ tools | tojson }}{% endif %}{{ system }}<|eot_id|>
{%- for m in messages %}{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if not m.tool_calls | length == 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}
{{- '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# The system message stands in the last message, if that is a user's; roles alternate; ids have nine characters.
MISTRAL = """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% set ns = namespace(index=0) %}
{%- for m in rest %}{% if not (m.role == 'tool' or (m.tool_calls is defined and m.tool_calls is not none)) %}
{%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{%- for m in rest %}{% if m['role'] == 'user' %}
{%- if loop.last and system is defined %}{{ '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}
{%- else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] }}
{%- if not call.id is defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- ', "id": "' + call.id + '"}' }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ']</s>' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '</s>' }}
{%- elif m['role'] == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | string + ', ' }}
{%- if not m.tool_call_id is defined or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '"call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"""

# No system message, alternating roles, no calls.
GEMMA2 = """{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GEMMA4 = """{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>{{ m.content }}<tool_response|>
{%- else %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}{% for call in m.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{
{%- for key, value in call.function.arguments | items %}{{ key }}:<|"|>{{ value }}<|"|>{% endfor %}}<tool_call|>
{%- endfor %}<turn|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""

# The newest system message replaces those before it.
DEEPSEEK_R1 = """{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}
{%- set ns.system = m['content'] %}{% endif %}{% endfor %}{{ ns.system }}
{%- for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}
{%- elif m['role'] == 'assistant' and m['content'] is not none and not m.tool_calls %}
{{- '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- elif m['role'] == 'assistant' %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{% for call in m['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call['function']['name'] + '\n```json\n' }}
{{- call['function']['arguments'] | tojson + '\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}
{%- elif m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

DEEPSEEK_V32 = """{% for m in messages %}{% if m.role == 'tool' %}<function_results>{{ m.content }}</function_results>
{%- elif m.role in ('system', 'developer') %}{{ m.content }}
{%- else %}<｜{{ m.role }}｜>{{ m.content }}{% if m.tool_calls %}<｜DSML｜function_calls>
{%- for call in m.tool_calls %}<｜DSML｜invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments | items %}<｜DSML｜parameter name="{{ key }}" string="true">{{ value }}
{%- endfor %}</｜DSML｜parameter></｜DSML｜invoke>{% endfor %}</｜DSML｜function_calls>{% endif %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<｜assistant｜>{% endif %}"""

# Three roles; all others are left out.
PHI3 = """{% for m in messages %}{% if m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + '<|end|>\n' }}
{%- elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}
{%- elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

# Named templates. That of documents has no tools.
_TURNS = """{% for m in messages %}{% if m['role'] == 'user' %}<|USER|>{{ m['content'] }}
{%- elif m['role'] == 'system' %}<|SYSTEM|>{{ m['content'] }}
{%- elif m['role'] == 'assistant' %}<|CHATBOT|>{{ m['content'] }}{% for call in calls and m.tool_calls or [] %}
{{- call.function | tojson }}{% endfor %}{% elif calls and m['role'] == 'tool' %}<|RESULT|>{{ m['content'] }}
{%- endif %}{% endfor %}"""
COMMAND_R = {
    "default": _TURNS,
    "tool_use": "{% set calls = true %}{{ tools | tojson }}" + _TURNS,
    "rag": _TURNS
    + """<results>{% for document in documents %}Document: {{ loop.index0 }}
{% for key, value in document.items() %}{{ key }}: {{ value }}
{% endfor %}{% endfor %}</results>""",
}

GLM = """[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>
{% if m.content.strip() %}{{ m.content.strip() }}{% endif %}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% elif m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>{% elif m.role == 'system' %}<|system|>
{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

# The name of a function stands in the id of the call alone.
KIMI_K2 = """{% for m in messages %}{% if m.role == 'user' %}<|im_user|>user<|im_middle|>
{%- elif m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>
{%- else %}<|im_system|>{{ m.name or m.role }}<|im_middle|>{% endif %}
{%- if m.role == 'assistant' and m.tool_calls %}{{ m.content }}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}{{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}
{{- call['function']['arguments'] | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- elif m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' + m.content }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

KIMI_K3 = """{% for m in messages %}<|open|>message role="{{ m.role }}"<|sep|>{{ m.content }}
{%- for call in m.tool_calls or [] %}<|open|>call tool="{{ call.function.name }}" index="{{ loop.index }}"<|sep|>
{%- for key, value in call.function.arguments | items %}<|open|>argument key="{{ key }}" type="string"<|sep|>{{ value }}
{%- endfor %}<|close|>argument<|sep|><|close|>call<|sep|>{% endfor %}<|close|>message<|sep|>{% endfor %}
{%- if add_generation_prompt %}<|open|>message role="assistant"<|sep|>{% endif %}"""

LLAMA4 = """{% for m in messages %}<|header_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|header_end|>

{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% if m.tool_calls %}<|python_start|>[
{%- for call in m.tool_calls %}{{ call.function.name }}({% for key in call.function.arguments %}{{ key }}=
{{- call.function.arguments[key] | tojson }}{% endfor %}){% endfor %}]<|python_end|>{% endif %}<|eot|>{% endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""

# One call in a message, and no text beside reasoning; system and developer are one.
GPT_OSS = """{% if messages[0].role in ('developer', 'system') %}
{{- '<|start|>developer<|message|>' + messages[0].content }}<|end|>
{%- set messages = messages[1:] %}{% endif %}{% set last = namespace(name=none) %}
{%- for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}
{%- elif m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- elif m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}<|call|>{% set last.name = call.name %}
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no previous tool call') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}<|end|>
{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def _with_calls(before: str, call: str, after: str) -> str:
    """Return a template in ChatML with calls in a form of their own, and texts before and after all calls."""
    calls = f"{before}{{% for call in m.tool_calls %}}{call}{{% endfor %}}{after}"
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}"
        + calls
        + "{% endif %}<|im_end|>\n{% endfor %}"
        + _OPEN
    )


def _parameters(before: str, after: str) -> str:
    return (
        "{% for key, value in call.function.arguments | items %}"
        + before
        + "{{ value if value is string else value | tojson }}"
        + after
        + "{% endfor %}"
    )


SEED_OSS = _with_calls(
    "",
    "<seed:tool_call>\n<function={{ call.function.name }}>\n"
    + _parameters("<parameter={{ key }}>", "</parameter>\n")
    + "</function>\n</seed:tool_call>",
    "",
)
MINIMAX_M2 = _with_calls(
    "<minimax:tool_call>\n",
    '<invoke name="{{ call.function.name }}">\n'
    + _parameters('<parameter name="{{ key }}">', "</parameter>\n")
    + "</invoke>\n",
    "</minimax:tool_call>",
)
STEP3 = _with_calls(
    "<｜tool_calls_begin｜>\n",
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ call.function.name }}">\n'
    + _parameters('<steptml:parameter name="{{ key }}">', "</steptml:parameter>\n")
    + "</steptml:invoke><｜tool_call_end｜>\n",
    "<｜tool_calls_end｜>",
)
INTERNLM = _with_calls(
    "",
    '<|action_start|><|plugin|>\n{"name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}<|action_end|>",
    "",
)
LFM2 = _with_calls(
    "<|tool_call_start|>[",
    "{{ call.function.name }}("
    "{% for key in call.function.arguments %}{{ key }}={{ call.function.arguments[key] | tojson }}{% endfor %})",
    "]<|tool_call_end|>",
)

TEMPLATES = {
    "seed_oss": SEED_OSS,
    "minimax_m2": MINIMAX_M2,
    "step3": STEP3,
    "internlm": INTERNLM,
    "lfm2": LFM2,
    "chatml": CHATML,
    "qwen3": QWEN3,
    "qwen3.5": QWEN35,
    "llama3": LLAMA3,
    "llama4": LLAMA4,
    "mistral": MISTRAL,
    "gemma2": GEMMA2,
    "gemma4": GEMMA4,
    "deepseek_r1": DEEPSEEK_R1,
    "deepseek_v3.2": DEEPSEEK_V32,
    "phi3": PHI3,
    "command_r": COMMAND_R,
    "glm": GLM,
    "kimi_k2": KIMI_K2,
    "kimi_k3": KIMI_K3,
    "gpt_oss": GPT_OSS,
}
