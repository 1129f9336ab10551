"""The families of models whose messages can be taken apart, and how each marks reasoning and calls."""

import html
from collections.abc import Mapping

from crossdock.cluster.api.text.call_forms import (
    CallForm,
    gemma_calls,
    header_calls,
    json_calls,
    known_json_calls,
    marked_python_calls,
    python_calls,
    tagged_calls,
)
from crossdock.cluster.api.text.gemma_calls import GemmaCall
from crossdock.cluster.api.text.marked_text import MarkedFamily
from crossdock.cluster.api.text.open_calls import SIGN, Parameters
from crossdock.cluster.api.text.python_calls import PYTHON_HEAD, PythonCall

_THINKS = ("<think>",)
_ANSWERS = ("</think>",)
_SPACE = r"\s{0,1024}+"  # of a call that has begun: each token looks at this again, so that it has a bound
_JSON = rf"{_SPACE}(?:[{{\[]|$)"  # how a call in JSON begins
_PYTHON = rf"\[{_SPACE}(?:$|[A-Za-z_][\w.]{{0,255}}+{_SPACE}(?:$|\())"
_WRAPPERS = ("arguments", "input")  # names that DeepSeek may give to all arguments together
_JSON_HEAD = (
    r'\s{0,64}\{\s{0,64}"name"\s{0,64}:\s{0,64}"(?P<name>[^"\\]{1,256})"\s{0,64},\s{0,64}'
    r'"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)


def _dsml(space: str) -> CallForm:
    """Return the form of DeepSeek since V3.2. V4.1 has a space in its tags."""
    tag = f"｜DSML｜{space}"
    begins = f"<{SIGN}?{tag}"
    ends = f"</{SIGN}?{tag}"
    return CallForm(
        f'<{tag}invoke name="',
        tagged_calls(
            r'(?P<name>[^"]+)">',
            rf'\s*<{tag}parameter name="(?P<key>[^"]*)" string="(?P<is_text>true|false)">(?P<value>.*?)'
            rf"</{tag}parameter>(?=\s*(?:<{tag}parameter|\Z))",
            wrappers=_WRAPPERS,
        ),
        f"</{tag}invoke>",
        is_in_value=lambda body: f"<{tag}parameter" in body,
        # The name of the first parameter tells that it does not hold all arguments.
        head=rf'(?P<name>[^"]{{1,256}})">(?=\s{{0,64}}{begins}parameter name="(?!(?:{"|".join(_WRAPPERS)})")[^"]*")',
        parameters=Parameters(
            f"<{tag}parameter",
            rf'{begins}parameter name="(?P<key>[^"]{{0,256}})" string="(?P<is_text>true|false)">',
            f"{ends}parameter>",
        ),
    )


_QWEN_XML = CallForm(
    "<function=",
    tagged_calls(
        r"(?P<name>[^>\n]+)>",
        # A value ends at its tag, or without one at a line that begins the next parameter or ends the call.
        r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)"
        r"(?:\n?</parameter>(?=\s*(?:<parameter=|\Z))|\n(?=<parameter=)|\n\Z)",
    ),
    "</function>",
    is_in_value=lambda body: "<parameter=" in body,
    head=r"(?P<name>[^>\n]{1,256})>(?=\s{0,64}<)",
    parameters=Parameters(
        "<parameter=", r"<parameter=(?P<key>[^>\n]{1,256})>(?:\n|(?=[^\n]))", r"\n?</parameter>", also_ends=r"\n"
    ),
)
_GLM = CallForm(
    "<tool_call>",
    tagged_calls(
        r"\s*(?P<name>[\w.\-]+)(?=\s*(?:<arg_key>|\Z))",
        r"\s*<arg_key>(?P<key>(?:(?!</arg_key>).)*+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        r"(?=\s*(?:<arg_key>|\Z))",
    ),
    "</tool_call>",
    begins=rf"{_SPACE}(?:$|[\w.\-]{{1,256}}+{_SPACE}(?:$|<))",
    is_in_value=lambda body: "<arg_value>" in body,
    head=r"\s{0,64}(?P<name>[\w.\-]{1,256})(?=\s{0,64}<arg_key>)",
    parameters=Parameters(
        "<arg_key>",
        r"<arg_key>(?P<key>(?:(?!</arg_key>).){0,256}+)</arg_key>\s{0,64}<arg_value>",
        "</arg_value>",
    ),
)


def _invoke(tag: str) -> CallForm:
    """Return the form of calls between the tags `invoke` and `parameter`, of a model that writes them so."""
    return CallForm(
        f'<{tag}invoke name="',
        tagged_calls(
            r'(?P<name>[^"]+)">',
            rf'\s*<{tag}parameter name="(?P<key>[^"]*)">(?P<value>.*?)</{tag}parameter>'
            rf"(?=\s*(?:<{tag}parameter|\Z))",
        ),
        f"</{tag}invoke>",
        is_in_value=lambda body: f"<{tag}parameter" in body,
        head=r'(?P<name>[^"]{1,256})">(?=\s{0,64}<)',
        parameters=Parameters(
            f"<{tag}parameter", rf'<{tag}parameter name="(?P<key>[^"]{{0,256}})">', f"</{tag}parameter>"
        ),
    )


_K3 = CallForm(
    '<|open|>call tool="',
    tagged_calls(
        r'(?P<name>[^"]+)"(?: index="\d+")?<\|sep\|>',
        r'<\|open\|>argument key="(?P<key>[^"]*)" type="(?P<kind>\w+)"<\|sep\|>(?P<value>.*?)'
        r"<\|close\|>argument<\|sep\|>(?=<\|open\|>argument|\Z)",
        escapes=True,
    ),
    "<|close|>call<|sep|>",
    is_in_value=lambda body: "<|open|>argument" in body,
    head=rf'(?P<name>[^"]{{1,256}})"(?: index="\d{{1,9}}")?{SIGN}?<\|sep\|>(?={SIGN}?<\|)',
    parameters=Parameters(
        "<|open|>argument",
        rf'{SIGN}?<\|open\|>argument key="(?P<key>[^"]{{0,256}})" type="(?P<kind>\w{{1,64}})"{SIGN}?<\|sep\|>',
        rf"{SIGN}?<\|close\|>argument{SIGN}?<\|sep\|>",
        unescape=html.unescape,
    ),
)

TEMPLATE_SIGNS = (  # what the chat template of a family has, and of those before it has not
    ("<|channel|>", "gpt_oss"),
    ("<|open|>", "kimi_k3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("｜DSML｜", "deepseek_dsml"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_call>", "gemma4"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<steptml:", "step3"),
    ("<|action_start|>", "internlm"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("</think>", "think"),
    ("[/THINK]", "mistral"),
)

FAMILIES: Mapping[str, MarkedFamily] = {
    "think": MarkedFamily(_THINKS, _ANSWERS),
    "hermes": MarkedFamily(
        _THINKS, _ANSWERS, (CallForm("<tool_call>", json_calls, "</tool_call>", _JSON, head=_JSON_HEAD),)
    ),
    "qwen3_xml": MarkedFamily(_THINKS, _ANSWERS, (_QWEN_XML,), ("<tool_call>", "</tool_call>"), ends_thinking=True),
    "seed_oss": MarkedFamily(
        ("<seed:think>",),
        ("</seed:think>",),
        (_QWEN_XML,),
        ("<seed:tool_call>", "</seed:tool_call>"),
        ends_thinking=True,
    ),
    "minimax_m2": MarkedFamily(
        _THINKS, _ANSWERS, (_invoke(""),), ("<minimax:tool_call>", "</minimax:tool_call>"), ends_thinking=True
    ),
    "step3": MarkedFamily(
        _THINKS,
        _ANSWERS,
        (_invoke("steptml:"),),
        (
            "<｜tool_calls_begin｜>",
            "<｜tool_call_begin｜>function<｜tool_sep｜>",
            "<｜tool_call_end｜>",
            "<｜tool_calls_end｜>",
        ),
    ),
    "internlm": MarkedFamily(
        _THINKS,
        _ANSWERS,
        tuple(
            CallForm(f"<|action_start|>{space}<|plugin|>", json_calls, "<|action_end|>", _JSON, head=_JSON_HEAD)
            for space in ("", " ")
        ),
    ),
    "lfm2": MarkedFamily(
        _THINKS,
        _ANSWERS,
        (
            CallForm(
                "<|tool_call_start|>",
                marked_python_calls,
                "<|tool_call_end|>",
                begins=rf"{_SPACE}(?:$|\[)",
                head=PYTHON_HEAD,
                own=lambda marks, schemas: PythonCall(marks, None),
                is_in_value=lambda body: "(" in body or "{" in body,
            ),
        ),
    ),
    "glm": MarkedFamily(_THINKS, _ANSWERS, (_GLM,)),
    "deepseek_v3": MarkedFamily(
        _THINKS,
        _ANSWERS,
        (
            CallForm(
                "<｜tool▁call▁begin｜>",
                header_calls(
                    r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]+)(?:<｜tool▁sep｜>|\s*```json\s*)"
                    r"(?P<arguments>\{.*\})\s*+(?:```)?+\s*"
                ),
                "<｜tool▁call▁end｜>",
                head=r"\s{0,64}(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]{1,256})"
                r"(?:<｜tool▁sep｜>|\s{0,64}```json)\s{0,64}(?=\{)",
            ),
        ),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        inner=("<｜tool▁sep｜>",),
    ),
    "deepseek_dsml": MarkedFamily(
        _THINKS,
        _ANSWERS,
        (_dsml(""), _dsml(" ")),
        tuple(f"<{end}｜DSML｜{name}>" for end in ("", "/") for name in ("function_calls", "tool_calls", " calls")),
    ),
    "kimi_k2": MarkedFamily(
        _THINKS,
        _ANSWERS,
        (
            CallForm(
                "<|tool_call_begin|>",
                header_calls(
                    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"
                    r"(?P<arguments>\{.*\})\s*"
                ),
                "<|tool_call_end|>",
                head=r"\s{0,64}(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256})(?::\d{1,9})?)\s{0,64}"
                r"<\|tool_call_argument_begin\|>\s{0,64}(?=\{)",
            ),
        ),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        inner=("<|tool_call_argument_begin|>",),
        ends_thinking=True,
    ),
    "kimi_k3": MarkedFamily(
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
        (_K3,),
        nothing=(
            *(f"<|{verb}|>{part}<|sep|>" for verb in ("open", "close") for part in ("response", "tools")),
            "<|close|>message<|sep|>",
        ),
    ),
    "gemma4": MarkedFamily(
        ("<|channel>thought",),
        ("<channel|>",),
        (
            CallForm(
                "<|tool_call>",
                gemma_calls,
                "<tool_call|>",
                begins=rf"{_SPACE}(?:(?:call)?:|c?a?l?l?$)",
                head=r"\s{0,64}(?:call)?:(?P<name>[^{\s]{1,256})(?=\{)",
                own=lambda marks, schemas: GemmaCall(marks),
                is_in_value=lambda body: body.count('<|"|>') % 2 == 1,
            ),
        ),
        inner=('<|"|>',),
    ),
    "mistral": MarkedFamily(
        ("[THINK]", "<think>"),
        ("[/THINK]", "</think>"),
        (
            CallForm(
                "[TOOL_CALLS]",
                header_calls(
                    r"\s*(?P<name>[\w.\-]+)(?:\[CALL_ID\](?P<id>[^\[{]*+))?(?:\[ARGS\])?\s*+(?P<arguments>\{.*\})"
                ),
                begins=rf"{_SPACE}(?:$|\[{_SPACE}(?:$|\{{)|[\w.\-]{{1,256}}+{_SPACE}(?:$|\{{|\[(?:$|[AC])))",
                value=rf"{_SPACE}(?=\[{_SPACE}\{{)|[^\[{{]{{0,4096}}+(?:\[CALL_ID\][^\[{{]{{0,4096}}+)?"
                rf"(?:\[ARGS\]{_SPACE})?(?=\{{)",
                head=r"\s{0,64}(?P<name>[\w.\-]{1,256})(?:\[CALL_ID\](?P<id>[^\[{]{0,256}))?"
                r"(?:\[ARGS\])?\s{0,64}(?=\{)",
                ends="bracket",
            ),
        ),
        inner=("[CALL_ID]", "[ARGS]"),
    ),
    "llama3_json": MarkedFamily(
        calls=(
            CallForm("<|python_tag|>", json_calls, begins=rf"{_SPACE}(?:\{{|$)", head=_JSON_HEAD, ends="outer bracket"),
            CallForm(
                "",
                known_json_calls,
                begins=rf"(?:;{_SPACE})?(?:\{{|$)",
                head=rf"(?:;\s{{0,64}})?{_JSON_HEAD}",
                ends="outer bracket",
                in_content='{"name":"',
            ),
        ),
    ),
    "llama4_pythonic": MarkedFamily(
        calls=(CallForm("", python_calls, begins=_PYTHON, quotes="\"'", head=PYTHON_HEAD, own=PythonCall),),
        nothing=("<|python_start|>", "<|python_end|>"),
    ),
}


def family_in(chat_template: str) -> str | None:
    """Return the family whose marker a chat template has; None for none of them."""
    return next((family for sign, family in TEMPLATE_SIGNS if sign in chat_template), None)
