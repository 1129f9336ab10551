"""The families of models whose messages can be taken apart, and how each marks reasoning and calls."""

from collections.abc import Mapping

from crossdock.cluster.api.text.call_forms import (
    CallForm,
    gemma_calls,
    header_calls,
    json_calls,
    known_json_calls,
    python_calls,
    tagged_calls,
)
from crossdock.cluster.api.text.marked_text import MarkedFamily

_THINKS, _ANSWERS = ("<think>",), ("</think>",)
_SPACE = r"\s{0,1024}+"  # of a call that has begun: each token looks at this again, so that it has a bound
_JSON = rf"{_SPACE}(?:[{{\[]|$)"  # how a call in JSON begins
_PYTHON = rf"\[{_SPACE}(?:$|[A-Za-z_][\w.]{{0,255}}+{_SPACE}(?:$|\())"


def _dsml(space: str) -> CallForm:
    """Return the form of DeepSeek since V3.2. V4.1 has a space in its tags."""
    tag = f"｜DSML｜{space}"
    return CallForm(
        f'<{tag}invoke name="',
        tagged_calls(
            r'(?P<name>[^"]+)">',
            rf'\s*<{tag}parameter name="(?P<key>[^"]*)" string="(?P<kind>true|false)">(?P<value>.*?)'
            rf"</{tag}parameter>(?=\s*(?:<{tag}parameter|\Z))",
        ),
        f"</{tag}invoke>",
        is_in_value=lambda body: f"<{tag}parameter" in body,
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
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("</think>", "think"),
    ("[/THINK]", "mistral"),
)

FAMILIES: Mapping[str, MarkedFamily] = {
    "think": MarkedFamily(_THINKS, _ANSWERS),
    "hermes": MarkedFamily(_THINKS, _ANSWERS, (CallForm("<tool_call>", json_calls, "</tool_call>", _JSON),)),
    "qwen3_xml": MarkedFamily(_THINKS, _ANSWERS, (_QWEN_XML,), ("<tool_call>", "</tool_call>"), ends_thinking=True),
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
                    r"\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
                    r"(?P<arguments>\{.*\})\s*"
                ),
                "<|tool_call_end|>",
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
                begins=rf"{_SPACE}(?:call:|c?a?l?l?$)",
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
                header_calls(r"\s*(?P<name>[\w.\-]+)(?:\[CALL_ID\][^\[{]*+)?(?:\[ARGS\])?\s*+(?P<arguments>\{.*\})"),
                begins=rf"{_SPACE}(?:$|\[{_SPACE}(?:$|\{{)|[\w.\-]{{1,256}}+{_SPACE}(?:$|\{{|\[(?:$|[AC])))",
                value=rf"{_SPACE}(?=\[{_SPACE}\{{)|[^\[{{]{{0,4096}}+(?:\[CALL_ID\][^\[{{]{{0,4096}}+)?"
                rf"(?:\[ARGS\]{_SPACE})?(?=\{{)",
            ),
        ),
        inner=("[CALL_ID]", "[ARGS]"),
    ),
    "llama3_json": MarkedFamily(
        calls=(
            CallForm("<|python_tag|>", json_calls, begins=rf"{_SPACE}(?:\{{|$)"),
            CallForm("", known_json_calls, begins=rf"(?:;{_SPACE})?(?:\{{|$)"),
        ),
    ),
    "llama4_pythonic": MarkedFamily(
        calls=(CallForm("", python_calls, begins=_PYTHON, quotes="\"'"),),
        nothing=("<|python_start|>", "<|python_end|>"),
    ),
}
